// A session that several threads may call, one at a time.

#ifndef SIGNPOST_CLIENT_EXCLUSIVE_SESSION_H_
#define SIGNPOST_CLIENT_EXCLUSIVE_SESSION_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/one_call.h"
#include "client/session.h"

namespace signpost {

// Passes calls on to a session that is not thread-safe. Session documents the rules for threads.
class ExclusiveSession final : public Session {
 public:
  explicit ExclusiveSession(std::unique_ptr<Session> session)
      : session_(std::move(session)),
        steps_(session_->steps()),
        is_synchronised_(session_->is_synchronised()) {}

  // Waits for a call that is under way.
  ~ExclusiveSession() override {
    calls_.Wait([&] { session_.reset(); });
  }

  absl::Status SetStream(kernels::cuda::Stream stream) override {
    return calls_.Run("SetStream", [&] { return session_->SetStream(stream); });
  }
  absl::StatusOr<StepReport> Step(absl::Span<const Gradient> gradients,
                                  absl::Span<const GroupRates> rates) override {
    return calls_.Run("Step", [&] { return Counted(session_->Step(gradients, rates)); });
  }
  absl::Status BeginStep(absl::Span<const GroupRates> rates) override {
    return calls_.Run("BeginStep", [&] { return session_->BeginStep(rates); });
  }
  absl::Status GradientReady(size_t parameter, Gradient gradient) override {
    return calls_.Run("GradientReady",
                      [&] { return session_->GradientReady(parameter, gradient); });
  }
  absl::StatusOr<StepReport> FinishStep() override {
    return calls_.Run("FinishStep", [&] { return Counted(session_->FinishStep()); });
  }
  absl::Status Checkpoint(const std::string& directory) override {
    return calls_.Run("Checkpoint", [&] { return session_->Checkpoint(directory); });
  }
  absl::StatusOr<std::string> SaveState() override {
    return calls_.Run("SaveState", [&] { return session_->SaveState(); });
  }
  absl::Status Leave() override {
    return calls_.Run("Leave", [&] { return session_->Leave(); });
  }

  uint64_t steps() const override { return steps_; }
  bool is_synchronised() const override { return is_synchronised_; }
  const Resumed& resumed() const override { return session_->resumed(); }
  const std::optional<Returned>& returned() const override { return session_->returned(); }
  uint64_t elements() const override { return session_->elements(); }
  uint32_t ParametersCrc32c() const override {
    return calls_.Wait([&] { return session_->ParametersCrc32c(); });
  }
  WireBytes wire_bytes() override {
    calls_.Try([&] { Remember(session_->wire_bytes()); });
    const std::lock_guard<std::mutex> lock(wire_bytes_mutex_);
    return wire_bytes_;
  }

 private:
  absl::StatusOr<StepReport> Counted(absl::StatusOr<StepReport> report) {
    steps_ = session_->steps();
    is_synchronised_ = session_->is_synchronised();
    Remember(session_->wire_bytes());
    return report;
  }
  void Remember(WireBytes bytes) {
    const std::lock_guard<std::mutex> lock(wire_bytes_mutex_);
    wire_bytes_ = bytes;
  }

  std::unique_ptr<Session> session_;
  mutable OneCall calls_;
  std::atomic<uint64_t> steps_;  // as of the last call that has ended
  std::atomic<bool> is_synchronised_;
  std::mutex wire_bytes_mutex_;
  WireBytes wire_bytes_;  // as of the last call that has ended
};

}  // namespace signpost

#endif  // SIGNPOST_CLIENT_EXCLUSIVE_SESSION_H_
