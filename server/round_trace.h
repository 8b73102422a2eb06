// What a trace has of a round.

#ifndef SIGNPOST_SERVER_ROUND_TRACE_H_
#define SIGNPOST_SERVER_ROUND_TRACE_H_

#include <cstdint>

#include "proto/frame.h"
#include "trace/event.h"

namespace signpost {

// Records an open round of a chunk as it goes. While tracing is off it does nothing. Not
// thread-safe.
class RoundTrace {
 public:
  // The round of that frame's step begins.
  explicit RoundTrace(const FrameHeader& first);

  // A frame has been contributed.
  void AddFrame(const FrameHeader& header, uint64_t bytes);
  // The round closes without that rank, after it was waited for.
  void AddMissing(uint32_t rank);
  // No frame is missing any more. May be called again, to no effect.
  void SetComplete();
  void BeginAverage();
  void EndAverage();
  void AddAnswer(uint32_t rank, uint64_t bytes);
  // All are answered.
  void Close();

 private:
  trace::Event EventOf(trace::Kind kind) const;
  void Record(trace::Kind kind, int64_t begin, int64_t end) const;

  trace::Event round_;    // its rank is the last that contributed, or was missing
  int64_t complete_ = 0;  // the time, or not yet
  int64_t average_begin_ = 0;
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_ROUND_TRACE_H_
