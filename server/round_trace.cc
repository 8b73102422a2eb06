#include "server/round_trace.h"

#include "proto/codec.h"
#include "trace/recorder.h"
#include "trace/span.h"

namespace signpost {

RoundTrace::RoundTrace(const FrameHeader& first) {
  if (!trace::IsOn()) return;
  round_.kind = trace::Kind::kRound;
  round_.begin = trace::Now();
  round_.epoch = first.epoch();
  round_.step = first.step();
  round_.chunk = first.chunk();
  round_.job = trace::LabelOf(first.job());
}

trace::Event RoundTrace::EventOf(trace::Kind kind) const {
  trace::Event event = round_;
  event.kind = kind;
  return event;
}

void RoundTrace::Record(trace::Kind kind, int64_t begin, int64_t end) const {
  trace::Event event = EventOf(kind);
  event.begin = begin;
  event.end = end;
  trace::Record(event);
}

void RoundTrace::AddFrame(const FrameHeader& header, uint64_t bytes) {
  if (!trace::IsOn()) return;
  round_.rank = header.rank();
  trace::Event frame = EventOf(trace::Kind::kFrame);
  frame.codec = trace::LabelOf(CodecName(header.codec()));
  frame.bytes = bytes;
  trace::RecordMoment(frame);
}

void RoundTrace::AddMissing(uint32_t rank) {
  if (!trace::IsOn()) return;
  round_.rank = rank;
  trace::RecordMoment(EventOf(trace::Kind::kMissing));
}

void RoundTrace::SetComplete() {
  if (!trace::IsOn() || complete_ != 0) return;
  complete_ = trace::Now();
  Record(trace::Kind::kGather, round_.begin, complete_);
}

void RoundTrace::BeginAverage() {
  if (!trace::IsOn()) return;
  average_begin_ = trace::Now();
  Record(trace::Kind::kHold, complete_, average_begin_);
}

void RoundTrace::EndAverage() {
  if (trace::IsOn()) Record(trace::Kind::kAverage, average_begin_, trace::Now());
}

void RoundTrace::AddAnswer(uint32_t rank, uint64_t bytes) {
  if (!trace::IsOn()) return;
  trace::Event answer = EventOf(trace::Kind::kAnswer);
  answer.rank = rank;
  answer.bytes = bytes;
  trace::RecordMoment(answer);
}

void RoundTrace::Close() {
  if (trace::IsOn()) Record(trace::Kind::kRound, round_.begin, trace::Now());
}

}  // namespace signpost
