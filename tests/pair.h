// A job of two ranks that exchange frames through bare channels, without a Worker around them.

#ifndef SIGNPOST_TESTS_PAIR_H_
#define SIGNPOST_TESTS_PAIR_H_

#include <cstdint>
#include <future>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/frame.h"
#include "worker/channel.h"

namespace signpost::testing {

// Half a minute from now: for what should not take long.
absl::Time Later();

// A frame as it is handed to a channel, to be sent again if need be.
struct Sent {
  FrameHeader header;
  std::shared_ptr<const Payload> payload;
};

// One tensor of 2^21 elements in two chunks, one aggregator.
class Pair {
 public:
  static JoinRequest RequestOf(uint32_t rank);

  // Both ranks join; expected to succeed.
  void Join(Channel& first, Channel& second);

  // Of the latest Join.
  uint64_t epoch() const { return epoch_; }

  // A dense frame of chunk 0, 4 MiB, with the same value everywhere.
  Sent FrameOf(uint32_t rank, float value, uint64_t step = 0) const;

 private:
  uint64_t epoch_ = 0;
};

std::future<absl::StatusOr<Answer>> Exchange(Channel& channel, const Sent& sent,
                                             absl::Time deadline = Later());

// Expects a dense answer with `value` everywhere.
void ExpectMean(const absl::StatusOr<Answer>& answer, float value);

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_PAIR_H_
