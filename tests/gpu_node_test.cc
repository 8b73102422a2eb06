// Processes on GPUs that train through the worker of their node, which is on a GPU too, or on the
// host, where others may be beside them: the bytes are those of nodes that are all on the host. On
// a simulated GPU, or with SIGNPOST_REAL_GPU on a real one, where there is one. The processes are
// threads, and share that GPU.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/gpu.h"
#include "node/attached_session.h"
#include "tests/job.h"
#include "tests/new_gpu.h"
#include "tests/nodes.h"
#ifndef SIGNPOST_REAL_GPU
#include "kernels/simulated_gpu.h"
#endif

namespace signpost::testing {
namespace {

using kernels::cuda::Gpu;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

using IsOnGpu = std::function<bool(uint32_t process)>;
const IsOnGpu kNone = [](uint32_t) { return false; };
const IsOnGpu kAll = [](uint32_t) { return true; };
const IsOnGpu kEverySecond = [](uint32_t process) { return process % 2 == 1; };

constexpr GroupRates kRates = {.learning_rate = 0.01, .weight_decay = 0.1};

// One process of a node, with its session.
class Process {
 public:
  Process(const JobOptionsForTest& job, uint32_t process)
      : number_(process),
        has_halves_(job.gradient_type_on_gpu != GradientType::kFloat32),
        optimizer_(job.optimizer),
        replica_(job, process) {}

  absl::Status Join(const SessionOptions& options) {
    session_.reset();
    auto session = node::AttachedSession::JoinOn(replica_.Options().gpu, options, optimizer_,
                                                 replica_.Parameters());
    if (session.ok()) session_ = *std::move(session);
    return session.status();
  }
  void Die() { session_.reset(); }

  // On all processes such as half as many bytes have too, if some have so many.
  void MakeGradient() {
    replica_.gradient =
        GradientOf(number_, static_cast<int>(session_->steps()), replica_.gradient.size());
    if (has_halves_) {
      for (float& g : replica_.gradient) g = std::round(g * 16) / 16;
    }
    replica_.BeforeStep(*session_);
  }
  absl::Status Step() {
    MakeGradient();
    return session_->Step(replica_.Gradients(), {kRates}).status();
  }
  absl::Status StepInParts() {
    absl::Status status = session_->BeginStep({kRates});
    MakeGradient();
    const std::vector<Gradient> gradients = replica_.Gradients();
    for (size_t i = 0; i < gradients.size() && status.ok(); ++i) {
      const size_t tensor = (i + number_) % gradients.size();
      status = session_->GradientReady(tensor, gradients[tensor]);
    }
    return status.ok() ? session_->FinishStep().status() : status;
  }

  std::vector<float> Values() {
    replica_.GetValues();
    return replica_.values;
  }
  Replica& replica() { return replica_; }
  Session& session() { return *session_; }

 private:
  const uint32_t number_;
  const bool has_halves_;
  const OptimizerOptions optimizer_;
  Replica replica_;
  std::unique_ptr<Session> session_;
};

class GpuNodeTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kSteps = 12;

  void SetUp() override {
    if (gpu_ == nullptr) GTEST_SKIP();
    job_.tensors = {3700, 8, 1, 30'000, 64};
    job_.worker.block_elements = 256;
    job_.worker.chunk_elements = 4096;
    UseExampleCodec(job_.worker);
    job_.optimizer = {.freeze_step = 5, .variance_refresh_interval = 4};
  }

  NodesOptions Options(uint32_t nodes, uint32_t processes = 2) const {
    return {.nodes = nodes,
            .processes = processes,
            .worker = job_.worker,
            .gpu_of = [this](uint32_t node) { return has_gpu_(node) ? gpu_.get() : nullptr; }};
  }

  JobOptionsForTest JobOn(const IsOnGpu& is_on_gpu) const {
    JobOptionsForTest job = job_;
    job.gpu_of = [this, is_on_gpu](uint32_t process) {
      return is_on_gpu(process) ? gpu_.get() : nullptr;
    };
    return job;
  }

  // What all processes end with.
  std::vector<float> TrainOn(const IsOnGpu& is_on_gpu,
                             absl::Status (Process::*step)() = &Process::Step) {
    Nodes nodes(Options(/*nodes=*/2));
    std::vector<std::vector<float>> ends(nodes.processes());
    OnEachRank(nodes.processes(), [&](uint32_t number) {
      Process process(JobOn(is_on_gpu), number);
      const absl::Status joined = process.Join(nodes.OptionsOf(number));
      ASSERT_TRUE(joined.ok()) << joined;
      while (process.session().steps() < kSteps) {
        const absl::Status stepped = (process.*step)();
        ASSERT_TRUE(stepped.ok()) << stepped;
      }
      const absl::Status left = process.session().Leave();
      EXPECT_TRUE(left.ok()) << left;
      ends[number] = process.Values();
    });
    for (const std::vector<float>& end : ends) EXPECT_EQ(end, ends[0]);
    return ends[0];
  }

  std::unique_ptr<Gpu> gpu_ = NewGpu();
  IsOnGpu has_gpu_ = kNone;  // which nodes' workers
  JobOptionsForTest job_;
};

TEST_F(GpuNodeTest, HasTheBytesOfNodesOnTheHost) {
  const std::vector<float> wanted = TrainOn(kNone);
  EXPECT_EQ(TrainOn(kAll), wanted);
  EXPECT_EQ(TrainOn(kEverySecond), wanted);
}

TEST_F(GpuNodeTest, AlsoWhenItsWorkerIsOnAGpuToo) {
  const std::vector<float> wanted = TrainOn(kNone);
  has_gpu_ = kAll;
  EXPECT_EQ(TrainOn(kAll), wanted);
  has_gpu_ = kEverySecond;  // its processes are on that, the other node is on the host
  EXPECT_EQ(TrainOn([](uint32_t process) { return process >= 2; }), wanted);
}

TEST_F(GpuNodeTest, AlsoWithManyProcesses) {
  const auto train_on = [&](const IsOnGpu& processes) {
    Nodes nodes(Options(/*nodes=*/1, /*processes=*/6));
    std::vector<float> end;
    OnEachRank(nodes.processes(), [&](uint32_t number) {
      Process process(JobOn(processes), number);
      ASSERT_TRUE(process.Join(nodes.OptionsOf(number)).ok());
      while (process.session().steps() < kSteps) ASSERT_TRUE(process.Step().ok());
      EXPECT_TRUE(process.session().Leave().ok());
      const std::vector<float> values = process.Values();
      if (number == 0) end = values;
    });
    return end;
  };
  const std::vector<float> wanted = train_on(kNone);
  has_gpu_ = kAll;
  EXPECT_EQ(train_on(kAll), wanted);
}

TEST_F(GpuNodeTest, AlsoWithGradientsOfHalfTheBytes) {
  for (const GradientType type : {GradientType::kBfloat16, GradientType::kFloat16}) {
    job_.gradient_type_on_gpu = type;
    has_gpu_ = kNone;
    const std::vector<float> wanted = TrainOn(kNone);
    EXPECT_EQ(TrainOn(kAll), wanted);
    EXPECT_EQ(TrainOn(kEverySecond), wanted);
    has_gpu_ = kAll;
    EXPECT_EQ(TrainOn(kAll), wanted);
  }
}

TEST_F(GpuNodeTest, AlsoInParts) {
  for (const GradientType type : {GradientType::kFloat32, GradientType::kBfloat16}) {
    job_.gradient_type_on_gpu = type;
    has_gpu_ = kNone;
    const std::vector<float> wanted = TrainOn(kNone);
    EXPECT_EQ(TrainOn(kEverySecond, &Process::StepInParts), wanted);
    has_gpu_ = kAll;
    EXPECT_EQ(TrainOn(kAll, &Process::StepInParts), wanted);
  }
}

TEST_F(GpuNodeTest, SendsWhatAllProcessesHaveBeforeTheStepIsFinished) {
  for (const bool is_worker_on_gpu : {false, true}) {
    has_gpu_ = is_worker_on_gpu ? kAll : kNone;
    Nodes nodes(Options(/*nodes=*/1));
    OnEachRank(nodes.processes(), [&](uint32_t number) {
      Process process(JobOn(kAll), number);
      ASSERT_EQ(process.Join(nodes.OptionsOf(number)), absl::OkStatus());
      ASSERT_EQ(process.session().BeginStep({kRates}), absl::OkStatus());
      process.MakeGradient();
      const std::vector<Gradient> gradients = process.replica().Gradients();
      const auto hand_in = [&](size_t tensor) {
        ASSERT_EQ(process.session().GradientReady(tensor, gradients[tensor]), absl::OkStatus());
      };
      for (const size_t tensor : {4, 3, 2}) hand_in(tensor);
      // The worker is told of the copies that are there when another gradient comes. To give memory
      // back waits for the GPU.
      { ASSERT_TRUE(gpu_->Allocate(8).ok()); }
      hand_in(1);
      nodes.AwaitRoundsClosed(6);  // chunks without tensor 0
      hand_in(0);
      EXPECT_TRUE(process.session().FinishStep().ok());
      EXPECT_TRUE(process.session().Leave().ok());
    });
  }
}

TEST_F(GpuNodeTest, AlsoWithLambAndZeroOneAdam) {
  const std::vector<float> of_adam = TrainOn(kNone);
  OptimizerOptions lamb = {.freeze_step = 5, .lamb = LambOptions()};
  OptimizerOptions zero_one = {.freeze_step = 6};
  zero_one.zero_one = {.var_update_scaler = 2, .local_step_scaler = 2, .local_step_clipper = 2};
  for (const OptimizerOptions& optimizer : {lamb, zero_one}) {
    job_.optimizer = optimizer;
    has_gpu_ = kNone;
    const std::vector<float> wanted = TrainOn(kNone);
    EXPECT_NE(wanted, of_adam);
    EXPECT_EQ(TrainOn(kEverySecond), wanted);
    has_gpu_ = kAll;
    EXPECT_EQ(TrainOn(kAll), wanted);
  }
}

TEST_F(GpuNodeTest, AlsoWithACodecFromOutside) {
  job_.optimizer = {.freeze_step = 5, .warm_up_codec = CUSTOM, .codec = CUSTOM};
  const std::vector<float> wanted = TrainOn(kNone);
  has_gpu_ = kAll;
  EXPECT_EQ(TrainOn(kAll), wanted);
  has_gpu_ = kEverySecond;
  EXPECT_EQ(TrainOn([](uint32_t process) { return process >= 2; }), wanted);
}

TEST_F(GpuNodeTest, BeginsWithTheValuesOfRank0IfAsked) {
  for (const auto& [workers, processes] : {std::pair(kNone, kEverySecond), std::pair(kAll, kAll)}) {
    has_gpu_ = workers;
    Nodes nodes(Options(/*nodes=*/2));
    OnEachRank(nodes.processes(), [&, &processes = processes](uint32_t number) {
      const size_t elements = Process(job_, 0).replica().values.size();
      Process process(JobOn(processes), number);
      const std::vector<float> other(elements, static_cast<float>(number));
      const std::vector<Parameter> parameters = process.replica().Parameters();
      float* const first = parameters[0].values.data();
      if (number > 0 && processes(number)) {
        ASSERT_TRUE(gpu_->Write(first, other.data(), 4 * elements, nullptr).ok());
      } else if (number > 0) {
        std::copy(other.begin(), other.end(), first);
      }
      SessionOptions options = nodes.OptionsOf(number);
      options.start_from_rank_0 = true;
      const absl::Status joined = process.Join(options);
      ASSERT_TRUE(joined.ok()) << joined;
      EXPECT_TRUE(process.session().Leave().ok());  // when parameters are there
      EXPECT_EQ(process.Values(), InitialParameters(elements));
    });
  }
}

TEST_F(GpuNodeTest, OtherwiseRefusesOtherValues) {
  has_gpu_ = kAll;
  Nodes nodes(Options(/*nodes=*/1));
  OnEachRank(nodes.processes(), [&](uint32_t number) {
    Process process(JobOn(kAll), number);
    const Parameter last = process.replica().Parameters().back();
    const float other = 17;
    if (number == 1) {
      ASSERT_TRUE(gpu_->Write(&last.values.back(), &other, sizeof other, nullptr).ok());
    }
    const absl::Status refused = process.Join(nodes.OptionsOf(number));
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(MessageOf(refused),
                HasSubstr("tensor 'tensor4' [64] has other values on local rank 1"));
  });
}

TEST_F(GpuNodeTest, NamesWhoseGradientIsNotFinite) {
  has_gpu_ = kAll;
  Nodes nodes(Options(/*nodes=*/1));
  OnEachRank(nodes.processes(), [&](uint32_t number) {
    Process process(JobOn(kAll), number);
    ASSERT_TRUE(process.Join(nodes.OptionsOf(number)).ok());
    ASSERT_TRUE(process.Step().ok());
    process.replica().gradient.assign(process.replica().gradient.size(), number == 1 ? NAN : 1.0f);
    process.replica().BeforeStep(process.session());
    const absl::StatusOr<StepReport> report =
        process.session().Step(process.replica().Gradients(), {kRates});
    ASSERT_TRUE(report.ok()) << report.status();
    ASSERT_FALSE(report->skipped.empty());
    EXPECT_THAT(report->skipped[0].block, EndsWith(", of local rank 1"));
  });
}

TEST_F(GpuNodeTest, SavedStatesLeadToAndFromTheHost) {
  std::vector<std::string> states(2);
  std::vector<float> values;  // in the end
  const auto train = [&](const IsOnGpu& workers, const IsOnGpu& processes, uint64_t steps,
                         bool resumes) {
    has_gpu_ = workers;
    Nodes nodes(Options(/*nodes=*/1));
    OnEachRank(nodes.processes(), [&](uint32_t number) {
      Process process(JobOn(processes), number);
      SessionOptions options = nodes.OptionsOf(number);
      if (resumes) options.resume_state = states[number];
      const absl::Status joined = process.Join(options);
      ASSERT_TRUE(joined.ok()) << joined;
      while (process.session().steps() < steps) ASSERT_TRUE(process.Step().ok());
      auto state = process.session().SaveState();
      ASSERT_TRUE(state.ok()) << state.status();
      const uint32_t checksum = process.session().ParametersCrc32c();
      EXPECT_TRUE(process.session().Leave().ok());
      EXPECT_EQ(checksum, process.session().ParametersCrc32c());
      states[number] = *std::move(state);
      if (number == 0) values = process.Values();
    });
    return values;
  };
  struct Where {
    IsOnGpu workers, processes;
  };
  const Where host = {kNone, kNone}, through_host = {kNone, kAll}, mixed = {kNone, kEverySecond},
              gpu = {kAll, kAll};
  const std::vector<float> wanted = train(kNone, kNone, kSteps, /*resumes=*/false);
  for (const auto& [before, after] : {std::pair(through_host, host), std::pair(host, mixed),
                                      std::pair(host, gpu), std::pair(gpu, mixed)}) {
    train(before.workers, before.processes, 7, /*resumes=*/false);
    EXPECT_EQ(train(after.workers, after.processes, kSteps, /*resumes=*/true), wanted);
  }
}

TEST_F(GpuNodeTest, AWorkerOnAGpuRefusesProcessesOnTheHost) {
  has_gpu_ = kAll;
  Nodes nodes(Options(/*nodes=*/1, /*processes=*/1));
  Process on_host(JobOn(kNone), 0), process(JobOn(kAll), 0);
  const absl::Status refused = on_host.Join(nodes.OptionsOf(0));
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(MessageOf(refused),
              AllOf(StartsWith("this process's tensors are on the host, and its node trains on "
                               "GPU 0"),
                    HasSubstr("without --gpu")));
  // Its place is free.
  ASSERT_TRUE(process.Join(nodes.OptionsOf(0)).ok());
  EXPECT_TRUE(process.Step().ok());
}

TEST_F(GpuNodeTest, RefusesWhatIsOnTheHost) {
  Nodes nodes(Options(/*nodes=*/1, /*processes=*/1));
  Process on_host(JobOn(kNone), 0), process(JobOn(kAll), 0);
  const SessionOptions options = nodes.OptionsOf(0);
  const absl::Status no_session = node::AttachedSession::JoinOn(gpu_.get(), options, job_.optimizer,
                                                                on_host.replica().Parameters())
                                      .status();
  EXPECT_EQ(no_session.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(MessageOf(no_session), AllOf(StartsWith("tensor 'tensor0' [3700]: memory of GPU 0"),
                                           HasSubstr("is needed, and this is the host's memory")));

  ASSERT_TRUE(process.Join(options).ok());
  const std::vector<Gradient> gradients = on_host.replica().Gradients();
  const absl::Status no_step = process.session().Step(gradients, {kRates}).status();
  EXPECT_EQ(no_step.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(MessageOf(no_step),
              StartsWith("the gradient of tensor 'tensor0' [3700]: memory of GPU 0"));
  // Nothing has happened.
  EXPECT_TRUE(process.Step().ok());
}

#ifndef SIGNPOST_REAL_GPU

// What a test can ask of a simulated GPU only.
class SimulatedGpuNodeTest : public GpuNodeTest {
 protected:
  kernels::cuda::SimulatedGpu& gpu() { return static_cast<kernels::cuda::SimulatedGpu&>(*gpu_); }
};

TEST_F(SimulatedGpuNodeTest, AStepTakesNoMemoryOfTheGpuAndPinsNothing) {
  for (const IsOnGpu& workers : {kNone, kAll}) {
    has_gpu_ = workers;
    Nodes nodes(Options(/*nodes=*/1, /*processes=*/1));
    Process process(JobOn(kAll), 0);
    ASSERT_TRUE(process.Join(nodes.OptionsOf(0)).ok());
    const auto before = gpu().counts();
    for (uint64_t step = 0; step < kSteps; ++step) ASSERT_TRUE(process.Step().ok());
    const auto after = gpu().counts();
    // Without the test's own, for each gradient.
    EXPECT_EQ(after.allocations - before.allocations, kSteps);
    EXPECT_EQ(after.pinned_allocations - before.pinned_allocations, kSteps);
    EXPECT_EQ(after.pins, before.pins);
    EXPECT_EQ(after.streams, before.streams);
    EXPECT_EQ(after.events, before.events);
  }
}

TEST_F(SimulatedGpuNodeTest, BesideAWorkerOnAGpuOnlyBitsCrossToTheHost) {
  has_gpu_ = kAll;
  job_.optimizer = {.freeze_step = 2};
  Nodes nodes(Options(/*nodes=*/1, /*processes=*/1));
  Process process(JobOn(kAll), 0);
  ASSERT_TRUE(process.Join(nodes.OptionsOf(0)).ok());
  while (process.session().steps() < 4) ASSERT_TRUE(process.Step().ok());
  const size_t elements = process.replica().values.size();
  const auto before = gpu().counts();
  ASSERT_TRUE(process.Step().ok());
  const auto after = gpu().counts();
  const double bits = 1 + 32.0 / job_.worker.block_elements;
  // Tables of what kernels are to do, which small tensors have much of.
  const double tables = 0.2 * elements;
  EXPECT_LT(8 * (after.bytes_out - before.bytes_out), 1.05 * bits * elements + tables);
  const uint64_t own = 4 * elements;  // the test's gradient
  EXPECT_LT(8 * (after.bytes_in - before.bytes_in - own), 1.05 * bits * elements + 8 * tables);
}

TEST_F(SimulatedGpuNodeTest, AProcessThatDiedIsNamedAndAllGoOnWithTheSameBits) {
  const auto train = [](Process& process, uint64_t steps) {
    absl::Status status;
    while (status.ok() && process.session().steps() < steps) status = process.Step();
    return status;
  };
  Nodes undisturbed(Options(/*nodes=*/1));
  std::vector<std::vector<float>> wanted(2);
  OnEachRank(2, [&](uint32_t number) {
    Process process(JobOn(kAll), number);
    ASSERT_TRUE(process.Join(undisturbed.OptionsOf(number)).ok());
    ASSERT_TRUE(train(process, kSteps).ok());
    wanted[number] = process.Values();
  });
  for (const auto& [workers, comes_back_on] : {std::pair(kNone, kNone), std::pair(kAll, kAll)}) {
    has_gpu_ = workers;
    Nodes nodes(Options(/*nodes=*/1));
    std::vector<std::vector<float>> ends(2);
    OnEachRank(2, [&, &comes_back_on = comes_back_on](uint32_t number) {
      auto process = std::make_unique<Process>(JobOn(kAll), number);
      const SessionOptions options = nodes.OptionsOf(number);
      ASSERT_TRUE(process->Join(options).ok());
      ASSERT_TRUE(train(*process, 7).ok());
      if (number == 1) {
        process->Die();
        process = std::make_unique<Process>(JobOn(comes_back_on), number);
      } else {
        const absl::Status told = train(*process, kSteps);
        EXPECT_EQ(told.code(), absl::StatusCode::kAborted);
        EXPECT_THAT(MessageOf(told), ContainsRegex("local rank 1 \\(process [0-9]+\\) .* is gone"));
      }
      const absl::Status joined = process->Join(options);
      ASSERT_TRUE(joined.ok()) << joined;
      EXPECT_EQ(process->session().steps(), 7);
      ASSERT_TRUE(train(*process, kSteps).ok());
      ends[number] = process->Values();
    });
    EXPECT_EQ(ends, wanted);
  }
}

TEST_F(SimulatedGpuNodeTest, AWorkerOnAGpuBeginsAnewWithAnotherNodeThatHasLeftTheJob) {
  has_gpu_ = kAll;
  const std::vector<float> wanted = TrainOn(kAll);
  Nodes nodes(Options(/*nodes=*/2));
  absl::Notification have_left[2];
  OnEachRank(nodes.processes(), [&](uint32_t number) {
    auto process = std::make_unique<Process>(JobOn(kAll), number);
    ASSERT_TRUE(process->Join(nodes.OptionsOf(number)).ok());
    ASSERT_TRUE(process->Step().ok());
    if (number < 2) {
      EXPECT_TRUE(process->session().Leave().ok());
      have_left[number].Notify();
    }
    for (const absl::Notification& has_left : have_left) has_left.WaitForNotification();
    process = std::make_unique<Process>(JobOn(kAll), number);
    const absl::Status joined = process->Join(nodes.OptionsOf(number));
    ASSERT_TRUE(joined.ok()) << joined;
    EXPECT_EQ(process->session().steps(), 0);
    while (process->session().steps() < kSteps) ASSERT_TRUE(process->Step().ok());
    EXPECT_EQ(process->Values(), wanted);
  });
}

TEST_F(SimulatedGpuNodeTest, AGpuThatCannotGetAtTheWorkersSaysWhatToDo) {
  const std::unique_ptr<Gpu> of_worker = NewGpu();
  NodesOptions options = Options(/*nodes=*/1, /*processes=*/1);
  options.gpu_of = [&](uint32_t) { return of_worker.get(); };
  Nodes nodes(options);
  // A GPU of its own that can trains as well.
  Process process(JobOn(kAll), 0);
  ASSERT_TRUE(process.Join(nodes.OptionsOf(0)).ok());
  ASSERT_TRUE(process.Step().ok());
  EXPECT_TRUE(process.session().Leave().ok());
  process.Die();

  gpu().RefuseImports();
  const absl::Status refused = process.Join(nodes.OptionsOf(0));
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(MessageOf(refused),
              AllOf(HasSubstr("GPU 0 (simulated) cannot share memory with GPUs of other processes"),
                    HasSubstr("the worker of this node is on one: start it without --gpu")));
}

TEST_F(SimulatedGpuNodeTest, AWorkersGpuWithoutRoomRefusesTheProcess) {
  const std::unique_ptr<Gpu> of_worker = NewGpu();
  NodesOptions options = Options(/*nodes=*/1, /*processes=*/1);
  options.gpu_of = [&](uint32_t) { return of_worker.get(); };
  Nodes nodes(options);
  Process process(JobOn(kAll), 0);
  const size_t bytes = 4 * process.replica().values.size();
  auto& small = static_cast<kernels::cuda::SimulatedGpu&>(*of_worker);
  // For nothing; parameters; gradients too; and the mean.
  for (const size_t room : {bytes - 1, 2 * bytes - 1, 3 * bytes - 1, 4 * bytes}) {
    small.LimitMemory(room);
    const absl::Status refused = process.Join(nodes.OptionsOf(0));
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
    EXPECT_THAT(MessageOf(refused), HasSubstr("GPU 0 (simulated) has no room for another"));
  }
  small.LimitMemory(size_t{1} << 30);
  const absl::Status joined = process.Join(nodes.OptionsOf(0));
  ASSERT_TRUE(joined.ok()) << joined;
  EXPECT_TRUE(process.Step().ok());
}

TEST_F(SimulatedGpuNodeTest, MemoryThatCannotBePinnedEndsTheJoinAndSaysWhatToDo) {
  Nodes nodes(Options(/*nodes=*/1, /*processes=*/1));
  Process process(JobOn(kAll), 0);
  gpu().LimitPins(1000);
  const absl::Status refused = process.Join(nodes.OptionsOf(0));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(MessageOf(refused),
              AllOf(HasSubstr("GPU 0 (simulated) cannot have"),
                    HasSubstr("docker run --ulimit memlock=-1"), HasSubstr("SIGNPOST_NODE")));
  // Its place is free.
  gpu().LimitPins(size_t{1} << 30);
  const absl::Status joined = process.Join(nodes.OptionsOf(0));
  ASSERT_TRUE(joined.ok()) << joined;
  EXPECT_TRUE(process.Step().ok());
}

// Processes with a GPU of their own, whose node's worker has another.
TEST_F(SimulatedGpuNodeTest, AWorkerIsToldThatItsGpuIsLost) {
  enum class FailsIn { kStepOfProcess, kStep, kCheckpoint, kAttach };
  for (const FailsIn where :
       {FailsIn::kStepOfProcess, FailsIn::kStep, FailsIn::kCheckpoint, FailsIn::kAttach}) {
    SCOPED_TRACE(static_cast<int>(where));
    gpu_ = NewGpu();
    const std::unique_ptr<Gpu> of_worker = NewGpu();
    auto& faulty = where == FailsIn::kStepOfProcess
                       ? gpu()
                       : static_cast<kernels::cuda::SimulatedGpu&>(*of_worker);
    std::atomic<int> lost = 0;
    NodesOptions options = Options(/*nodes=*/1, /*processes=*/1);
    options.gpu_of = [&](uint32_t) { return of_worker.get(); };
    options.on_lost_gpu = [&lost](const absl::Status& why) {
      EXPECT_EQ(why.code(), absl::StatusCode::kUnavailable);
      EXPECT_THAT(MessageOf(why), HasSubstr("GPU 0 (simulated)"));
      ++lost;
    };
    Nodes nodes(options);
    Process process(JobOn(kAll), 0);
    if (where == FailsIn::kAttach) {
      faulty.FailOperationAfter(0);
      EXPECT_FALSE(faulty.Write(faulty.Allocate(1)->get(), "", 1, faulty.NewStream()->get()).ok());
      EXPECT_EQ(process.Join(nodes.OptionsOf(0)).code(), absl::StatusCode::kUnavailable);
    } else {
      ASSERT_TRUE(process.Join(nodes.OptionsOf(0)).ok());
      ASSERT_TRUE(process.Step().ok());
      faulty.FailOperationAfter(0);
      const absl::Status failed =
          where == FailsIn::kCheckpoint
              ? process.session().Checkpoint(::testing::TempDir() + "/of_lost_gpu")
              : process.Step();
      EXPECT_EQ(failed.code(), absl::StatusCode::kUnavailable) << failed;
    }
    process.Die();
    nodes.End(0);
    EXPECT_EQ(lost, where == FailsIn::kStepOfProcess ? 0 : 1);
  }
}

// Wherever it happens, a step says so: none succeeds whose numbers did not get there, and none
// waits for ever.
TEST_F(SimulatedGpuNodeTest, AFaultEndsTheStepItHappensInOrTheNext) {
  job_.tensors = {300, 8};
  job_.gradient_type_on_gpu = GradientType::kBfloat16;
  for (const IsOnGpu& workers : {kNone, kAll}) {
    has_gpu_ = workers;
    for (int operations = 0;; operations += 3) {
      SCOPED_TRACE(operations);
      gpu_ = NewGpu();
      bool is_over;
      {
        Nodes nodes(Options(/*nodes=*/1, /*processes=*/1));
        Process process(JobOn(kAll), 0);
        gpu().FailOperationAfter(operations);
        absl::Status status = process.Join(nodes.OptionsOf(0));
        for (int step = 0; step < 3 && status.ok(); ++step) status = process.Step();
        if (status.ok()) status = process.session().Leave();
        is_over = status.ok();
        if (!is_over) {
          EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
          EXPECT_THAT(MessageOf(status), HasSubstr("GPU 0 (simulated)"));
        }
      }
      if (!is_over) continue;
      EXPECT_GT(operations, 20);
      EXPECT_TRUE(gpu().Allocate(1).ok()) << "it has failed, and nobody has said so";
      break;
    }
  }
}

#endif  // SIGNPOST_REAL_GPU

}  // namespace
}  // namespace signpost::testing
