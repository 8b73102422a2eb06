// From the recordings of a job's processes to one file.

#ifndef SIGNPOST_TRACE_MERGE_H_
#define SIGNPOST_TRACE_MERGE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "trace/timeline.h"

namespace signpost::trace {

// `inputs` are recordings, and directories in which some are. NOT_FOUND when there is none;
// INVALID_ARGUMENT for a directory that cannot be listed; otherwise as ReadRecording. Of
// directories, what cannot be read is left out, unless that is all.
absl::StatusOr<Timeline> ReadRecordings(const std::vector<std::string>& inputs);

// What `signpost trace merge` has written, or recordings or directories as above.
absl::StatusOr<Timeline> ReadTrace(const std::vector<std::string>& inputs);

// INVALID_ARGUMENT when a trace must not be written there: it is a directory, a device, a FIFO or
// another thing that is no file, a link that leads to none, a recording, or one of `inputs`, as the
// first of several recordings is.
absl::Status CheckOutput(const std::string& path, const std::vector<std::string>& inputs);

// Replaces the file, which may be behind symbolic links, or leaves what was there. INVALID_ARGUMENT
// as CheckOutput, and when it cannot be written.
absl::Status WriteTrace(const Timeline& timeline, const std::string& path);

// Lines for a person: what is in it, what is missing, and how well the hosts' clocks are known.
std::vector<std::string> Describe(const Timeline& timeline);

}  // namespace signpost::trace

#endif  // SIGNPOST_TRACE_MERGE_H_
