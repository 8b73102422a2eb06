// How the server's tests call an aggregator, and what they look at then. The jobs are test_job.h's.

#ifndef SIGNPOST_SERVER_TEST_CALLS_H_
#define SIGNPOST_SERVER_TEST_CALLS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/aggregator.pb.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "proto/try_again.h"
#include "server/aggregator.h"
#include "server/test_job.h"

namespace signpost {

// What became of a call. Not for calls that other threads end.
template <typename T>
class CallResult {
 public:
  // To be given to the call; copies share the result.
  auto done() {
    return [slot = slot_](absl::StatusOr<T> value) {
      EXPECT_FALSE(slot->has_value()) << "a callback was called twice";
      *slot = std::move(value);
    };
  }

  bool waits() const { return !slot_->has_value(); }
  bool ok() const { return status().ok(); }
  const T& value() const { return ***slot_; }
  absl::Status status() const {
    return waits() ? absl::UnknownError("still waits") : (*slot_)->status();
  }
  absl::StatusCode code() const { return status().code(); }
  std::string message() const { return std::string(status().message()); }
  bool is_to_be_tried_again() const { return IsTryAgain(status()); }

 private:
  std::shared_ptr<std::optional<absl::StatusOr<T>>> slot_ =
      std::make_shared<std::optional<absl::StatusOr<T>>>();
};
using JoinResult = CallResult<JoinResponse>;
using ExchangeResult = CallResult<Aggregator::Reply>;

class FakeClock {
 public:
  std::function<absl::Time()> function() {
    return [this] { return now_; };
  }
  void Advance(absl::Duration by) { now_ += by; }

 private:
  absl::Time now_ = absl::FromUnixSeconds(1700000000);
};

inline JoinResult Join(Aggregator& aggregator, const JoinRequest& request) {
  JoinResult result;
  aggregator.Join(request, result.done());
  return result;
}

inline ExchangeResult Exchange(Aggregator& aggregator, Frame frame) {
  ExchangeResult result;
  aggregator.Exchange(std::move(frame), result.done());
  return result;
}

// Joins all ranks and returns the epoch.
inline uint64_t JoinAll(Aggregator& aggregator, uint32_t world_size,
                        const std::string& job = "job") {
  JoinResult last;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    last = Join(aggregator, TestJoin(rank, world_size, job));
  }
  EXPECT_TRUE(last.ok()) << last.message();
  return last.ok() ? last.value().epoch() : 0;
}

inline const Layout& TestLayout() {
  static const Layout& layout = *new Layout(LayoutOf(TestJoin(/*rank=*/0, /*world_size=*/1)));
  return layout;
}

inline Frame FrameOf(uint64_t epoch, const FrameKey& key, Codec codec, uint32_t seed = 0) {
  return Addressed(TestFrame(TestLayout(), key, codec, seed), "job", epoch);
}

inline absl::Status Leave(Aggregator& aggregator, uint64_t epoch, uint32_t rank,
                          const std::string& job = "job") {
  LeaveRequest request;
  request.set_job(job);
  request.set_epoch(epoch);
  request.set_rank(rank);
  request.set_incarnation(1000 + rank);
  absl::Status result = absl::UnknownError("still waits");
  aggregator.Leave(request, [&](absl::Status status) { result = status; });
  return result;
}

inline JobStatus StatusOf(const Aggregator& aggregator, const std::string& job = "job") {
  StatusRequest request;
  request.set_job(job);
  const StatusResponse response = aggregator.Status(request);
  EXPECT_EQ(response.jobs_size(), 1);
  return response.jobs_size() == 1 ? response.jobs(0) : JobStatus();
}

inline std::vector<std::string> JobNames(const Aggregator& aggregator) {
  std::vector<std::string> names;
  const StatusResponse response = aggregator.Status({});
  for (const JobStatus& job : response.jobs()) names.push_back(job.job());
  return names;
}

}  // namespace signpost

#endif  // SIGNPOST_SERVER_TEST_CALLS_H_
