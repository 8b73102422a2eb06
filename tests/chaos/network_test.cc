// A network that loses packets, in one direction or both, or becomes slow: in a network namespace
// of this process's own, with the kernel's packet filter (nft) and traffic control (tc). Skipped
// where there may be no namespace.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/failure_timeout.h"
#include "tests/chaos/supervised.h"
#include "tests/job.h"
#include "worker/grpc_channel.h"

namespace signpost::testing {
namespace {

constexpr uint32_t kShards = 2;
// Of the fast setting of the failure timeout, which is used here, on a busy machine too. With the
// default at least 5 s would pass.
constexpr absl::Duration kNoticed = absl::Milliseconds(4500);

::testing::AssertionResult Shell(const std::string& command) {
  const int status = std::system(absl::StrCat("PATH=$PATH:/usr/sbin:/sbin; ", command).c_str());
  if (status == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "'" << command << "' ended with " << status;
}

// Why there is no namespace; empty: there is one, with a loopback of its own, for this thread and
// all that it starts from now on.
std::string EnterNamespace() {
  if (unshare(CLONE_NEWNET) != 0) return absl::StrCat("unshare: ", std::strerror(errno));
  if (!Shell("ip link set lo up && nft add table inet faults")) {
    return "ip or nft does not work here";
  }
  return "";
}

class NetworkTest : public ::testing::Test {
 protected:
  // Before gRPC has threads, which would stay outside.
  static void SetUpTestSuite() { no_namespace_ = EnterNamespace(); }

  void SetUp() override {
    if (!no_namespace_.empty()) GTEST_SKIP() << no_namespace_;
    const std::string root = absl::StrCat(::testing::TempDir(), "/network");
    std::filesystem::remove_all(root);
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      SupervisedOptions options = {.shard = shard, .shard_count = kShards};
      options.state_dir = absl::StrCat(root, "/", shard);
      shards_.push_back(std::make_unique<Supervised>(options));
    }
    ASSERT_TRUE(Shell("nft add chain inet faults in '{ type filter hook input priority 0; }'"));
  }

  void TearDown() override {
    if (no_namespace_.empty()) {
      EXPECT_TRUE(Shell("nft delete chain inet faults in"));
    }
  }

  static void Drop(const std::vector<std::string>& packets) {
    for (const std::string& match : packets) {
      ASSERT_TRUE(Shell(absl::StrCat("nft add rule inet faults in ", match, " counter drop")));
    }
  }
  static void DropNothing() { ASSERT_TRUE(Shell("nft flush chain inet faults in")); }

  std::string PortOfShard(uint32_t shard) const {
    const std::string target = shards_[shard]->target();
    return target.substr(target.rfind(':') + 1);
  }

  static JobOptionsForTest Job() {
    JobOptionsForTest job;
    job.steps = 20;
    return job;
  }

  // Trains, with something done after a step of rank 0; no process may end, no bit be different.
  void ExpectNothingChanges(const std::function<void(int step)>& after_step) {
    const auto results = Train([&] { return ConnectTo(shards_); }, Job(),
                               [&](uint32_t rank, int step, const Replica&, Worker&) {
                                 if (rank == 0) after_step(step);
                               });
    for (const auto& shard : shards_) EXPECT_TRUE(shard->ends().empty());
    Cluster cluster({.aggregators = kShards});
    EXPECT_EQ(results, Train(cluster, Job()));
  }

  // Shard 1 is cut off after steps of the warm-up and of one-bit rounds, until it is noticed.
  void ExpectCutIsNoticed(const std::vector<std::string>& packets) {
    const auto channel =
        ConnectToAggregator(shards_[1]->target(), *FailureTimeout::Of(absl::Seconds(1)));
    ExpectNothingChanges([&](int step) {
      if (step != 2 && step != 12) return;
      ASSERT_TRUE(channel->Status({}, absl::Now() + absl::Seconds(10)).ok());
      Drop(packets);
      const absl::Time start = absl::Now();
      EXPECT_EQ(channel->Status({}, start + absl::Seconds(10)).status().code(),
                absl::StatusCode::kUnavailable);
      const absl::Duration took = absl::Now() - start;
      EXPECT_LT(took, kNoticed);
      RecordProperty(absl::StrCat("noticed_ms_at_step_", step),
                     static_cast<int>(absl::ToInt64Milliseconds(took)));
      DropNothing();
    });
  }

  static std::string no_namespace_;
  std::vector<std::unique_ptr<Supervised>> shards_;
};

std::string NetworkTest::no_namespace_;

TEST_F(NetworkTest, AggregatorThatNothingGetsToIsNoticed) {
  ExpectCutIsNoticed({absl::StrCat("tcp dport ", PortOfShard(1))});
}

TEST_F(NetworkTest, AggregatorThatNothingComesFromIsNoticed) {
  ExpectCutIsNoticed({absl::StrCat("tcp sport ", PortOfShard(1))});
}

TEST_F(NetworkTest, AggregatorThatIsCutOffBothWaysIsNoticed) {
  ExpectCutIsNoticed(
      {absl::StrCat("tcp dport ", PortOfShard(1)), absl::StrCat("tcp sport ", PortOfShard(1))});
}

TEST_F(NetworkTest, OnePacketInAHundredLostChangesNothing) {
  Drop({"numgen random mod 100 '<' 1"});
  ExpectNothingChanges([](int step) {});
  EXPECT_TRUE(Shell("nft list chain inet faults in | grep -E 'packets [1-9]'")) << "none was lost";
}

TEST_F(NetworkTest, RatesThatChangeChangeNothing) {
  const auto set_rate = [](const std::string& rate) {
    ASSERT_TRUE(Shell(
        absl::StrCat("tc qdisc replace dev lo root tbf burst 256kb latency 50ms rate ", rate)));
  };
  set_rate("10mbit");
  ExpectNothingChanges([&](int step) {
    if (step == 4) set_rate("1mbit");
    if (step == 9) set_rate("1gbit");
    if (step == 14) set_rate("3mbit");
  });
  ASSERT_TRUE(Shell("tc qdisc del dev lo root"));
}

}  // namespace
}  // namespace signpost::testing
