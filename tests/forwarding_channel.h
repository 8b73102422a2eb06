// A channel that passes every call on: what stands between a worker and its channel derives from it
// and changes what it must.

#ifndef SIGNPOST_TESTS_FORWARDING_CHANNEL_H_
#define SIGNPOST_TESTS_FORWARDING_CHANNEL_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/channel.h"

namespace signpost::testing {

class ForwardingChannel : public Channel {
 public:
  explicit ForwardingChannel(std::unique_ptr<Channel> inner) : inner_(std::move(inner)) {}

  std::string target() const override { return inner_->target(); }
  absl::StatusOr<JoinResponse> Join(const JoinRequest& request, absl::Time deadline,
                                    CheckMayWait check_may_wait) override {
    return inner_->Join(request, deadline, check_may_wait);
  }
  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                absl::Time deadline, ExchangeDone done) override {
    inner_->Exchange(header, std::move(payload), deadline, std::move(done));
  }
  absl::Status Leave(const LeaveRequest& request, absl::Time deadline) override {
    return inner_->Leave(request, deadline);
  }
  absl::StatusOr<ReadErrorResponse> ReadError(const ReadErrorRequest& request,
                                              absl::Time deadline) override {
    return inner_->ReadError(request, deadline);
  }
  absl::StatusOr<StatusResponse> Status(const StatusRequest& request,
                                        absl::Time deadline) override {
    return inner_->Status(request, deadline);
  }

 private:
  const std::unique_ptr<Channel> inner_;
};

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_FORWARDING_CHANNEL_H_
