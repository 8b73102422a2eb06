// Where a node's worker listens, and what it takes from there.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/session.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "node/server.h"
#include "proto/node.pb.h"
#include "tests/cluster.h"
#include "tests/job.h"
#include "tests/node_process.h"
#include "tests/nodes.h"
#include "tests/raw_process.h"
#include "tests/status_is.h"

namespace signpost::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// What comes from processes.

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

TEST(Node, RefusesASecondProcessOfARank) {
  Nodes nodes({.nodes = 1, .processes = 2});
  RawProcess process(nodes.SocketOf(0));
  ASSERT_TRUE(process.Call(RawAttach(0, 2)).ok());
  RawProcess second(nodes.SocketOf(0));
  EXPECT_THAT(second.Call(RawAttach(0, 2)).status(),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       HasSubstr("local rank 0 (process 1000) of job 'raw'")));
}

TEST(Node, RefusesRequestsOutOfOrder) {
  Nodes nodes({.nodes = 1, .processes = 1});
  RawProcess process(nodes.SocketOf(0));
  EXPECT_EQ(process.Call(RawStep()).status().code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(process.Call(RawAttach(0, 1)).ok());
  for (const node::Request& request : {RawAttach(0, 1), RawStep(), node::Request()}) {
    EXPECT_THAT(process.Call(request).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("out of order")));
  }
  ASSERT_TRUE(process.Call(RawBegin()).ok());
  EXPECT_EQ(process.Call(RawBegin()).status().code(), absl::StatusCode::kInvalidArgument);
  // Rates of no group.
  node::Request step;
  step.mutable_step();
  EXPECT_EQ(process.Call(step).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(process.Call(RawStep()).ok());
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
  EXPECT_THAT(waits.Call(RawStep(0.01)).status(),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       ContainsRegex("waited [0-9.]+m?s for local rank 1 .process 1001")));
}

TEST(Node, AProcessThatHasLeftCannotEndAnothersCohort) {
  Nodes nodes({.nodes = 1, .processes = 2});
  const auto first = RawProcessesOf(nodes);
  node::Request leave, ready;
  leave.mutable_leave();
  ready.mutable_gradients_ready()->add_tensors(7);
  ASSERT_TRUE(first[0]->Call(leave).ok());
  const auto second = RawProcessesOf(nodes);
  for (int i = 0; i < 3; ++i) first[0]->Send(ready);
  EXPECT_FALSE(first[0]->Call(RawStep()).ok());
  second[0]->Send(RawStep());
  EXPECT_TRUE(second[1]->Call(RawStep()).ok());
  EXPECT_TRUE(second[0]->Receive().ok());
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
  EXPECT_THAT(process.Call(RawBegin()).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("cannot be seen")));
}

TEST(Node, TakesNoMemoryForAStateThatIsLargerThanAnyOfTheJob) {
  Nodes nodes({.nodes = 1, .processes = 1});
  node::Request request = RawAttach(0, 1);
  node::Memory& state = *request.mutable_attach()->mutable_start()->mutable_resume_state();
  state.set_pid(getpid());
  state.set_bytes(uint64_t{1} << 60);
  RawProcess process(nodes.SocketOf(0));
  ASSERT_TRUE(process.Call(request).ok());
  EXPECT_THAT(process.Call(RawBegin()).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("a state to resume from of 1152921504606846976 bytes")));
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
  EXPECT_THAT(WhyNotAt("unix:/" + std::string(200, 'x')),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("at most 107 bytes")));
  EXPECT_EQ(WhyNotAt("unix:/nowhere/socket").code(), absl::StatusCode::kUnavailable);
}

TEST(NodeServer, RefusesThePathOfAnotherWorkerByItsProcess) {
  Nodes nodes({.nodes = 1, .processes = 1});
  EXPECT_THAT(WhyNotAt(nodes.SocketOf(0)),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       HasSubstr(absl::StrCat("process ", getpid(), " does"))));
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
  EXPECT_THAT(WhyNotAt(nodes.SocketOf(0)),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       HasSubstr("another worker of this node is about to, or about to "
                                 "end (another process has locked " +
                                 path + ".lock)")));
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
  Replica replica({}, 0);
  SessionOptions options;
  options.worker = JobOptionsForTest().worker;
  options.worker.join_timeout = absl::Milliseconds(100);
  options.node = "unix:/nowhere/socket";
  EXPECT_THAT(Session::Join(options, kOptimizer, replica.Parameters()).status(),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("signpost worker --listen unix:/nowhere/socket")));
}

}  // namespace
}  // namespace signpost::testing
