// Steps in parts: gradients are sent as they come, and not a bit is different. The simulator
// (tests/simulation) has them among its faults.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/layout.h"
#include "server/job.h"
#include "storage/disk.h"
#include "tests/forwarding_channel.h"
#include "tests/job.h"

namespace signpost::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

using Gradients = absl::Span<const Gradient>;

// The tensors in an order that differs from rank to rank and step to step.
std::vector<size_t> OrderOf(uint32_t rank, int step, size_t tensors) {
  std::vector<size_t> order(tensors);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 random(1 + rank * 1000 + step);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

// Calls `between` before each gradient.
absl::StatusOr<StepReport> OverlappedStep(
    Worker& worker, Gradients gradients, const std::vector<size_t>& order, const GroupRates& rates,
    const std::function<void(size_t given)>& between = [](size_t) {}) {
  absl::Status status = worker.BeginStep({rates});
  for (size_t i = 0; i < order.size() && status.ok(); ++i) {
    between(i);
    status = worker.GradientReady(order[i], gradients[order[i]]);
  }
  if (!status.ok()) return status;
  return worker.FinishStep();
}

absl::StatusOr<StepReport> InAnyOrder(uint32_t rank, int step, Worker& worker, Gradients gradients,
                                      const GroupRates& rates) {
  return OverlappedStep(worker, gradients, OrderOf(rank, step, gradients.size()), rates);
}

// Of more chunks than two windows.
JobOptionsForTest ManyChunks() {
  JobOptionsForTest job;
  job.tensors = {300, 1, 17, 1000, 64, 64, 500, 8, 333};
  job.optimizer.freeze_step = 4;
  job.steps = 9;
  return job;
}

TEST(OverlappedStep, HasTheBitsOfAStepInAnyOrderOfGradients) {
  JobOptionsForTest job = ManyChunks();
  for (const Codec codec : {FLOAT32, BFLOAT16, INT8}) {
    job.optimizer.warm_up_codec = codec;
    job.take_step = nullptr;
    Cluster reference({});
    const auto expected = Train(reference, job);
    job.take_step = InAnyOrder;
    for (const Transport transport : {Transport::kLoopback, Transport::kGrpc}) {
      for (const uint32_t fault_seed : {0, 1, 2}) {
        Cluster cluster({.transport = transport, .aggregators = 2, .fault_seed = fault_seed});
        EXPECT_EQ(Train(cluster, job), expected) << fault_seed;
      }
    }
  }
}

TEST(OverlappedStep, OtherRanksMayTakeTheirsAtOnce) {
  JobOptionsForTest job = ManyChunks();
  Cluster reference({});
  const auto expected = Train(reference, job);
  job.take_step = [](uint32_t rank, int step, Worker& worker, Gradients gradients,
                     const GroupRates& rates) {
    if ((rank + step) % 2 == 0) return worker.Step(gradients, {rates});
    std::vector<size_t> descending(gradients.size());
    std::iota(descending.rbegin(), descending.rend(), 0);
    return OverlappedStep(worker, gradients, descending, rates);
  };
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2});
  EXPECT_EQ(Train(cluster, job), expected);
}

TEST(OverlappedStep, SkipsWhatIsNotFiniteAsAStepDoes) {
  JobOptionsForTest job = ManyChunks();
  std::vector<uint32_t> skipped;  // by run: rounds, of all ranks
  const auto train = [&](const TakeStep& take_step) {
    std::atomic<uint32_t> rounds = 0;
    job.take_step = [&](uint32_t rank, int step, Worker& worker, Gradients gradients,
                        const GroupRates& rates) {
      auto report = take_step(rank, step, worker, gradients, rates);
      if (report.ok()) rounds += report->skipped.size();
      return report;
    };
    Cluster cluster({.aggregators = 2});
    auto results =
        Train(cluster, job, nullptr, [](uint32_t rank, int step, std::vector<float>& gradient) {
          if (rank == 1 && step % 3 == 2) gradient[700] = std::numeric_limits<float>::quiet_NaN();
        });
    skipped.push_back(rounds);
    return results;
  };
  const auto expected =
      train([](uint32_t rank, int step, Worker& worker, Gradients gradients,
               const GroupRates& rates) { return worker.Step(gradients, {rates}); });
  EXPECT_EQ(train(InAnyOrder), expected);
  EXPECT_THAT(skipped, ElementsAre(3 * job.workers, 3 * job.workers));
}

TEST(OverlappedStep, AggregatorsThatAreKilledInTheMiddleChangeNothing) {
  JobOptionsForTest job = ManyChunks();
  job.steps = 16;
  Cluster reference({});
  const auto expected = Train(reference, job);
  const std::string state_dir = absl::StrCat(::testing::TempDir(), "/overlapped");
  std::filesystem::remove_all(state_dir);
  Cluster cluster({.transport = Transport::kGrpc, .aggregators = 2, .state_dir = state_dir});
  job.take_step = [&](uint32_t rank, int step, Worker& worker, Gradients gradients,
                      const GroupRates& rates) {
    return OverlappedStep(worker, gradients, OrderOf(rank, step, gradients.size()), rates,
                          [&](size_t given) {
                            if (rank == 0 && given == 5 && step % 4 == 2)
                              cluster.Kill(step / 4 % 2);
                          });
  };
  EXPECT_EQ(Train(cluster, job), expected);
}

// Notes what is sent and answered.
class NotingChannel final : public ForwardingChannel {
 public:
  NotingChannel(std::unique_ptr<Channel> inner, std::vector<uint32_t>& sent,
                std::vector<uint32_t>& answered, const bool& has_no_memory)
      : ForwardingChannel(std::move(inner)),
        sent_(sent),
        answered_(answered),
        has_no_memory_(has_no_memory) {}

  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                absl::Time deadline, ExchangeDone done) override {
    if (has_no_memory_) throw std::bad_alloc();
    sent_.push_back(header.chunk());
    ForwardingChannel::Exchange(
        header, std::move(payload), deadline,
        [this, chunk = header.chunk(), done = std::move(done)](auto answer) mutable {
          answered_.push_back(chunk);
          done(std::move(answer));
        });
  }

 private:
  std::vector<uint32_t>& sent_;
  std::vector<uint32_t>& answered_;
  const bool& has_no_memory_;
};

// A worker that is alone, with an aggregator that answers at once.
// More chunks than two windows, whose dense payloads count.
JobOptionsForTest LargeChunks() {
  JobOptionsForTest job;
  job.workers = 2;
  job.tensors = std::vector<size_t>(36, 16 * 1024);
  job.worker.block_elements = 4096;
  job.worker.chunk_elements = 16 * 1024;
  job.optimizer.freeze_step = 3;
  job.steps = 6;
  return job;
}

// What such a job needs of the larger of two aggregators, and not a byte more: every frame but
// those of the chunk that is furthest behind is refused, and ranks send theirs in different orders.
uint64_t LeastHeldBytes() {
  const JobOptionsForTest job = LargeChunks();
  std::vector<Tensor> tensors(job.tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].add_shape(job.tensors[i]);
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].set_name(absl::StrCat(i));
  JobOptions options;
  options.set_block_elements(job.worker.block_elements);
  options.set_chunk_elements(job.worker.chunk_elements);
  options.set_gamma(1.35f);
  const Layout layout = *Layout::Create(tensors, options);
  return std::max(ReservedBytes(job.workers, layout, {0, 2}),
                  ReservedBytes(job.workers, layout, {1, 2}));
}

TEST(OverlappedStep, GoesOnWhereAggregatorsHaveNoMemory) {
  JobOptionsForTest job = LargeChunks();
  Cluster reference({});
  const auto expected = Train(reference, job);
  job.take_step = InAnyOrder;
  for (const uint32_t fault_seed : {0, 1}) {
    Cluster cluster({.transport = Transport::kGrpc,
                     .aggregators = 2,
                     .fault_seed = fault_seed,
                     .held_bytes = LeastHeldBytes()});
    EXPECT_EQ(Train(cluster, job), expected) << fault_seed;
  }
}

TEST(OverlappedStep, GoesOnWhereRestartedAggregatorsHaveNoMemory) {
  JobOptionsForTest job = LargeChunks();
  Cluster reference({});
  const auto expected = Train(reference, job);
  const std::string state_dir = absl::StrCat(::testing::TempDir(), "/no-memory");
  std::filesystem::remove_all(state_dir);
  Cluster cluster({.transport = Transport::kGrpc,
                   .aggregators = 2,
                   .state_dir = state_dir,
                   .held_bytes = LeastHeldBytes()});
  job.take_step = [&cluster](uint32_t rank, int step, Worker& worker, Gradients gradients,
                             const GroupRates& rates) {
    const auto order = OrderOf(rank, step, gradients.size());
    return OverlappedStep(worker, gradients, order, rates, [&](size_t given) {
      if (rank == 0 && given == order.size() / 2 && step > 0) cluster.Kill(step % 2);
    });
  };
  EXPECT_EQ(Train(cluster, job), expected);
}

class LoneWorkerTest : public ::testing::Test {
 protected:
  LoneWorkerTest() {
    job_.workers = 1;
    job_.tensors = {64, 32, 64, 96};  // in chunks of 64: {0}, {1, 2}, {2, 3}, {3}
    replica_ = std::make_unique<Replica>(job_, 0);
    replica_->gradient = GradientOf(0, 0, replica_->values.size());
    worker_ = Join(*replica_);
  }

  std::unique_ptr<Worker> Join(Replica& replica) {
    std::vector<std::unique_ptr<Channel>> channels;
    channels.push_back(std::make_unique<NotingChannel>(std::move(cluster_.Connect()[0]), sent_,
                                                       answered_, has_no_memory_));
    WorkerOptions options = job_.worker;
    options.exchange_timeout = absl::Milliseconds(500);
    options.world_size = job_.workers;
    auto worker = Worker::Join(options, job_.optimizer, replica.Parameters(), std::move(channels));
    EXPECT_TRUE(worker.ok()) << worker.status();
    return *std::move(worker);
  }

  absl::Status GradientReady(size_t tensor) {
    return worker_->GradientReady(tensor, replica_->Gradients()[tensor]);
  }

  static void ExpectOutOfOrder(const absl::Status& status, const std::string& message) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }

  JobOptionsForTest job_;
  Cluster cluster_{ClusterOptions()};
  std::vector<uint32_t> sent_, answered_;  // chunks
  bool has_no_memory_ = false;             // to send anything
  std::unique_ptr<Replica> replica_;
  std::unique_ptr<Worker> worker_;
};

TEST_F(LoneWorkerTest, SendsAChunkAsSoonAsItsGradientsAreThere) {
  ASSERT_TRUE(worker_->BeginStep({job_.rates}).ok());
  const auto sent_with = [&](size_t tensor) {
    sent_.clear();
    EXPECT_TRUE(GradientReady(tensor).ok());
    return sent_;
  };
  EXPECT_THAT(sent_with(3), ElementsAre(3));
  EXPECT_THAT(sent_with(1), ElementsAre());
  EXPECT_THAT(sent_with(2), UnorderedElementsAre(1, 2));
  EXPECT_THAT(sent_with(0), ElementsAre(0));
  EXPECT_TRUE(worker_->FinishStep().ok());
}

TEST_F(LoneWorkerTest, ParametersChangeAtItsEndOnly) {
  const std::vector<float> before = replica_->values;
  for (int step = 0; step < 8; ++step) {
    const std::vector<float> before = replica_->values;
    ASSERT_TRUE(worker_->BeginStep({job_.rates}).ok());
    answered_.clear();
    for (size_t tensor = 0; tensor < job_.tensors.size(); ++tensor) {
      EXPECT_TRUE(GradientReady(tensor).ok());
      EXPECT_EQ(replica_->values, before);
    }
    EXPECT_THAT(answered_, UnorderedElementsAre(0, 1, 2, 3));
    EXPECT_TRUE(worker_->FinishStep().ok());
    EXPECT_NE(replica_->values, before);
  }
}

TEST_F(LoneWorkerTest, CallsOutOfOrderAreRefusedAndChangeNothing) {
  const std::unique_ptr<Disk> disk = OpenDirectory(::testing::TempDir());
  ExpectOutOfOrder(GradientReady(0), "before its step has begun");
  ExpectOutOfOrder(worker_->FinishStep().status(), "none has begun");
  ASSERT_TRUE(worker_->BeginStep({job_.rates}).ok());
  ASSERT_TRUE(GradientReady(0).ok());
  const std::string is_open = "step 0 has begun and is not finished: gradients of 1 tensors";
  ExpectOutOfOrder(worker_->BeginStep({job_.rates}), is_open);
  ExpectOutOfOrder(worker_->Step(replica_->Gradients(), {job_.rates}).status(), is_open);
  ExpectOutOfOrder(worker_->Checkpoint(*disk), is_open);
  ExpectOutOfOrder(GradientReady(0), "'tensor0' [64] came twice in step 0");
  ExpectOutOfOrder(worker_->FinishStep().status(), "gradients of 3 tensors, that of 'tensor1'");
  for (const size_t tensor : {1, 2, 3}) ASSERT_TRUE(GradientReady(tensor).ok());
  ASSERT_TRUE(worker_->FinishStep().ok());

  Replica reference(job_, 0);
  reference.gradient = replica_->gradient;
  job_.worker.job = "reference";
  ASSERT_TRUE(Join(reference)->Step(reference.Gradients(), {job_.rates}).ok());
  EXPECT_EQ(replica_->values, reference.values);
}

TEST_F(LoneWorkerTest, WrongArgumentsAreRefusedAndChangeNothing) {
  EXPECT_TRUE(absl::IsInvalidArgument(worker_->BeginStep({})));
  ASSERT_TRUE(worker_->BeginStep({job_.rates}).ok());
  const absl::Status no_tensor = worker_->GradientReady(4, replica_->Gradients()[3]);
  EXPECT_TRUE(absl::IsInvalidArgument(no_tensor)) << no_tensor;
  EXPECT_THAT(std::string(no_tensor.message()), HasSubstr("tensor 4, the job has 4"));
  const absl::Status short_one = worker_->GradientReady(3, replica_->Gradients()[0]);
  EXPECT_TRUE(absl::IsInvalidArgument(short_one)) << short_one;
  EXPECT_THAT(std::string(short_one.message()), AllOf(HasSubstr("'tensor3'"), HasSubstr("64")));
  for (const size_t tensor : {0, 1, 2, 3}) ASSERT_TRUE(GradientReady(tensor).ok());
  EXPECT_TRUE(worker_->FinishStep().ok());
}

TEST_F(LoneWorkerTest, MayLeaveInTheMiddle) {
  ASSERT_TRUE(worker_->BeginStep({job_.rates}).ok());
  ASSERT_TRUE(GradientReady(3).ok());
  const std::vector<float> before = replica_->values;
  EXPECT_TRUE(worker_->Leave().ok());
  EXPECT_EQ(replica_->values, before);
}

TEST_F(LoneWorkerTest, AfterAnExceptionThereIsNoStep) {
  ASSERT_TRUE(worker_->BeginStep({job_.rates}).ok());
  for (const size_t tensor : {0, 1, 2}) ASSERT_TRUE(GradientReady(tensor).ok());
  has_no_memory_ = true;
  EXPECT_THROW(GradientReady(3).IgnoreError(), std::bad_alloc);
  has_no_memory_ = false;
  ExpectOutOfOrder(worker_->FinishStep().status(), "earlier step failed");
  ExpectOutOfOrder(worker_->AdvanceStep(), "earlier step failed");
  EXPECT_TRUE(worker_->Leave().ok());

  job_.worker.job = "another";
  Replica replica(job_, 0);
  const std::unique_ptr<Worker> worker = Join(replica);
  has_no_memory_ = true;
  EXPECT_THROW(worker->Step(replica.Gradients(), {job_.rates}).IgnoreError(), std::bad_alloc);
  has_no_memory_ = false;
  ExpectOutOfOrder(worker->Step(replica.Gradients(), {job_.rates}).status(), "earlier step failed");
}

// Rank 1 joins, and that is all.
TEST_F(LoneWorkerTest, AfterAStepThatFailedThereIsNone) {
  job_.workers = 2;
  job_.worker.job = "two";
  OnEachRank(2, [&](uint32_t rank) {
    Replica replica(job_, rank);
    WorkerOptions options = job_.worker;
    options.rank = rank;
    options.world_size = 2;
    options.exchange_timeout = absl::Milliseconds(300);
    auto worker = Worker::Join(options, job_.optimizer, replica.Parameters(), cluster_.Connect());
    ASSERT_TRUE(worker.ok()) << worker.status();
    if (rank == 1) return;
    const absl::Status failed =
        OverlappedStep(**worker, replica.Gradients(), {3, 2, 1, 0}, job_.rates).status();
    EXPECT_TRUE(absl::IsDeadlineExceeded(failed)) << failed;
    EXPECT_THAT(std::string(failed.message()), HasSubstr("waiting for rank 1"));
    ExpectOutOfOrder((*worker)->BeginStep({job_.rates}), "earlier step failed");
    ExpectOutOfOrder((*worker)->GradientReady(0, replica.Gradients()[0]), "earlier step failed");
    ExpectOutOfOrder((*worker)->FinishStep().status(), "earlier step failed");
  });
}

}  // namespace
}  // namespace signpost::testing
