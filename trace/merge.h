// From the recordings of a job's processes to one file.

#ifndef SIGNPOST_TRACE_MERGE_H_
#define SIGNPOST_TRACE_MERGE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "trace/timeline.h"

namespace signpost::trace {

// `inputs` are recordings, and directories in which some are. NOT_FOUND when there is none;
// otherwise as ReadRecording.
absl::StatusOr<Timeline> ReadRecordings(const std::vector<std::string>& inputs);

// What `signpost trace merge` has written, or recordings or directories as above.
absl::StatusOr<Timeline> ReadTrace(const std::vector<std::string>& inputs);

// Replaces the file, or leaves what was there.
absl::Status WriteTrace(const Timeline& timeline, const std::string& path);

// Lines for a person: what is in it, what is missing, and how well the hosts' clocks are known.
std::vector<std::string> Describe(const Timeline& timeline);

}  // namespace signpost::trace

#endif  // SIGNPOST_TRACE_MERGE_H_
