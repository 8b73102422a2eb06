// Where events are drawn.

#ifndef SIGNPOST_TRACE_ROWS_H_
#define SIGNPOST_TRACE_ROWS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "trace/timeline.h"

namespace signpost::trace {

// The rows of one process, and in which of them each of its events is. In a row, any two events
// are one after the other, or one within the other.
struct Rows {
  std::vector<std::string> names;  // by row
  std::vector<uint32_t> row_of;    // by event
};

Rows RowsOf(const Process& process);

}  // namespace signpost::trace

#endif  // SIGNPOST_TRACE_ROWS_H_
