#include "server/call_limit.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_interceptor.h"

namespace signpost {
namespace {

// Whether a limit is exceeded in a way that is told.
bool IsTold(int calls, int limit) { return calls > limit && (calls - limit) % kCallsBetween == 1; }

// Thread-safe.
class Calls {
 public:
  Calls(const CallLimits& limits, std::function<void(const ExcessCalls&)> on_excess)
      : limits_(limits), on_excess_(std::move(on_excess)) {}

  void Begin(const grpc::ServerContextBase* call, const std::string& peer) {
    std::optional<ExcessCalls> excess;
    {
      absl::MutexLock lock(&mutex_);
      const int calls = ++by_peer_[peer];
      peer_of_[call] = peer;
      if (IsTold(calls, limits_.of_connection)) {
        excess = {peer, calls};
      } else if (IsTold(static_cast<int>(peer_of_.size()), limits_.in_all)) {
        const auto most =
            std::max_element(by_peer_.begin(), by_peer_.end(),
                             [](const auto& a, const auto& b) { return a.second < b.second; });
        excess = {most->first, most->second};
      }
    }
    if (excess) on_excess_(*excess);
  }

  // Of a call that was never begun: it ended before.
  void End(const grpc::ServerContextBase* call) {
    absl::MutexLock lock(&mutex_);
    const auto found = peer_of_.find(call);
    if (found == peer_of_.end()) return;
    const auto peer = by_peer_.find(found->second);
    if (--peer->second == 0) by_peer_.erase(peer);
    peer_of_.erase(found);
  }

 private:
  const CallLimits limits_;
  const std::function<void(const ExcessCalls&)> on_excess_;
  absl::Mutex mutex_;
  absl::flat_hash_map<const grpc::ServerContextBase*, std::string> peer_of_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, int> by_peer_ ABSL_GUARDED_BY(mutex_);
};

// gRPC asks for an interceptor when it begins a call, and none is had.
class Beginnings final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit Beginnings(std::shared_ptr<Calls> calls) : calls_(std::move(calls)) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    const grpc::ServerContextBase* call = info->server_context();
    calls_->Begin(call, call->peer());
    return nullptr;
  }

 private:
  const std::shared_ptr<Calls> calls_;
};

// gRPC releases a call's context last.
class Endings final : public grpc::ContextAllocator {
 public:
  explicit Endings(std::shared_ptr<Calls> calls) : calls_(std::move(calls)) {}
  grpc::CallbackServerContext* NewCallbackServerContext() override {
    return new grpc::CallbackServerContext;
  }
  grpc::GenericCallbackServerContext* NewGenericCallbackServerContext() override {
    return new grpc::GenericCallbackServerContext;
  }
  void Release(grpc::CallbackServerContext* call) override { Free(call); }
  void Release(grpc::GenericCallbackServerContext* call) override { Free(call); }

 private:
  template <class Context>
  void Free(Context* call) {
    calls_->End(call);
    delete call;
  }

  const std::shared_ptr<Calls> calls_;
};

}  // namespace

void LimitCalls(const CallLimits& limits, std::function<void(const ExcessCalls&)> on_excess,
                grpc::ServerBuilder& builder) {
  const auto calls = std::make_shared<Calls>(limits, std::move(on_excess));
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> creators;
  creators.push_back(std::make_unique<Beginnings>(calls));
  builder.experimental().SetInterceptorCreators(std::move(creators));
  builder.SetContextAllocator(std::make_unique<Endings>(calls));
}

}  // namespace signpost
