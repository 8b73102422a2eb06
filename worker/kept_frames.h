// One chunk's frames that its aggregator may ask for again.

#ifndef SIGNPOST_WORKER_KEPT_FRAMES_H_
#define SIGNPOST_WORKER_KEPT_FRAMES_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "proto/frame.h"

namespace signpost {

// A frame as it was sent, and what became of it.
struct SentFrame {
  FrameHeader header;
  std::shared_ptr<const Payload> payload;
  Codec round_codec = CODEC_UNSPECIFIED;  // of its round; the header's may be SKIP
  bool answered = false;
  uint32_t answer_crc32c = 0;  // with `answered`; of the answer's payload
};

// Frames of consecutive steps: those since the step from which on nothing is durable yet, and
// always the one that was not answered. Not thread-safe.
class KeptFrames {
 public:
  bool empty() const { return frames_.empty(); }
  const SentFrame& newest() const { return frames_.back(); }              // requires !empty()
  uint64_t oldest_step() const { return frames_.front().header.step(); }  // requires !empty()

  uint64_t answered_steps() const { return newest().header.step() + (newest().answered ? 1 : 0); }

  // The frame of the step after the newest.
  void Add(SentFrame frame) { frames_.push_back(std::move(frame)); }

  // Null if it is not here.
  SentFrame* Find(uint64_t step) {
    if (frames_.empty() || step < oldest_step() || step > newest().header.step()) return nullptr;
    return &frames_[step - oldest_step()];
  }

  // Drops the answered frames of steps before `step`.
  void Forget(uint64_t step) {
    while (!frames_.empty() && frames_.front().answered && oldest_step() < step) {
      frames_.pop_front();
    }
  }

  uint64_t payload_bytes() const {
    uint64_t bytes = 0;
    for (const SentFrame& frame : frames_) bytes += frame.payload->size();
    return bytes;
  }

 private:
  std::deque<SentFrame> frames_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_KEPT_FRAMES_H_
