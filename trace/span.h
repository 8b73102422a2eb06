// Events whose times come from where they are in the code.

#ifndef SIGNPOST_TRACE_SPAN_H_
#define SIGNPOST_TRACE_SPAN_H_

#include <algorithm>
#include <cstdint>

#include "absl/time/time.h"
#include "trace/event.h"
#include "trace/recorder.h"

namespace signpost::trace {

// From its construction to its destruction. None of these costs more than a load and a branch while
// tracing is off, and none is thread-safe.
class Span {
 public:
  explicit Span(const Event& event) : Span(event, IsOn() ? Now() : 0) {}
  // That has begun before; 0: while tracing was off.
  Span(const Event& event, int64_t begin) : event_(event), is_on_(begin != 0 && IsOn()) {
    event_.begin = begin;
  }
  ~Span() {
    if (!is_on_) return;
    event_.end = Now();
    Record(event_);
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  Event event_;
  const bool is_on_;
};

// One after the other, without gaps.
class Laps {
 public:
  Laps() : last_(IsOn() ? Now() : 0) {}

  // From the end of the lap before, or the construction, to now; or only for that long, and not
  // beyond now.
  void Record(Event event, absl::Duration duration = absl::InfiniteDuration()) {
    if (!IsOn()) return;
    event.begin = last_;
    event.end = Now();
    if (duration < absl::Nanoseconds(event.end - event.begin)) {
      event.end = event.begin + absl::ToInt64Nanoseconds(duration);
    }
    last_ = event.end;
    trace::Record(event);
  }

 private:
  int64_t last_;
};

// Now.
inline void RecordMoment(Event event) {
  if (!IsOn()) return;
  event.begin = event.end = Now();
  Record(event);
}

}  // namespace signpost::trace

#endif  // SIGNPOST_TRACE_SPAN_H_
