// The network as the worker sees it: one shard's aggregator, over any transport. GrpcChannel is the
// real one; tests have one that calls an aggregator in the same process. One conformance suite
// (tests/channel_conformance_test.cc) holds for both.

#ifndef SIGNPOST_WORKER_CHANNEL_H_
#define SIGNPOST_WORKER_CHANNEL_H_

#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/frame.h"

namespace signpost {

// Thread-safe. Calls whose connection is lost, that the aggregator answers with UNAVAILABLE, or
// that end early because this process stood still (SteadyNow), are made again until their deadline,
// but for Status: they are idempotent. Every call ends by it: with the aggregator's answer or
// another error, or with DEADLINE_EXCEEDED, or UNAVAILABLE when the aggregator could not be
// reached, or INVALID_ARGUMENT when something else answers there. Messages name target().
class Channel {
 public:
  using ExchangeDone = absl::AnyInvocable<void(absl::StatusOr<Answer>)>;
  // Asked every kQuestionInterval by a call that waits, in its caller's thread: an error ends it.
  using CheckMayWait = absl::FunctionRef<absl::Status()>;
  static constexpr absl::Duration kQuestionInterval = absl::Seconds(1);
  static absl::Status MayWait() { return absl::OkStatus(); }  // until the deadline, in any case

  // Ends calls still under way with CANCELLED and waits until their `done` has returned.
  virtual ~Channel() = default;

  virtual std::string target() const = 0;  // "127.0.0.1:4000"

  // Blocks until all ranks have joined.
  virtual absl::StatusOr<JoinResponse> Join(const JoinRequest& request, absl::Time deadline,
                                            CheckMayWait check_may_wait) = 0;

  // Sends one frame. `done` is called exactly once, from any thread, possibly before Exchange
  // returns, and must not block. A frame is sent again with the same bytes. The transport may hold
  // `payload` a little longer than the call lasts, hence the sharing.
  virtual void Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                        absl::Time deadline, ExchangeDone done) = 0;

  virtual absl::Status Leave(const LeaveRequest& request, absl::Time deadline) = 0;

  virtual absl::StatusOr<ReadErrorResponse> ReadError(const ReadErrorRequest& request,
                                                      absl::Time deadline) = 0;

  // Made once: it asks for the present.
  virtual absl::StatusOr<StatusResponse> Status(const StatusRequest& request,
                                                absl::Time deadline) = 0;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_CHANNEL_H_
