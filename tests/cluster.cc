#include "tests/cluster.h"

#include <deque>
#include <random>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "proto/failure_timeout.h"
#include "server/server.h"
#include "tests/forwarding_channel.h"
#include "tests/loopback_channel.h"
#include "worker/grpc_channel.h"

namespace signpost::testing {

// Delivers frames from a thread of its own, picking at random among those that are there.
class Cluster::Post {
 public:
  explicit Post(uint32_t seed) : random_(seed), thread_([this] { Deliver(); }) {}

  ~Post() {
    {
      absl::MutexLock lock(&mutex_);
      closed_ = true;
    }
    thread_.join();
  }

  void Put(std::function<void()> delivery) {
    absl::MutexLock lock(&mutex_);
    waiting_.push_back(std::move(delivery));
  }

  bool OneIn(uint32_t n) {
    absl::MutexLock lock(&mutex_);
    return random_() % n == 0;
  }

 private:
  void Deliver() {
    while (std::function<void()> delivery = Take()) delivery();
  }

  // Empty once closed and drained.
  std::function<void()> Take() {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](Post* post) { return post->closed_ || !post->waiting_.empty(); }, this));
    if (waiting_.empty()) return nullptr;
    std::swap(waiting_[random_() % waiting_.size()], waiting_.back());
    std::function<void()> delivery = std::move(waiting_.back());
    waiting_.pop_back();
    return delivery;
  }

  absl::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::mt19937 random_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::function<void()>> waiting_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

namespace {

// Hands frames to a post, some of them twice before their answer and once more after it.
template <typename Post>
class FaultyChannel final : public ForwardingChannel {
 public:
  FaultyChannel(std::unique_ptr<Channel> inner, Post& post)
      : ForwardingChannel(std::move(inner)), post_(post) {}

  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                absl::Time deadline, ExchangeDone done) override {
    auto sent = std::make_shared<Sent>(Sent{header, std::move(payload), deadline, std::move(done)});
    post_.Put([this, sent] {
      if (post_.OneIn(4)) Send(*sent, [](absl::StatusOr<Answer>) {});
      Deliver(sent);
    });
  }

 private:
  struct Sent {
    FrameHeader header;
    std::shared_ptr<const Payload> payload;
    absl::Time deadline;
    ExchangeDone done;
  };

  void Send(const Sent& sent, ExchangeDone done) {
    ForwardingChannel::Exchange(sent.header, sent.payload, sent.deadline, std::move(done));
  }

  void Deliver(std::shared_ptr<Sent> sent) {
    Send(*sent, [this, sent](absl::StatusOr<Answer> answer) {
      // The duplicate overtook the frame and took its place.
      if (absl::IsAborted(answer.status())) return Deliver(sent);
      if (answer.ok() && post_.OneIn(4)) ExpectTheSameAgain(*sent, *answer);
      sent->done(std::move(answer));
    });
  }

  // The round is closed, and this rank has not yet sent the next step's frame.
  void ExpectTheSameAgain(const Sent& sent, const Answer& answer) {
    const std::string expected(answer.payload.data(),
                               answer.payload.data() + answer.payload.size());
    Send(sent, [expected](absl::StatusOr<Answer> again) {
      // By the time it arrives the next round may have closed, and the frame be too old.
      if (absl::IsFailedPrecondition(again.status()) || absl::IsCancelled(again.status())) return;
      ASSERT_TRUE(again.ok()) << again.status();
      EXPECT_EQ(std::string(again->payload.data(), again->payload.data() + again->payload.size()),
                expected);
    });
  }

  Post& post_;
};

}  // namespace

Cluster::Cluster(const ClusterOptions& options) : options_(options) {
  for (uint32_t shard = 0; shard < options.aggregators; ++shard) {
    if (options.transport == Transport::kLoopback) {
      aggregators_.push_back(std::make_unique<Aggregator>(
          AggregatorOptions{.shard = shard, .shard_count = options.aggregators}));
      continue;
    }
    servers_.push_back(StartServer(shard, "127.0.0.1:0"));
    targets_.push_back(absl::StrCat("127.0.0.1:", servers_.back()->port()));
  }
  if (options.fault_seed != 0) post_ = std::make_unique<Post>(options.fault_seed);
}

Cluster::~Cluster() = default;

std::unique_ptr<Server> Cluster::StartServer(uint32_t shard, const std::string& listen) const {
  ServerOptions options;
  options.listen = listen;
  options.aggregator = {.shard = shard, .shard_count = options_.aggregators};
  options.allow_error_reset = options_.allow_error_reset;
  options.aggregator.limits.held_bytes = options_.held_bytes;
  if (!options_.state_dir.empty()) options.state_dir = absl::StrCat(options_.state_dir, "/", shard);
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(options);
  EXPECT_TRUE(server.ok()) << server.status();
  return *std::move(server);
}

std::vector<std::string> Cluster::targets() const { return targets_; }

void Cluster::Kill(uint32_t shard, const std::function<void()>& meanwhile) {
  servers_[shard].reset();
  meanwhile();
  servers_[shard] = StartServer(shard, targets_[shard]);
}

void Cluster::Restart(uint32_t shard) {
  EXPECT_TRUE(servers_[shard]->Drain(absl::ZeroDuration()).ok());
  Kill(shard);
}

std::vector<std::unique_ptr<Channel>> Cluster::Connect() {
  std::vector<std::unique_ptr<Channel>> channels;
  for (const auto& aggregator : aggregators_) channels.push_back(LoopbackTo(*aggregator));
  for (const std::string& target : targets_) {
    channels.push_back(ConnectToAggregator(target, FailureTimeout(), /*on_connection=*/nullptr,
                                           /*security=*/nullptr, options_.connections));
  }
  if (post_ == nullptr) return channels;
  for (auto& channel : channels) {
    channel = std::make_unique<FaultyChannel<Post>>(std::move(channel), *post_);
  }
  return channels;
}

void OnEachRank(uint32_t ranks, const std::function<void(uint32_t rank)>& body) {
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace signpost::testing
