// A timeline as ui.perfetto.dev and chrome://tracing read it: the Trace Event Format's JSON.

#ifndef SIGNPOST_TRACE_CHROME_TRACE_H_
#define SIGNPOST_TRACE_CHROME_TRACE_H_

#include <iosfwd>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "trace/timeline.h"

namespace signpost::trace {

// Processes are the timeline's. In each, what happens one after the other is one row; exchanges and
// rounds, of which several are under way at a time, have as many rows as that takes. Arrows are
// flow events. "otherData" has the hosts' clocks, and of each process how many events are missing.
void WriteChromeTrace(const Timeline& timeline, std::ostream& to);

// What WriteChromeTrace has written; of others' traces, what has our names. `name` is what messages
// call it. INVALID_ARGUMENT when it is not JSON, or not of a trace.
absl::StatusOr<Timeline> ReadChromeTrace(std::istream& from, absl::string_view name);

}  // namespace signpost::trace

#endif  // SIGNPOST_TRACE_CHROME_TRACE_H_
