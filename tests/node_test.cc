// Processes that train through the worker of their node, against workers that train by themselves.
// Here they are threads, and so is the worker unless it has to die; node_run_test.cc has real ones.

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/session.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "node/process_watch.h"
#include "node/server.h"
#include "proto/failure_timeout.h"
#include "proto/node.grpc.pb.h"
#include "proto/try_again.h"
#include "tests/cluster.h"
#include "tests/job.h"
#include "tests/nodes.h"
#include "tests/server_process.h"
#include "worker/grpc_channel.h"

namespace signpost::testing {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

// A training process's model.
struct Model {
  explicit Model(uint32_t process, JobOptionsForTest options = {}) : replica(options, process) {}

  absl::StatusOr<std::unique_ptr<Session>> Join(const SessionOptions& options,
                                                const OptimizerOptions& optimizer = Optimizer()) {
    return Session::Join(options, optimizer, replica.Parameters());
  }

  static OptimizerOptions Optimizer() { return {.freeze_step = 5, .variance_refresh_interval = 4}; }

  Replica replica;
};

constexpr int kSteps = 12;
constexpr GroupRates kRates = {.learning_rate = 0.01, .weight_decay = 0.1};

std::vector<float> MeanGradient(uint32_t node, uint32_t processes, int step, size_t elements) {
  std::vector<float> total;
  for (uint32_t group = 0; group < processes; group += 4) {
    std::vector<float> sum;
    for (uint32_t i = group; i < std::min(group + 4, processes); ++i) {
      const std::vector<float> gradient = GradientOf(node * processes + i, step, elements);
      if (sum.empty()) {
        sum = gradient;
      } else {
        for (size_t j = 0; j < elements; ++j) sum[j] += gradient[j];
      }
    }
    if (total.empty()) {
      total = sum;
    } else {
      for (size_t j = 0; j < elements; ++j) total[j] += sum[j];
    }
  }
  for (float& value : total) value *= 1.0f / processes;
  return total;
}

// Parameters after kSteps of workers that have the means of the processes' gradients.
std::vector<float> TrainedOnMeans(uint32_t nodes, uint32_t processes,
                                  const OptimizerOptions& optimizer = Model::Optimizer()) {
  Cluster cluster({.aggregators = 2});
  JobOptionsForTest options;
  options.workers = nodes;
  options.worker = WorkerOfNodes();
  options.optimizer = optimizer;
  options.steps = kSteps;
  return Train(cluster, options, /*after_step=*/nullptr,
               [&](uint32_t rank, int step, std::vector<float>& gradient) {
                 gradient = MeanGradient(rank, processes, step, gradient.size());
               })[0];
}

absl::StatusOr<StepReport> TakeStep(Session& session, uint32_t process, Replica& replica) {
  replica.gradient = GradientOf(process, session.steps(), replica.values.size());
  return session.Step(replica.Gradients(), {kRates});
}

// Every process joins, trains to the end and leaves. Their parameters.
std::vector<std::vector<float>> TrainAttached(
    Nodes& nodes,
    const std::function<absl::StatusOr<StepReport>(Session&, uint32_t process, Replica&)>&
        take_step = TakeStep,
    const OptimizerOptions& optimizer = Model::Optimizer()) {
  std::vector<std::vector<float>> results(nodes.processes());
  OnEachRank(nodes.processes(), [&](uint32_t process) {
    Model model(process);
    auto session = model.Join(nodes.OptionsOf(process), optimizer);
    ASSERT_TRUE(session.ok()) << session.status();
    EXPECT_FALSE((*session)->returned());
    while ((*session)->steps() < kSteps) {
      const uint64_t step = (*session)->steps();
      const absl::StatusOr<StepReport> report = take_step(**session, process, model.replica);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->step, step);
    }
    EXPECT_TRUE((*session)->Leave().ok());
    results[process] = model.replica.values;
  });
  return results;
}

// A process as it is on the socket: it can go at any moment.
class RawProcess {
 public:
  explicit RawProcess(const std::string& target)
      : stub_(node::NodeService::NewStub(
            grpc::CreateChannel(target, grpc::InsecureChannelCredentials()))),
        stream_(stub_->Serve(&context_)) {}
  ~RawProcess() {
    Die();
    stream_->Finish();
  }

  void Die() { context_.TryCancel(); }

  void Send(const node::Request& request) { stream_->Write(request); }
  absl::StatusOr<node::Reply> Receive() {
    node::Reply reply;
    if (!stream_->Read(&reply)) return absl::CancelledError("no reply");
    if (reply.code() == 0) return reply;
    return absl::Status(static_cast<absl::StatusCode>(reply.code()), reply.message());
  }
  absl::StatusOr<node::Reply> Call(const node::Request& request) {
    Send(request);
    return Receive();
  }

 private:
  std::unique_ptr<node::NodeService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<node::Request, node::Reply>> stream_;
};

// One tensor of 8 elements.
node::Request RawAttach(uint32_t rank, uint32_t world_size) {
  node::Request request;
  node::Attach& attach = *request.mutable_attach();
  attach.set_job("raw");
  attach.set_rank(rank);
  attach.set_world_size(world_size);
  attach.set_pid(1000 + rank);
  Tensor& tensor = *attach.mutable_definition()->add_tensors();
  tensor.set_name("x");
  tensor.add_shape(8);
  attach.mutable_definition()->add_groups(0);
  node::Options& options = *attach.mutable_definition()->mutable_options();
  options.set_block_elements(8);
  options.set_gamma(1.35);
  options.set_join_timeout_us(30'000'000);
  options.set_exchange_timeout_us(30'000'000);
  options.set_freeze_step(5);
  options.set_warm_up_codec(FLOAT32);
  options.set_variance_codec(FLOAT32);
  options.set_codec(ONE_BIT);
  options.set_variance_floor(0.01);
  return request;
}

node::Request RawBegin() {
  node::Request request;
  request.mutable_begin();
  return request;
}

node::Request RawStep(double learning_rate = 0.01) {
  node::Request request;
  const GroupRates rates = {.learning_rate = learning_rate};
  *request.mutable_step()->mutable_rates() = MessageOf({&rates, 1}, Schedule());
  return request;
}

// Returns when the first of two nodes has sent all of its part of that step, of fp32 gradients as
// those before, and waits for the second's.
void AwaitFirstNodesPart(Nodes& nodes, const std::string& job, size_t elements, uint64_t step) {
  StatusRequest about;
  about.set_job(job);
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (absl::Now() < deadline) {
    uint64_t bytes = 0;
    for (const std::string& target : nodes.cluster().targets()) {
      const auto status = ConnectToAggregator(target, FailureTimeout())->Status(about, deadline);
      ASSERT_TRUE(status.ok()) << status.status();
      if (status->jobs_size() == 1) bytes += status->jobs(0).payload_bytes_received();
    }
    if (bytes == (2 * step + 1) * elements * sizeof(float)) return;
  }
  FAIL() << "the first node has not sent its part of step " << step;
}

// The worker of the first node, with two processes, in the place of the one that `nodes` has.
std::unique_ptr<ServerProcess> StartWorkerProcess(Nodes& nodes, uint32_t world_size) {
  nodes.End(0);
  auto worker = std::make_unique<ServerProcess>(
      absl::StrCat("worker --listen ", nodes.SocketOf(0), " --processes 2 --rank 0 --world-size ",
                   world_size, " --aggregators ", absl::StrJoin(nodes.cluster().targets(), ",")));
  EXPECT_EQ(worker->target(), nodes.SocketOf(0));
  return worker;
}

// What must hold.

class NodeTest : public ::testing::TestWithParam<uint32_t> {};

INSTANTIATE_TEST_SUITE_P(Processes, NodeTest, ::testing::Values(1, 2, 4, 6));

TEST_P(NodeTest, TrainsAsOneWorkerWouldOnTheMeanOfItsProcessesGradients) {
  Nodes nodes({.nodes = 2, .processes = GetParam()});
  const std::vector<float> wanted = TrainedOnMeans(2, GetParam());
  for (const std::vector<float>& values : TrainAttached(nodes)) EXPECT_EQ(values, wanted);
}

struct OptimizerCase {
  const char* name;
  OptimizerOptions optimizer;
};

class NodeOptimizerTest : public ::testing::TestWithParam<OptimizerCase> {};

INSTANTIATE_TEST_SUITE_P(
    With, NodeOptimizerTest,
    ::testing::Values(
        OptimizerCase{"Adam", {}}, OptimizerCase{"Int8Momentum", {.freeze_step = 5, .codec = INT8}},
        OptimizerCase{"OneBitLamb", {.freeze_step = 5, .lamb = LambOptions()}},
        OptimizerCase{"OneBitLambAfterInt8",
                      {.freeze_step = 5, .warm_up_codec = INT8, .lamb = LambOptions()}},
        OptimizerCase{"OneBitLambInBf16",
                      {.freeze_step = 5, .codec = BFLOAT16, .lamb = LambOptions()}},
        OptimizerCase{"ACodecFromOutside", {.freeze_step = 5, .codec = CUSTOM}},
        OptimizerCase{"OneBitAdamAfterACodecFromOutside",
                      {.freeze_step = 5, .warm_up_codec = CUSTOM}},
        OptimizerCase{"OneBitAdamRefreshedInInt8",
                      {.freeze_step = 5, .variance_codec = INT8, .variance_refresh_interval = 3}},
        // Steps 5, 7, 9 and 11 end intervals: after seven it is within one.
        OptimizerCase{"ZeroOneAdam",
                      {.freeze_step = 4,
                       .zero_one = ZeroOneOptions{.var_update_scaler = 1,
                                                  .local_step_scaler = 2,
                                                  .local_step_clipper = 2}}}),
    [](const auto& info) { return info.param.name; });

TEST_P(NodeOptimizerTest, TrainsAsOneWorkerWouldOnTheMeanOfItsProcessesGradients) {
  Nodes nodes({.nodes = 2, .processes = 2});
  const OptimizerOptions& optimizer = GetParam().optimizer;
  const std::vector<float> wanted = TrainedOnMeans(2, 2, optimizer);
  ASSERT_NE(wanted, TrainedOnMeans(2, 2)) << "the optimizer was not used";
  for (const std::vector<float>& values : TrainAttached(nodes, TakeStep, optimizer)) {
    EXPECT_EQ(values, wanted);
  }
}

TEST(Node, SendsTheBytesOfOneWorkerWhateverTheNumberOfItsProcesses) {
  const auto bytes_with = [](uint32_t processes) {
    Nodes nodes({.nodes = 1, .processes = processes});
    std::atomic<uint64_t> sent = 0;
    TrainAttached(nodes, [&](Session& session, uint32_t process, Replica& replica) {
      auto report = TakeStep(session, process, replica);
      sent = session.wire_bytes().sent;
      return report;
    });
    return sent.load();
  };
  Nodes nodes({.nodes = 1, .processes = 1});
  Model model(0);
  auto session = model.Join(nodes.AggregatorsAs(0, 1));
  ASSERT_TRUE(session.ok()) << session.status();
  while ((*session)->steps() < kSteps) {
    ASSERT_TRUE(TakeStep(**session, 0, model.replica).ok());
  }
  const double alone = (*session)->wire_bytes().sent;
  // Pings come when they come.
  EXPECT_NEAR(bytes_with(1) / alone, 1, 0.05);
  EXPECT_NEAR(bytes_with(4) / alone, 1, 0.05);
}

TEST(Node, TakesGradientsOneByOneInAnyOrder) {
  Nodes nodes({.nodes = 2, .processes = 2});
  const std::vector<float> wanted = TrainedOnMeans(2, 2);
  const auto in_parts = [](Session& session, uint32_t process,
                           Replica& replica) -> absl::StatusOr<StepReport> {
    replica.gradient = GradientOf(process, session.steps(), replica.values.size());
    const std::vector<Gradient> gradients = replica.Gradients();
    if (process == 0) return session.Step(gradients, {kRates});
    EXPECT_TRUE(session.BeginStep({kRates}).ok());
    for (size_t i = 0; i < gradients.size(); ++i) {
      const size_t tensor = (i + process) % gradients.size();
      EXPECT_TRUE(session.GradientReady(tensor, gradients[tensor]).ok());
    }
    return session.FinishStep();
  };
  for (const std::vector<float>& values : TrainAttached(nodes, in_parts)) {
    EXPECT_EQ(values, wanted);
  }
}

TEST(Node, RefusesCallsOutOfOrderAsAWorkerDoes) {
  Nodes nodes({.nodes = 1, .processes = 1});
  Model model(0);
  auto session = model.Join(nodes.OptionsOf(0));
  ASSERT_TRUE(session.ok()) << session.status();
  const std::vector<Gradient> gradients = model.replica.Gradients();
  const auto refused = absl::StatusCode::kFailedPrecondition;
  EXPECT_EQ((*session)->GradientReady(0, gradients[0]).code(), refused);
  EXPECT_EQ((*session)->FinishStep().status().code(), refused);
  EXPECT_EQ((*session)->BeginStep({GroupRates{.learning_rate = NAN}}).code(),
            absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE((*session)->BeginStep({kRates}).ok());
  EXPECT_EQ((*session)->BeginStep({kRates}).code(), refused);
  EXPECT_EQ((*session)->Step(gradients, {kRates}).status().code(), refused);
  EXPECT_EQ((*session)->SaveState().status().code(), refused);
  ASSERT_TRUE((*session)->GradientReady(0, gradients[0]).ok());
  EXPECT_THAT(MessageOf((*session)->GradientReady(0, gradients[0])), HasSubstr("came twice"));
  EXPECT_EQ((*session)->GradientReady(1, gradients[0]).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(MessageOf((*session)->FinishStep().status()), HasSubstr("that of 'tensor1'"));
  for (size_t i = 1; i < gradients.size(); ++i) {
    ASSERT_TRUE((*session)->GradientReady(i, gradients[i]).ok());
  }
  EXPECT_TRUE((*session)->FinishStep().ok());
  EXPECT_TRUE((*session)->Leave().ok());
  for (const absl::Status& status :
       {(*session)->Step(gradients, {kRates}).status(), (*session)->BeginStep({kRates}),
        (*session)->Checkpoint(::testing::TempDir()), (*session)->SaveState().status()}) {
    EXPECT_EQ(status, absl::InvalidArgumentError("this process has left its job: join again"));
  }
}

// In one of 0/1 Adam's local intervals a node has parameters of its own, and so has each process
// that attaches.
TEST(Node, TakesLocalStepsAsItsWorkerWouldOnTheMeanOfItsProcessesGradients) {
  constexpr uint32_t kNodes = 2, kProcesses = 2;
  const OptimizerOptions optimizer = {
      .freeze_step = 3,
      .zero_one =
          ZeroOneOptions{.var_update_scaler = 1, .local_step_scaler = 2, .local_step_clipper = 4}};
  // What is there after so many steps. Steps 5 and 6 end with a synchronisation, and 7 to 10.
  struct After {
    std::vector<float> values;
    bool is_synchronised = true;
    double sent_bits = 0;
  };
  std::vector<std::vector<After>> wanted(kNodes, std::vector<After>(kSteps + 1));
  {
    Cluster cluster({.aggregators = 2});
    JobOptionsForTest options;
    options.workers = kNodes;
    options.optimizer = optimizer;
    options.steps = kSteps;
    options.take_step = [&](uint32_t rank, int step, Worker& worker,
                            absl::Span<const Gradient> gradients, const GroupRates& rates) {
      auto report = worker.Step(gradients, {rates});
      if (report.ok()) wanted[rank][step + 1].sent_bits = report->sent_bits;
      return report;
    };
    Train(
        cluster, options,
        [&](uint32_t rank, int step, const Replica& replica, Worker& worker) {
          wanted[rank][step + 1].values = replica.values;
          wanted[rank][step + 1].is_synchronised = worker.is_synchronised();
        },
        [&](uint32_t rank, int step, std::vector<float>& gradient) {
          gradient = MeanGradient(rank, kProcesses, step, gradient.size());
        });
  }
  ASSERT_NE(wanted[0][9].values, wanted[1][9].values);

  Nodes nodes({.nodes = kNodes, .processes = kProcesses});
  OnEachRank(nodes.processes(), [&](uint32_t process) {
    const std::vector<After>& wanted_here = wanted[process / kProcesses];
    Model model(process);
    auto session = model.Join(nodes.OptionsOf(process), optimizer);
    ASSERT_TRUE(session.ok()) << session.status();
    bool has_died = process != 1;  // the others of its node attach again
    while ((*session)->steps() < kSteps) {
      const auto report = TakeStep(**session, process, model.replica);
      if (process == 0 && absl::IsAborted(report.status())) {
        session->reset();
        session = model.Join(nodes.OptionsOf(process), optimizer);
        ASSERT_TRUE(session.ok()) << session.status();
        continue;
      }
      ASSERT_TRUE(report.ok()) << report.status();
      const uint64_t steps = (*session)->steps();
      EXPECT_EQ(model.replica.values, wanted_here[steps].values) << "after " << steps;
      EXPECT_EQ((*session)->is_synchronised(), wanted_here[steps].is_synchronised)
          << "after " << steps;
      EXPECT_EQ((*session)->is_synchronised(), steps < 6 || steps == 7 || steps == 11);
      EXPECT_EQ(report->codec == CODEC_UNSPECIFIED, !wanted_here[steps].is_synchronised);
      EXPECT_EQ(report->sent_bits, wanted_here[steps].sent_bits);
      if (has_died || steps != 9) continue;
      has_died = true;
      std::fill(model.replica.values.begin(), model.replica.values.end(), -1);
      session->reset();
      session = model.Join(nodes.OptionsOf(process), optimizer);
      ASSERT_TRUE(session.ok()) << session.status();
      EXPECT_EQ((*session)->steps(), 9);
      EXPECT_FALSE((*session)->is_synchronised());
      EXPECT_EQ(model.replica.values, wanted_here[9].values);
    }
    EXPECT_TRUE((*session)->Leave().ok());
  });
}

TEST(Node, TrainsSeveralJobsAtATime) {
  Nodes nodes({.nodes = 2, .processes = 2});
  const std::vector<float> wanted = TrainedOnMeans(2, 2);
  OnEachRank(8, [&](uint32_t i) {
    const uint32_t process = i % 4;
    Model model(process);
    SessionOptions options = nodes.OptionsOf(process);
    options.worker.job = absl::StrCat("job ", i / 4);
    auto session = model.Join(options);
    ASSERT_TRUE(session.ok()) << session.status();
    while ((*session)->steps() < kSteps) {
      ASSERT_TRUE(TakeStep(**session, process, model.replica).ok());
    }
    EXPECT_TRUE((*session)->Leave().ok());
    EXPECT_EQ(model.replica.values, wanted);
  });
}

// How processes come and go.

TEST(Node, GoesOnWithTheSameBitsAfterAProcessHasDiedWhileOthersWaited) {
  Nodes nodes({.nodes = 2, .processes = 2});
  const std::vector<float> wanted = TrainedOnMeans(2, 2);
  OnEachRank(4, [&](uint32_t process) {
    Model model(process);
    auto session = model.Join(nodes.OptionsOf(process));
    ASSERT_TRUE(session.ok()) << session.status();
    bool has_died = process > 1;  // the other node's do not
    while ((*session)->steps() < kSteps) {
      if (!has_died && (*session)->steps() == 7) {
        has_died = true;
        if (process == 0) {
          const absl::Status told = TakeStep(**session, process, model.replica).status();
          EXPECT_EQ(told.code(), absl::StatusCode::kAborted);
          EXPECT_THAT(MessageOf(told), AllOf(ContainsRegex("local rank 1 \\(process [0-9]+\\)"),
                                             HasSubstr("after 7 steps")));
          EXPECT_EQ(TakeStep(**session, process, model.replica).status().code(),
                    absl::StatusCode::kFailedPrecondition);
        }
        // It comes back with values that are none.
        std::fill(model.replica.values.begin(), model.replica.values.end(), -1);
        session->reset();
        session = model.Join(nodes.OptionsOf(process));
        ASSERT_TRUE(session.ok()) << session.status();
        EXPECT_EQ((*session)->steps(), 7);
        ASSERT_TRUE((*session)->returned());
        EXPECT_EQ((*session)->returned()->lost_error_norm, 0);
        continue;
      }
      const auto report = TakeStep(**session, process, model.replica);
      ASSERT_TRUE(report.ok()) << report.status();
    }
    EXPECT_TRUE((*session)->Leave().ok());
    EXPECT_EQ(model.replica.values, wanted);
  });
}

TEST(Node, TellsAProcessThatOthersDiedInTheStepThatItHasYetToCallFor) {
  Nodes nodes({.nodes = 1, .processes = 2});
  std::vector<std::unique_ptr<RawProcess>> processes;
  for (uint32_t i = 0; i < 2; ++i) {
    processes.push_back(std::make_unique<RawProcess>(nodes.SocketOf(0)));
    ASSERT_TRUE(processes[i]->Call(RawAttach(i, 2)).ok());
    processes[i]->Send(RawBegin());
  }
  for (auto& process : processes) ASSERT_TRUE(process->Receive().ok());
  processes[0]->Send(RawStep());
  processes[0]->Die();
  processes[0] = std::make_unique<RawProcess>(nodes.SocketOf(0));
  ASSERT_TRUE(processes[0]->Call(RawAttach(0, 2)).ok());  // once the other's end has been noticed
  const absl::Status told = processes[1]->Call(RawStep()).status();
  EXPECT_EQ(told.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(MessageOf(told), HasSubstr("local rank 0 (process 1000) of job 'raw' is gone without "
                                         "having left, after 0 steps"));
}

// As they do when its children have them too.
TEST(Node, NoticesThatAProcessIsDeadWhoseConnectionsOutliveIt) {
  Nodes nodes({.nodes = 1, .processes = 2});
  char name[] = "sleep", seconds[] = "1000";
  char* const arguments[] = {name, seconds, nullptr};
  pid_t pid = 0;
  ASSERT_EQ(posix_spawnp(&pid, name, nullptr, nullptr, arguments, environ), 0);
  node::Request attach = RawAttach(1, 2);
  attach.mutable_attach()->set_pid(pid);
  attach.mutable_attach()->set_pid_namespace(node::PidNamespace());
  RawProcess waits(nodes.SocketOf(0)), dies(nodes.SocketOf(0));
  ASSERT_TRUE(waits.Call(RawAttach(0, 2)).ok());
  ASSERT_TRUE(dies.Call(attach).ok());
  waits.Send(RawBegin());
  ASSERT_TRUE(dies.Call(RawBegin()).ok());
  ASSERT_TRUE(waits.Receive().ok());
  waits.Send(RawStep());
  kill(pid, SIGKILL);
  const absl::Status told = waits.Receive().status();
  waitpid(pid, nullptr, 0);
  EXPECT_EQ(told.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(MessageOf(told), HasSubstr(absl::StrCat("local rank 1 (process ", pid, ")")));
  EXPECT_EQ(dies.Call(RawStep()).status().code(), absl::StatusCode::kCancelled);
}

TEST(Node, FinishesTheStepThatIsUnderWayWhenAProcessDies) {
  Nodes nodes({.nodes = 2, .processes = 2});
  std::vector<std::unique_ptr<RawProcess>> processes;
  for (uint32_t i = 0; i < 4; ++i) {
    processes.push_back(std::make_unique<RawProcess>(nodes.SocketOf(i / 2)));
    ASSERT_TRUE(processes[i]->Call(RawAttach(i, 4)).ok());
    processes[i]->Send(RawBegin());
  }
  for (auto& process : processes) ASSERT_TRUE(process->Receive().ok());
  processes[0]->Send(RawStep());
  processes[1]->Send(RawStep());
  AwaitFirstNodesPart(nodes, "raw", /*elements=*/8, /*step=*/0);
  processes[1]->Die();
  processes[1] = std::make_unique<RawProcess>(nodes.SocketOf(0));
  ASSERT_TRUE(processes[1]->Call(RawAttach(1, 4)).ok());  // once the other's end has been noticed
  processes[2]->Send(RawStep());
  processes[3]->Send(RawStep());
  for (const int i : {0, 2, 3}) {
    const auto reply = processes[i]->Receive();
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->stepped().steps(), 1);
  }
  // What it learns then.
  EXPECT_EQ(processes[0]->Call(RawStep()).status().code(), absl::StatusCode::kAborted);
  processes[0] = std::make_unique<RawProcess>(nodes.SocketOf(0));
  ASSERT_TRUE(processes[0]->Call(RawAttach(0, 4)).ok());
  processes[0]->Send(RawBegin());
  const auto begun = processes[1]->Call(RawBegin());
  ASSERT_TRUE(begun.ok()) << begun.status();
  EXPECT_EQ(begun->begun().steps(), 1);
  EXPECT_TRUE(begun->begun().returned());
}

TEST(Node, LetsAnotherProcessTakeThePlaceOfOneThatDiedBeforeTheBeginning) {
  Nodes nodes({.nodes = 1, .processes = 2});
  RawProcess first(nodes.SocketOf(0));
  ASSERT_TRUE(first.Call(RawAttach(0, 2)).ok());
  first.Send(RawBegin());
  {
    RawProcess dies(nodes.SocketOf(0));
    ASSERT_TRUE(dies.Call(RawAttach(1, 2)).ok());
  }
  RawProcess second(nodes.SocketOf(0));
  ASSERT_TRUE(second.Call(RawAttach(1, 2)).ok());
  EXPECT_TRUE(second.Call(RawBegin()).ok());
  EXPECT_TRUE(first.Receive().ok());
}

TEST(Node, ForgetsAJobThatNobodyHasBegun) {
  Nodes nodes({.nodes = 1, .processes = 2});
  {
    RawProcess dies(nodes.SocketOf(0));
    ASSERT_TRUE(dies.Call(RawAttach(0, 2)).ok());
  }
  node::Request other = RawAttach(0, 2);
  other.mutable_attach()->mutable_definition()->mutable_tensors(0)->set_shape(0, 9);
  RawProcess process(nodes.SocketOf(0));
  const auto reply = process.Call(other);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->attached().gradients().bytes(), 36u);
}

TEST(Node, RefusesASecondProcessOfARank) {
  Nodes nodes({.nodes = 1, .processes = 2});
  RawProcess process(nodes.SocketOf(0));
  ASSERT_TRUE(process.Call(RawAttach(0, 2)).ok());
  RawProcess second(nodes.SocketOf(0));
  const absl::Status refused = second.Call(RawAttach(0, 2)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(MessageOf(refused), HasSubstr("local rank 0 (process 1000) of job 'raw'"));
}

TEST(Node, LeavesTheJobWhenAllItsProcessesHave) {
  Nodes nodes({.nodes = 1, .processes = 2});
  TrainAttached(nodes);
  // Otherwise its rank would still be taken.
  Model model(0);
  auto session = model.Join(nodes.AggregatorsAs(0, 1));
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ((*session)->steps(), 0);
  EXPECT_TRUE((*session)->Leave().ok());
  // And it has no values any more that the next processes would get.
  TrainAttached(nodes);
}

TEST(Node, TellsTheOthersWhenAProcessHasLeft) {
  Nodes nodes({.nodes = 1, .processes = 2});
  absl::Notification has_left;
  OnEachRank(2, [&](uint32_t process) {
    Model model(process);
    auto session = model.Join(nodes.OptionsOf(process));
    ASSERT_TRUE(session.ok()) << session.status();
    if (process == 1) {
      EXPECT_TRUE((*session)->Leave().ok());
      return has_left.Notify();
    }
    has_left.WaitForNotification();
    EXPECT_TRUE((*session)->SaveState().ok());  // which needs nobody else
    const absl::Status told = TakeStep(**session, process, model.replica).status();
    EXPECT_EQ(told.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(IsTryAgain(told));  // nothing is wrong with this one
    EXPECT_THAT(MessageOf(told), ContainsRegex("local rank 1 \\(process [0-9]+\\) has left"));
    EXPECT_TRUE((*session)->Leave().ok());
  });
}

TEST(Node, AProcessThatIsInterruptedWaitsNoLongerAndTheOthersAreTold) {
  Nodes nodes({.nodes = 1, .processes = 2});
  absl::Notification has_left;
  OnEachRank(2, [&](uint32_t process) {
    Model model(process);
    SessionOptions options = nodes.OptionsOf(process);
    bool is_interrupted = false;
    options.worker.is_interrupted = [&] { return is_interrupted; };
    auto session = model.Join(options);
    ASSERT_TRUE(session.ok()) << session.status();
    if (process == 1) {
      has_left.WaitForNotification();
      // The worker has the other's gradient, and may hear of this one before it hears of the end.
      absl::Status told = TakeStep(**session, process, model.replica).status();
      if (told.ok()) told = TakeStep(**session, process, model.replica).status();
      EXPECT_THAT(MessageOf(told), ContainsRegex("local rank 0 .* is gone without having left"));
      return;
    }
    is_interrupted = true;
    EXPECT_EQ(TakeStep(**session, process, model.replica).status(),
              absl::CancelledError("interrupted"));
    EXPECT_TRUE((*session)->Leave().ok());
    has_left.Notify();
  });
}

TEST(Node, SurvivesProcessesThatDoNotWaitForAnAnswer) {
  Nodes nodes({.nodes = 1, .processes = 1});
  node::Request leave, save;
  leave.mutable_leave();
  save.mutable_save_state();
  for (const node::Request& last : {leave, save, RawStep(), RawAttach(0, 1), leave}) {
    for (int run = 0; run < 10; ++run) {
      RawProcess process(nodes.SocketOf(0));
      ASSERT_TRUE(process.Call(RawAttach(0, 1)).ok());
      const auto begun = process.Call(RawBegin());
      ASSERT_TRUE(begun.ok()) << begun.status();
      process.Send(last);
    }
  }
}

// That would be answered with numbers that nobody has given.
TEST(Node, EndsTheCohortOfAProcessThatTellsOfGradientsOutOfOrder) {
  Nodes nodes({.nodes = 1, .processes = 2});
  const auto ready = [](std::vector<uint32_t> tensors, bool has_rates = true) {
    node::Request request;
    node::GradientsReady& gradients = *request.mutable_gradients_ready();
    if (has_rates) *gradients.mutable_rates() = RawStep().step().rates();
    for (const uint32_t tensor : tensors) gradients.add_tensors(tensor);
    return request;
  };
  struct Case {
    std::vector<node::Request> told;
    bool has_begun;
    const char* why;
  };
  for (const Case& wrong :
       {Case{{ready({1})}, true, "the gradient of tensor 1, of 1"},
        Case{{ready({0, 0})}, true, "the gradient of tensor 0 twice"},
        Case{{ready({0}), ready({0}, false)}, true, "the gradient of tensor 0 twice"},
        Case{{ready({0}, false)}, true, "each with its rates first"},
        Case{{ready({}), ready({0})}, true, "each with its rates first"},
        Case{{ready({0})}, false, "out of order"}}) {
    RawProcess innocent(nodes.SocketOf(0)), guilty(nodes.SocketOf(0));
    ASSERT_TRUE(innocent.Call(RawAttach(0, 2)).ok());
    ASSERT_TRUE(guilty.Call(RawAttach(1, 2)).ok());
    innocent.Send(RawBegin());
    if (wrong.has_begun) {
      ASSERT_TRUE(guilty.Call(RawBegin()).ok());
      ASSERT_TRUE(innocent.Receive().ok());
      innocent.Send(RawStep());
    }
    for (const node::Request& told : wrong.told) guilty.Send(told);
    const absl::Status refused = guilty.Call(RawStep()).status(),
                       over = innocent.Receive().status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(over.code(), absl::StatusCode::kAborted);
    EXPECT_EQ(refused.message(), over.message());
    EXPECT_THAT(MessageOf(over), HasSubstr("local rank 1 (process 1001)"));
    EXPECT_THAT(MessageOf(over), HasSubstr(wrong.why));
  }
}

TEST(Node, GradientsAtOtherRatesDoNotKeepItFromNamingWhoIsSilent) {
  Nodes nodes({.nodes = 1, .processes = 2});
  RawProcess waits(nodes.SocketOf(0)), is_silent(nodes.SocketOf(0));
  for (RawProcess* const process : {&waits, &is_silent}) {
    node::Request attach = RawAttach(process == &is_silent, 2);
    attach.mutable_attach()->mutable_definition()->mutable_options()->set_exchange_timeout_us(
        500'000);
    ASSERT_TRUE(process->Call(attach).ok());
    process->Send(RawBegin());
  }
  ASSERT_TRUE(waits.Receive().ok());
  ASSERT_TRUE(is_silent.Receive().ok());
  node::Request ready;
  *ready.mutable_gradients_ready()->mutable_rates() = RawStep(0.02).step().rates();
  ready.mutable_gradients_ready()->add_tensors(0);
  is_silent.Send(ready);
  const absl::Status told = waits.Call(RawStep(0.01)).status();
  EXPECT_EQ(told.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(MessageOf(told), ContainsRegex("waited [0-9.]+m?s for local rank 1 .process 1001"));
}

TEST(Node, AProcessThatHasLeftCannotEndAnothersCohort) {
  Nodes nodes({.nodes = 1, .processes = 2});
  std::vector<std::unique_ptr<RawProcess>> processes;
  const auto begin = [&] {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      processes.push_back(std::make_unique<RawProcess>(nodes.SocketOf(0)));
      ASSERT_TRUE(processes.back()->Call(RawAttach(rank, 2)).ok());
      processes.back()->Send(RawBegin());
    }
    for (size_t i = processes.size() - 2; i < processes.size(); ++i) {
      ASSERT_TRUE(processes[i]->Receive().ok());
    }
  };
  begin();
  node::Request leave, ready;
  leave.mutable_leave();
  ready.mutable_gradients_ready()->add_tensors(7);
  ASSERT_TRUE(processes[0]->Call(leave).ok());
  begin();
  for (int i = 0; i < 3; ++i) processes[0]->Send(ready);
  EXPECT_FALSE(processes[0]->Call(RawStep()).ok());
  processes[2]->Send(RawStep());
  EXPECT_TRUE(processes[3]->Call(RawStep()).ok());
  EXPECT_TRUE(processes[2]->Receive().ok());
}

TEST(Node, CountsOnlyTheLastCohortsProcessesAsThoseWhoHaveLeft) {
  Nodes nodes({.nodes = 1, .processes = 2});
  const auto attached = [&](uint32_t rank) {
    auto process = std::make_unique<RawProcess>(nodes.SocketOf(0));
    EXPECT_TRUE(process->Call(RawAttach(rank, 2)).ok());
    process->Send(RawBegin());
    return process;
  };
  node::Request leave;
  leave.mutable_leave();
  auto lives_on = attached(0), dies = attached(1);
  ASSERT_TRUE(lives_on->Receive().ok());
  ASSERT_TRUE(dies->Receive().ok());
  dies.reset();
  auto second = attached(1), first = attached(0);
  ASSERT_TRUE(first->Receive().ok());
  ASSERT_TRUE(second->Receive().ok());
  EXPECT_TRUE(lives_on->Call(leave).ok());
  first->Send(RawStep());
  EXPECT_TRUE(second->Call(RawStep()).ok());
  EXPECT_TRUE(first->Receive().ok());
  EXPECT_TRUE(first->Call(leave).ok());
  EXPECT_TRUE(second->Call(leave).ok());
  // Now nobody has it any more.
  first = attached(0), second = attached(1);
  const auto begun = first->Receive();
  ASSERT_TRUE(begun.ok()) << begun.status();
  EXPECT_FALSE(begun->begun().returned());
}

TEST(Node, LeavesTheJobWhenItEnds) {
  Nodes nodes({.nodes = 1, .processes = 1});
  Model model(0);
  auto session = model.Join(nodes.OptionsOf(0));
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_TRUE(TakeStep(**session, 0, model.replica).ok());
  nodes.End(0);
  const absl::Status told = TakeStep(**session, 0, model.replica).status();
  EXPECT_EQ(told.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(MessageOf(told), HasSubstr("the worker of this node"));
  Model next(0);
  auto other = next.Join(nodes.AggregatorsAs(0, 1));
  EXPECT_TRUE(other.ok()) << other.status();
}

TEST(Node, EndsTheJobForItsProcessesWhenAnExchangeFails) {
  Nodes nodes({.nodes = 2, .processes = 1});
  OnEachRank(2, [&](uint32_t process) {
    Model model(process);
    SessionOptions options = nodes.OptionsOf(process);
    options.worker.exchange_timeout = absl::Milliseconds(500);
    auto session = model.Join(options);
    ASSERT_TRUE(session.ok()) << session.status();
    if (process == 1) return;  // without leaving
    const absl::Status failed = TakeStep(**session, process, model.replica).status();
    EXPECT_EQ(failed.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(MessageOf(failed), HasSubstr("waiting for rank 1"));
    EXPECT_TRUE((*session)->Leave().ok());
  });
}

// How the worker goes.

// Its end is noticed whatever the failure timeout, since the kernel says so; that it hangs, when
// that timeout is over.
TEST(NodesWorker, ThatIsKilledOrHangsEndsTheJobForItsProcessesAndIsMissedByTheOtherNode) {
  struct Fault {
    int signal;
    FailureTimeout failure_timeout;
  };
  // With the default of 10 s a worker that hangs would not be noticed by then.
  constexpr absl::Duration kNoticed = absl::Seconds(5);
  constexpr uint64_t kFaultAt = 3;  // steps
  for (const Fault& fault :
       {Fault{SIGKILL, FailureTimeout()}, Fault{SIGSTOP, *FailureTimeout::Of(absl::Seconds(1))}}) {
    SCOPED_TRACE(strsignal(fault.signal));
    Nodes nodes({.nodes = 2, .processes = 2});
    const auto worker = StartWorkerProcess(nodes, /*world_size=*/2);
    absl::Notification is_signalled;
    absl::Time signalled;
    std::thread signaller([&] {
      const JobOptionsForTest job;
      AwaitFirstNodesPart(nodes, job.worker.job, absl::c_accumulate(job.tensors, size_t{0}),
                          kFaultAt);
      signalled = absl::Now();
      is_signalled.Notify();
      worker->Signal(fault.signal);
    });
    absl::Notification told[2];
    OnEachRank(4, [&](uint32_t process) {
      Model model(process);
      SessionOptions options = nodes.OptionsOf(process);
      options.failure_timeout = fault.failure_timeout;
      if (process >= 2) options.worker.exchange_timeout = absl::Seconds(8);
      auto session = model.Join(options);
      ASSERT_TRUE(session.ok()) << session.status();
      const auto step = [&] { return TakeStep(**session, process, model.replica).status(); };
      while ((*session)->steps() < kFaultAt) ASSERT_EQ(step(), absl::OkStatus());
      if (process >= 2) {
        for (const absl::Notification& other : told) other.WaitForNotification();
        // What it had sent counts.
        EXPECT_EQ(step(), absl::OkStatus());
        const absl::Status missed = step();
        EXPECT_EQ(missed.code(), absl::StatusCode::kDeadlineExceeded);
        EXPECT_THAT(MessageOf(missed), HasSubstr("waiting for rank 0"));
        return;
      }
      const absl::Status gone = step();
      is_signalled.WaitForNotification();
      EXPECT_LT(absl::Now() - signalled, kNoticed);
      told[process].Notify();
      EXPECT_EQ(gone.code(), absl::StatusCode::kUnavailable);
      EXPECT_THAT(MessageOf(gone),
                  AllOf(HasSubstr(absl::StrCat("the worker of this node, at ", nodes.SocketOf(0),
                                               ", is gone, and what it had of the job with it")),
                        HasSubstr("Start it again, and resume from the newest checkpoint")));
      EXPECT_EQ(step().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_EQ((*session)->Leave().code(), absl::StatusCode::kUnavailable);
    });
    signaller.join();
  }
}

// What the node's worker waits for, and for how long.

TEST(Node, NamesTheProcessThatDoesNotStep) {
  Nodes nodes({.nodes = 1, .processes = 2});
  absl::Notification has_given_up;
  OnEachRank(2, [&](uint32_t process) {
    Model model(process);
    SessionOptions options = nodes.OptionsOf(process);
    options.worker.exchange_timeout = absl::Milliseconds(200);
    auto session = model.Join(options);
    ASSERT_TRUE(session.ok()) << session.status();
    if (process == 1) return has_given_up.WaitForNotification();
    const absl::Status late = TakeStep(**session, process, model.replica).status();
    has_given_up.Notify();
    EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(MessageOf(late), ContainsRegex("waited .* for local rank 1 \\(process [0-9]+\\)"));
  });
}

TEST(Node, NamesTheProcessThatDoesNotAttach) {
  Nodes nodes({.nodes = 1, .processes = 3});
  std::thread([&] {
    Model model(1);
    SessionOptions options = nodes.OptionsOf(1);
    options.worker.join_timeout = absl::Milliseconds(300);
    const absl::Status late = model.Join(options).status();
    EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(MessageOf(late), AllOf(HasSubstr("local rank 0, which is not attached"),
                                       HasSubstr("local rank 2, which is not attached")));
  }).join();
}

TEST(Node, SaysWhichProcessesMakeDifferentCalls) {
  Nodes nodes({.nodes = 1, .processes = 2});
  OnEachRank(2, [&](uint32_t process) {
    Model model(process);
    auto session = model.Join(nodes.OptionsOf(process));
    ASSERT_TRUE(session.ok()) << session.status();
    const absl::Status told = process == 0
                                  ? TakeStep(**session, process, model.replica).status()
                                  : (*session)->Checkpoint(::testing::TempDir() + "/never");
    EXPECT_EQ(told.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(MessageOf(told), ContainsRegex("local rank 0 .* calls for a step, local rank 1 .* "
                                               "calls for a checkpoint"));
  });
}

TEST(Node, RemembersWhyTheProcessWasRefusedThatIsWaitedFor) {
  Nodes nodes({.nodes = 1, .processes = 2});
  node::Request attach = RawAttach(0, 2);
  attach.mutable_attach()->mutable_definition()->mutable_options()->set_join_timeout_us(100'000);
  RawProcess process(nodes.SocketOf(0));
  ASSERT_TRUE(process.Call(attach).ok());
  attach.mutable_attach()->set_rank(1);
  attach.mutable_attach()->mutable_definition()->mutable_tensors(0)->set_shape(0, 9);
  EXPECT_EQ(RawProcess(nodes.SocketOf(0)).Call(attach).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(
      MessageOf(process.Call(RawBegin()).status()),
      HasSubstr("local rank 1, which is not attached (refused: tensor 0 is 'x' [9] here but "
                "'x' [8] in the job)"));
}

// What other nodes do without one, in a job with a round deadline.

constexpr uint32_t kElasticNodes = 3;

// What a process of three nodes joins with, of which one may be missing.
SessionOptions ElasticOptionsOf(const Nodes& nodes, uint32_t process) {
  SessionOptions options = nodes.OptionsOf(process);
  options.worker.round_deadline = absl::Seconds(2);  // of which busy machines need some
  options.worker.min_workers = kElasticNodes - 1;
  return options;
}

TEST(Node, ThatIsLateCatchesUpWithSeveralStepsAtOnceAndAllOfItsProcessesDo) {
  constexpr uint64_t kLateAt = 4, kMissed = 3;  // steps
  Nodes nodes({.nodes = kElasticNodes, .processes = 2});
  absl::Notification others_are_ahead, has_caught_up;
  std::vector<std::vector<float>> results(nodes.processes());
  OnEachRank(nodes.processes(), [&](uint32_t process) {
    const bool is_late = process < 2;
    Model model(process);
    auto session = model.Join(ElasticOptionsOf(nodes, process));
    ASSERT_TRUE(session.ok()) << session.status();
    bool has_been_late = !is_late;
    while ((*session)->steps() < kSteps) {
      const uint64_t step = (*session)->steps();
      const bool catches_up = !has_been_late && step >= kLateAt;
      if (catches_up) others_are_ahead.WaitForNotification();
      // Not so far that their answers are no longer kept.
      if (!is_late && step >= kLateAt + kMissed) {
        if (process == 2 && !others_are_ahead.HasBeenNotified()) others_are_ahead.Notify();
        has_caught_up.WaitForNotification();
      }
      const auto report = TakeStep(**session, process, model.replica);
      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ((*session)->steps(), step + 1 + report->steps_caught_up);
      EXPECT_EQ(report->step + 1, (*session)->steps());
      if (!is_late && step == kLateAt) {
        EXPECT_THAT(report->late_ranks, Contains(0));
      }
      if (!catches_up) continue;
      has_been_late = true;
      EXPECT_GT(report->late_rounds, 0);
      // One of those that it has missed it has called for.
      EXPECT_EQ((*session)->steps(), kLateAt + kMissed);
      EXPECT_EQ(report->steps_caught_up, kMissed - 1);
      if (process == 0) has_caught_up.Notify();
    }
    EXPECT_TRUE((*session)->Leave().ok());
    results[process] = model.replica.values;
  });
  for (const std::vector<float>& values : results) EXPECT_EQ(values, results[0]);
  EXPECT_NE(results[0], TrainedOnMeans(kElasticNodes, 2));
}

TEST(Node, ThatIsGoneIsDoneWithoutUntilAnotherTakesItsPlace) {
  constexpr uint64_t kGoneAfter = 20, kTogether = 25;  // steps
  Nodes nodes({.nodes = kElasticNodes, .processes = 2});
  const auto worker = StartWorkerProcess(nodes, kElasticNodes);
  std::unique_ptr<node::Server> other;  // in its place
  absl::Notification can_go, is_replaced;
  // However long it takes to come back, the others train until then, and for some steps more.
  absl::Mutex mutex;
  uint64_t newest_step = 0, end = std::numeric_limits<uint64_t>::max();
  const auto is_at_the_end = [&](uint64_t steps) {
    absl::MutexLock lock(&mutex);
    newest_step = std::max(newest_step, steps);
    return steps >= end || ::testing::Test::HasFailure();
  };
  std::vector<std::vector<float>> results(nodes.processes());
  OnEachRank(nodes.processes(), [&](uint32_t process) {
    auto model = std::make_unique<Model>(process);
    auto session = model->Join(ElasticOptionsOf(nodes, process));
    ASSERT_TRUE(session.ok()) << session.status();
    const auto take_steps = [&](const std::function<bool(uint64_t steps)>& is_enough) {
      while (!is_enough((*session)->steps())) {
        // The others' steps take some time, or they would be far ahead when another has joined.
        if (process >= 2) absl::SleepFor(absl::Milliseconds(10));
        const auto report = TakeStep(**session, process, model->replica);
        ASSERT_TRUE(report.ok()) << report.status();
      }
    };
    take_steps([&](uint64_t steps) { return steps == kGoneAfter; });
    if (process == 1) can_go.Notify();
    if (process == 0) {
      can_go.WaitForNotification();
      worker->Signal(SIGKILL);
      other = nodes.Start(0);
      is_replaced.Notify();
    }
    if (process < 2) {
      is_replaced.WaitForNotification();
      EXPECT_EQ(TakeStep(**session, process, model->replica).status().code(),
                absl::StatusCode::kUnavailable);
    }
    for (bool is_back = process >= 2; !is_back;) {
      session->reset();
      model = std::make_unique<Model>(process);
      session = model->Join(ElasticOptionsOf(nodes, process));
      ASSERT_TRUE(session.ok()) << session.status();
      ASSERT_TRUE((*session)->returned());
      EXPECT_EQ((*session)->returned()->step, (*session)->steps());
      EXPECT_GE((*session)->steps(), kGoneAfter);
      const absl::Status first = TakeStep(**session, process, model->replica).status();
      // On a busy machine the others may be far ahead already.
      is_back = !absl::StrContains(first.message(), "no longer kept");
      EXPECT_TRUE(first.ok() || !is_back) << first;
    }
    if (process == 0) {
      const uint64_t together_until = (*session)->steps() + kTogether;
      take_steps([&](uint64_t steps) { return steps == together_until; });
      absl::MutexLock lock(&mutex);
      end = std::max(newest_step, together_until) + 5;
    }
    take_steps(is_at_the_end);
    EXPECT_TRUE((*session)->Leave().ok());
    results[process] = model->replica.values;
  });
  for (const std::vector<float>& values : results) EXPECT_EQ(values, results[0]);
}

TEST(Node, GoesOnWithoutOneThatHasLeftIfTheOthersSuffice) {
  Nodes nodes({.nodes = kElasticNodes, .processes = 1});
  absl::Notification has_left;
  OnEachRank(nodes.processes(), [&](uint32_t process) {
    Model model(process);
    auto session = model.Join(ElasticOptionsOf(nodes, process));
    ASSERT_TRUE(session.ok()) << session.status();
    EXPECT_TRUE(TakeStep(**session, process, model.replica).ok());
    if (process == 0) {
      EXPECT_TRUE((*session)->Leave().ok());
      return has_left.Notify();
    }
    has_left.WaitForNotification();
    if (process == 1) {
      session->reset();
      session = model.Join(ElasticOptionsOf(nodes, process));
      ASSERT_TRUE(session.ok()) << session.status();
      EXPECT_TRUE((*session)->returned());
      EXPECT_EQ((*session)->steps(), 1);
    }
    EXPECT_TRUE(TakeStep(**session, process, model.replica).ok());
  });
}

// What processes must have alike.

// What one of two processes is told when the second changes something; the other one waits for it.
absl::Status WhatDiffers(
    const std::function<void(SessionOptions&, OptimizerOptions&, Model&)>& change,
    const JobOptionsForTest& job = {}) {
  Nodes nodes({.nodes = 1, .processes = 2, .max_parameters = 1 << 22});
  std::vector<absl::Status> told(2);
  OnEachRank(2, [&](uint32_t process) {
    Model model(process, job);
    SessionOptions options = nodes.OptionsOf(process);
    options.worker.join_timeout = absl::Milliseconds(500);
    OptimizerOptions optimizer = Model::Optimizer();
    if (process == 1) change(options, optimizer, model);
    told[process] = model.Join(options, optimizer).status();
    EXPECT_FALSE(told[process].ok());
  });
  return absl::IsDeadlineExceeded(told[1]) ? told[0] : told[1];
}

TEST(Node, RefusesProcessesThatDifferAndSaysInWhat) {
  const absl::Status option = WhatDiffers(
      [](SessionOptions&, OptimizerOptions& optimizer, Model&) { optimizer.freeze_step = 7; });
  EXPECT_EQ(option.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(MessageOf(option), ContainsRegex("freeze_step: (5 -> 7|7 -> 5)"));

  const absl::Status values = WhatDiffers(
      [](SessionOptions&, OptimizerOptions&, Model& model) { model.replica.values[40] += 1; });
  EXPECT_EQ(values.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(MessageOf(values), HasSubstr("'tensor1' [8] has other values on local rank 1"));

  const absl::Status rank = WhatDiffers(
      [](SessionOptions& options, OptimizerOptions&, Model&) { options.worker.rank = 2; });
  EXPECT_EQ(rank.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(MessageOf(rank), HasSubstr("rank 2 of 2 does not belong to this node, 0 of 1, which "
                                         "has the ranks 0 to 1 of 2"));
}

// Values and gradients are looked at a mebi of elements at a time.
TEST(Node, LooksAtLargeTensorsToTheirEnds) {
  JobOptionsForTest job;
  job.tensors = {(1 << 20) + 1, 8, (2 << 20) + 5};
  for (const size_t different : {size_t{1 << 20}, size_t{(3 << 20) + 13}}) {
    const absl::Status told =
        WhatDiffers([different](SessionOptions&, OptimizerOptions&,
                                Model& model) { model.replica.values[different] += 1; },
                    job);
    EXPECT_THAT(MessageOf(told), HasSubstr(different == 1 << 20 ? "'tensor0' [1048577] has other"
                                                                : "'tensor2' [2097157] has other"));
  }
  Nodes nodes({.nodes = 1, .processes = 2, .max_parameters = 1 << 22});
  OnEachRank(2, [&](uint32_t process) {
    Model model(process, job);
    auto session = model.Join(nodes.OptionsOf(process));
    ASSERT_TRUE(session.ok()) << session.status();
    model.replica.gradient.assign(model.replica.values.size(), 0.5f);
    if (process == 1) model.replica.gradient.back() = std::numeric_limits<float>::infinity();
    const auto report = (*session)->Step(model.replica.Gradients(), {kRates});
    ASSERT_TRUE(report.ok()) << report.status();
    ASSERT_EQ(report->skipped.size(), 1u);
    EXPECT_THAT(report->skipped[0].block, HasSubstr(", of local rank 1"));
    EXPECT_TRUE((*session)->Leave().ok());
  });
}

TEST(Node, BeginsWithTheValuesOfRank0IfAsked) {
  Nodes nodes({.nodes = 2, .processes = 2});
  OnEachRank(4, [&](uint32_t process) {
    Model model(process);
    const std::vector<float> wanted = model.replica.values;
    if (process > 0) {
      for (float& value : model.replica.values) value += process;
    }
    SessionOptions options = nodes.OptionsOf(process);
    options.start_from_rank_0 = true;
    auto session = model.Join(options);
    ASSERT_TRUE(session.ok()) << session.status();
    EXPECT_EQ(model.replica.values, wanted);
    EXPECT_TRUE((*session)->Leave().ok());
  });
}

TEST(Node, RefusesAStepAtDifferentRatesAndTakesItWhenTheyAgree) {
  Nodes nodes({.nodes = 1, .processes = 2});
  std::vector<std::unique_ptr<RawProcess>> processes;
  for (uint32_t i = 0; i < 2; ++i) {
    processes.push_back(std::make_unique<RawProcess>(nodes.SocketOf(0)));
    ASSERT_TRUE(processes[i]->Call(RawAttach(i, 2)).ok());
    processes[i]->Send(RawBegin());
  }
  for (auto& process : processes) ASSERT_TRUE(process->Receive().ok());
  processes[0]->Send(RawStep(0.01));
  processes[1]->Send(RawStep(0.02));
  for (auto& process : processes) {
    const absl::Status told = process->Receive().status();
    EXPECT_EQ(told.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(MessageOf(told), AllOf(HasSubstr("local rank 1 (process 1001)"), HasSubstr("0.02"),
                                       HasSubstr("not {learning_rate: 0.01")));
  }
  for (auto& process : processes) process->Send(RawStep(0.01));
  for (auto& process : processes) EXPECT_TRUE(process->Receive().ok());
}

TEST(Node, NamesTheProcessWhoseGradientIsNotFinite) {
  Nodes nodes({.nodes = 2, .processes = 2});
  OnEachRank(4, [&](uint32_t process) {
    Model model(process);
    auto session = model.Join(nodes.OptionsOf(process));
    ASSERT_TRUE(session.ok()) << session.status();
    model.replica.gradient = GradientOf(process, 0, model.replica.values.size());
    if (process == 3) model.replica.gradient[50] = std::numeric_limits<float>::infinity();
    const auto report = (*session)->Step(model.replica.Gradients(), {kRates});
    ASSERT_TRUE(report.ok()) << report.status();
    ASSERT_EQ(report->skipped.size(), 1u);
    EXPECT_THAT(report->skipped[0].block, HasSubstr("tensor 'tensor3' [300]"));
    // The other node knows only which node it was, and names its first process.
    EXPECT_EQ(report->skipped[0].rank, process >= 2 ? 3u : 2u);
    EXPECT_EQ(report->skipped[0].block.find(", of local rank 1") != std::string::npos,
              process >= 2);
    EXPECT_TRUE((*session)->Leave().ok());
  });
}

// What is saved.

TEST_P(NodeOptimizerTest, ResumesFromACheckpointAndFromSavedStates) {
  const OptimizerOptions& optimizer = GetParam().optimizer;
  const std::vector<float> wanted = TrainedOnMeans(2, 2, optimizer);
  const std::string directory =
      absl::StrCat(::testing::TempDir(), "/node-checkpoints-", GetParam().name, getpid());
  std::vector<std::string> states(4);
  {
    Nodes nodes({.nodes = 2, .processes = 2});
    OnEachRank(4, [&](uint32_t process) {
      Model model(process);
      auto session = model.Join(nodes.OptionsOf(process), optimizer);
      ASSERT_TRUE(session.ok()) << session.status();
      while ((*session)->steps() < 7) {
        ASSERT_TRUE(TakeStep(**session, process, model.replica).ok());
      }
      EXPECT_EQ((*session)->is_synchronised(), !optimizer.zero_one);
      const absl::Status saved = (*session)->Checkpoint(directory);
      EXPECT_TRUE(saved.ok()) << saved;
      auto state = (*session)->SaveState();
      ASSERT_TRUE(state.ok()) << state.status();
      states[process] = *std::move(state);
      ASSERT_TRUE(TakeStep(**session, process, model.replica).ok());
      EXPECT_TRUE((*session)->Leave().ok());
    });
  }
  for (const bool from_states : {false, true}) {
    Nodes nodes({.nodes = 2, .processes = 2});
    OnEachRank(4, [&](uint32_t process) {
      Model model(process);
      std::fill(model.replica.values.begin(), model.replica.values.end(), 0);
      SessionOptions options = nodes.OptionsOf(process);
      if (from_states) {
        options.resume_state = states[process];
      } else {
        options.resume = directory;
      }
      auto session = model.Join(options, optimizer);
      ASSERT_TRUE(session.ok()) << session.status();
      EXPECT_EQ((*session)->steps(), 7);
      EXPECT_EQ((*session)->resumed().checkpoint.empty(), from_states);
      while ((*session)->steps() < kSteps) {
        ASSERT_TRUE(TakeStep(**session, process, model.replica).ok());
      }
      EXPECT_EQ(model.replica.values, wanted);
      EXPECT_TRUE((*session)->Leave().ok());
    });
  }
}

TEST(Node, TakesCheckpointsIntoOneDirectoryOnly) {
  Nodes nodes({.nodes = 1, .processes = 2});
  OnEachRank(2, [&](uint32_t process) {
    Model model(process);
    auto session = model.Join(nodes.OptionsOf(process));
    ASSERT_TRUE(session.ok()) << session.status();
    const absl::Status told = (*session)->Checkpoint(absl::StrCat("/tmp/", process));
    EXPECT_EQ(told.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(MessageOf(told), AllOf(HasSubstr("'/tmp/1'"), HasSubstr("'/tmp/0'")));
    EXPECT_TRUE(TakeStep(**session, process, model.replica).ok());
    EXPECT_TRUE((*session)->Leave().ok());
  });
}

// What comes from outside.

TEST(Node, RefusesWhatItCannotTake) {
  Nodes nodes({.nodes = 1, .processes = 1, .max_parameters = 100});
  const auto code_of = [&](const std::function<void(node::Attach&)>& change) {
    node::Request request = RawAttach(0, 1);
    change(*request.mutable_attach());
    return RawProcess(nodes.SocketOf(0)).Call(request).status().code();
  };
  using Code = absl::StatusCode;
  EXPECT_EQ(code_of([](node::Attach&) {}), Code::kOk);
  EXPECT_EQ(code_of([](node::Attach& attach) { attach.clear_job(); }), Code::kInvalidArgument);
  EXPECT_EQ(code_of([](node::Attach& attach) { attach.clear_definition(); }),
            Code::kInvalidArgument);
  EXPECT_EQ(code_of([](node::Attach& attach) { attach.mutable_definition()->clear_groups(); }),
            Code::kInvalidArgument);
  const auto set_size = [](uint64_t size) {
    return [size](node::Attach& attach) {
      attach.mutable_definition()->mutable_tensors(0)->set_shape(0, size);
    };
  };
  EXPECT_EQ(code_of(set_size(0)), Code::kInvalidArgument);
  EXPECT_EQ(code_of(set_size(101)), Code::kResourceExhausted);
  EXPECT_EQ(code_of(set_size(std::numeric_limits<uint64_t>::max())), Code::kInvalidArgument);
}

TEST(Node, RefusesRequestsOutOfOrder) {
  Nodes nodes({.nodes = 1, .processes = 1});
  RawProcess process(nodes.SocketOf(0));
  EXPECT_EQ(process.Call(RawStep()).status().code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(process.Call(RawAttach(0, 1)).ok());
  for (const node::Request& request : {RawAttach(0, 1), RawStep(), node::Request()}) {
    const absl::Status told = process.Call(request).status();
    EXPECT_EQ(told.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(MessageOf(told), HasSubstr("out of order"));
  }
  ASSERT_TRUE(process.Call(RawBegin()).ok());
  EXPECT_EQ(process.Call(RawBegin()).status().code(), absl::StatusCode::kInvalidArgument);
  // Rates of no group.
  node::Request step;
  step.mutable_step();
  EXPECT_EQ(process.Call(step).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(process.Call(RawStep()).ok());
}

TEST(Node, DoesNotReadMemoryThatIsNotOfItsProcesses) {
  Nodes nodes({.nodes = 1, .processes = 1});
  node::Request request = RawAttach(0, 1);
  node::Memory& state = *request.mutable_attach()->mutable_start()->mutable_resume_state();
  state.set_pid(getpid());
  state.set_fd(0);
  state.set_bytes(4096);
  RawProcess process(nodes.SocketOf(0));
  ASSERT_TRUE(process.Call(request).ok());
  const absl::Status told = process.Call(RawBegin()).status();
  EXPECT_EQ(told.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(MessageOf(told), HasSubstr("cannot be seen"));
}

TEST(Node, TakesNoMemoryForAStateThatIsLargerThanAnyOfTheJob) {
  Nodes nodes({.nodes = 1, .processes = 1});
  node::Request request = RawAttach(0, 1);
  node::Memory& state = *request.mutable_attach()->mutable_start()->mutable_resume_state();
  state.set_pid(getpid());
  state.set_bytes(uint64_t{1} << 60);
  RawProcess process(nodes.SocketOf(0));
  ASSERT_TRUE(process.Call(request).ok());
  const absl::Status told = process.Call(RawBegin()).status();
  EXPECT_EQ(told.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(MessageOf(told), HasSubstr("a state to resume from of 1152921504606846976 bytes"));
}

// Where it listens.

absl::Status WhyNotAt(const std::string& listen) {
  node::ServerOptions options;
  options.listen = listen;
  return node::Server::Start(options).status();
}

TEST(NodeServer, RefusesAnAddressThatIsNoSocketOfThisNode) {
  EXPECT_EQ(WhyNotAt("127.0.0.1:4000").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(WhyNotAt("unix:").code(), absl::StatusCode::kInvalidArgument);
  const absl::Status long_path = WhyNotAt("unix:/" + std::string(200, 'x'));
  EXPECT_EQ(long_path.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(MessageOf(long_path), HasSubstr("at most 107 bytes"));
  EXPECT_EQ(WhyNotAt("unix:/nowhere/socket").code(), absl::StatusCode::kUnavailable);
}

TEST(NodeServer, RefusesThePathOfAnotherWorkerByItsProcess) {
  Nodes nodes({.nodes = 1, .processes = 1});
  const absl::Status refused = WhyNotAt(nodes.SocketOf(0));
  EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(MessageOf(refused), HasSubstr(absl::StrCat("process ", getpid(), " does")));
  TrainAttached(nodes);  // which it has not hurt
}

TEST(NodeServer, OneOfTwoThatAreStartedAtOnceIsRefusedAndDoesNotHurtTheOther) {
  Nodes nodes({.nodes = 1, .processes = 1});
  node::ServerOptions options;
  options.listen = nodes.SocketOf(0);
  options.node.processes = 1;
  options.node.session = nodes.AggregatorsAs(0, 1);
  for (int i = 0; i < 10; ++i) {
    nodes.End(0);
    std::vector<absl::StatusOr<std::unique_ptr<node::Server>>> servers(2);
    OnEachRank(2, [&](uint32_t number) { servers[number] = node::Server::Start(options); });
    ASSERT_NE(servers[0].ok(), servers[1].ok());
    const int refused = servers[0].ok() ? 1 : 0;
    EXPECT_EQ(servers[refused].status().code(), absl::StatusCode::kAlreadyExists);
    TrainAttached(nodes);
  }
}

TEST(NodeServer, RefusesThePathOfAnotherThatDoesNotListenYetAndLeavesWhatIsThere) {
  Nodes nodes({.nodes = 1, .processes = 1});
  const std::string path = nodes.SocketOf(0).substr(5);
  nodes.End(0);
  EXPECT_FALSE(std::filesystem::exists(path + ".lock"));
  ASSERT_EQ(mknod(path.c_str(), S_IFSOCK | 0600, 0), 0);
  const int other = open((path + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_EQ(flock(other, LOCK_EX), 0);
  const absl::Status refused = WhyNotAt(nodes.SocketOf(0));
  EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(MessageOf(refused), HasSubstr("another worker of this node is about to, or about to "
                                            "end (another process has locked " +
                                            path + ".lock)"));
  EXPECT_TRUE(std::filesystem::exists(path));
  close(other);  // as when it is killed
  const auto server = nodes.Start(0);
  TrainAttached(nodes);
}

TEST(NodeServer, ReplacesASocketWhoseProcessHasDied) {
  Nodes nodes({.nodes = 1, .processes = 1});
  nodes.End(0);
  const std::string path = nodes.SocketOf(0).substr(5);
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  close(fd);
  const auto server = nodes.Start(0);
  ASSERT_NE(server, nullptr);
  struct stat found = {};
  ASSERT_EQ(stat(path.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0600);
  TrainAttached(nodes);
}

TEST(NodeServer, WhoIsNotThereIsNamedWithTheCommandThatStartsIt) {
  Model model(0);
  SessionOptions options;
  options.worker = JobOptionsForTest().worker;
  options.worker.join_timeout = absl::Milliseconds(100);
  options.node = "unix:/nowhere/socket";
  const absl::Status told = model.Join(options).status();
  EXPECT_EQ(told.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(MessageOf(told), HasSubstr("signpost worker --listen unix:/nowhere/socket"));
}

}  // namespace
}  // namespace signpost::testing
