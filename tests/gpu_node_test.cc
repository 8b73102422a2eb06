// Processes on GPUs that train through the worker of their node, alone and beside others on the
// host: the bytes are those of nodes whose processes are all on the host. On a simulated GPU, or
// with SIGNPOST_REAL_GPU on a real one, where there is one. The processes are threads, and share
// that GPU.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/gpu.h"
#include "node/attached_session.h"
#include "tests/job.h"
#include "tests/nodes.h"
#ifndef SIGNPOST_REAL_GPU
#include "kernels/simulated_gpu.h"
#endif

namespace signpost::testing {
namespace {

using kernels::cuda::Gpu;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

// Null where there is none.
std::unique_ptr<Gpu> NewGpu() {
#ifdef SIGNPOST_REAL_GPU
  absl::StatusOr<std::unique_ptr<Gpu>> gpu = kernels::cuda::OpenGpu(0);
  if (gpu.ok()) return *std::move(gpu);
  std::printf("there is no device: %s\n", MessageOf(gpu.status()).c_str());
  return nullptr;
#else
  static uint32_t seed = 0;
  return std::make_unique<kernels::cuda::SimulatedGpu>(++seed);
#endif
}

using IsOnGpu = std::function<bool(uint32_t process)>;
const IsOnGpu kNone = [](uint32_t) { return false; };
const IsOnGpu kAll = [](uint32_t) { return true; };
const IsOnGpu kEverySecond = [](uint32_t process) { return process % 2 == 1; };

constexpr GroupRates kRates = {.learning_rate = 0.01, .weight_decay = 0.1};

// One process of a node, with its session.
class Process {
 public:
  Process(const JobOptionsForTest& job, uint32_t process)
      : number_(process), optimizer_(job.optimizer), replica_(job, process) {}

  absl::Status Join(const SessionOptions& options) {
    session_.reset();
    auto session = node::AttachedSession::JoinOn(replica_.Options().gpu, options, optimizer_,
                                                 replica_.Parameters());
    if (session.ok()) session_ = *std::move(session);
    return session.status();
  }
  void Die() { session_.reset(); }

  // Gradients, such as half as many bytes have too.
  void MakeGradient() {
    replica_.gradient =
        GradientOf(number_, static_cast<int>(session_->steps()), replica_.gradient.size());
    for (float& g : replica_.gradient) g = std::round(g * 16) / 16;
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
    job_.optimizer = {.freeze_step = 5, .variance_refresh_interval = 4};
  }

  NodesOptions Options(uint32_t nodes) const { return {.nodes = nodes, .worker = job_.worker}; }

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
  JobOptionsForTest job_;
};

TEST_F(GpuNodeTest, HasTheBytesOfNodesOnTheHost) {
  const std::vector<float> wanted = TrainOn(kNone);
  EXPECT_EQ(TrainOn(kAll), wanted);
  EXPECT_EQ(TrainOn(kEverySecond), wanted);
}

TEST_F(GpuNodeTest, AlsoWithGradientsOfHalfTheBytes) {
  const std::vector<float> wanted = TrainOn(kNone);
  for (const GradientType type : {GradientType::kBfloat16, GradientType::kFloat16}) {
    job_.gradient_type_on_gpu = type;
    EXPECT_EQ(TrainOn(kAll), wanted);
    EXPECT_EQ(TrainOn(kEverySecond), wanted);
  }
}

TEST_F(GpuNodeTest, AlsoInParts) {
  const std::vector<float> wanted = TrainOn(kNone);
  EXPECT_EQ(TrainOn(kAll, &Process::StepInParts), wanted);
  job_.gradient_type_on_gpu = GradientType::kBfloat16;
  EXPECT_EQ(TrainOn(kEverySecond, &Process::StepInParts), wanted);
}

TEST_F(GpuNodeTest, AlsoWithLambAndZeroOneAdam) {
  const std::vector<float> of_adam = TrainOn(kNone);
  OptimizerOptions lamb = {.freeze_step = 5, .lamb = LambOptions()};
  OptimizerOptions zero_one = {.freeze_step = 6};
  zero_one.zero_one = {.var_update_scaler = 2, .local_step_scaler = 2, .local_step_clipper = 2};
  for (const OptimizerOptions& optimizer : {lamb, zero_one}) {
    job_.optimizer = optimizer;
    const std::vector<float> wanted = TrainOn(kNone);
    EXPECT_NE(wanted, of_adam);
    EXPECT_EQ(TrainOn(kEverySecond), wanted);
  }
}

TEST_F(GpuNodeTest, BeginsWithTheValuesOfRank0IfAsked) {
  Nodes nodes(Options(/*nodes=*/2));
  OnEachRank(nodes.processes(), [&](uint32_t number) {
    const size_t elements = Process(job_, 0).replica().values.size();
    Process process(JobOn(kEverySecond), number);
    const std::vector<float> other(elements, static_cast<float>(number));
    const std::vector<Parameter> parameters = process.replica().Parameters();
    float* const first = parameters[0].values.data();
    if (kEverySecond(number)) {
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

TEST_F(GpuNodeTest, SavedStatesLeadToAndFromTheHost) {
  std::vector<std::string> states(2);
  std::vector<float> values;  // in the end
  const auto train = [&](const IsOnGpu& is_on_gpu, uint64_t steps, bool resumes) {
    Nodes nodes(Options(/*nodes=*/1));
    OnEachRank(nodes.processes(), [&](uint32_t number) {
      Process process(JobOn(is_on_gpu), number);
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
  const std::vector<float> wanted = train(kNone, kSteps, /*resumes=*/false);
  for (const auto& [before, after] : {std::pair(kAll, kNone), std::pair(kNone, kEverySecond)}) {
    train(before, 7, /*resumes=*/false);
    EXPECT_EQ(train(after, kSteps, /*resumes=*/true), wanted);
  }
}

TEST_F(GpuNodeTest, RefusesWhatIsOnTheHost) {
  Nodes nodes({.nodes = 1, .processes = 1, .worker = job_.worker});
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
  Nodes nodes({.nodes = 1, .processes = 1, .worker = job_.worker});
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

TEST_F(SimulatedGpuNodeTest, AProcessThatDiedIsNamedAndAllGoOnWithTheSameBits) {
  Nodes undisturbed(Options(/*nodes=*/1)), nodes(Options(/*nodes=*/1));
  std::vector<std::vector<float>> wanted(2), ends(2);
  const auto train = [](Process& process, uint64_t steps) {
    absl::Status status;
    while (status.ok() && process.session().steps() < steps) status = process.Step();
    return status;
  };
  OnEachRank(2, [&](uint32_t number) {
    Process process(JobOn(kAll), number);
    ASSERT_TRUE(process.Join(undisturbed.OptionsOf(number)).ok());
    ASSERT_TRUE(train(process, kSteps).ok());
    wanted[number] = process.Values();
  });
  OnEachRank(2, [&](uint32_t number) {
    auto process = std::make_unique<Process>(JobOn(kAll), number);
    const SessionOptions options = nodes.OptionsOf(number);
    ASSERT_TRUE(process->Join(options).ok());
    ASSERT_TRUE(train(*process, 7).ok());
    if (number == 1) {
      process->Die();
      process = std::make_unique<Process>(JobOn(kEverySecond), number);
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

TEST_F(SimulatedGpuNodeTest, MemoryThatCannotBePinnedEndsTheJoinAndSaysWhatToDo) {
  Nodes nodes({.nodes = 1, .processes = 1, .worker = job_.worker});
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

// Wherever it happens, a step says so: none succeeds whose numbers did not get there, and none
// waits for ever.
TEST_F(SimulatedGpuNodeTest, AFaultEndsTheStepItHappensInOrTheNext) {
  job_.tensors = {300, 8};
  job_.gradient_type_on_gpu = GradientType::kBfloat16;
  Nodes nodes({.nodes = 1, .processes = 1, .worker = job_.worker});
  for (int operations = 0;; operations += 3) {
    SCOPED_TRACE(operations);
    gpu_ = NewGpu();
    auto process = std::make_unique<Process>(JobOn(kAll), 0);
    gpu().FailOperationAfter(operations);
    absl::Status status = process->Join(nodes.OptionsOf(0));
    for (int step = 0; step < 3 && status.ok(); ++step) status = process->Step();
    if (status.ok()) status = process->session().Leave();
    const bool is_over = status.ok();
    if (!is_over) {
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
      EXPECT_THAT(MessageOf(status), HasSubstr("GPU 0 (simulated)"));
    }
    process.reset();
    if (!is_over) continue;
    EXPECT_GT(operations, 20);
    EXPECT_TRUE(gpu().Allocate(1).ok()) << "it has failed, and nobody has said so";
    break;
  }
}

#endif  // SIGNPOST_REAL_GPU

}  // namespace
}  // namespace signpost::testing
