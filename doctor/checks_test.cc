// What the checks find in facts that are given to them.

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "bench/costs.h"
#include "doctor/aggregators.h"
#include "doctor/comparison.h"
#include "doctor/congestion.h"
#include "doctor/gpu.h"
#include "doctor/hosts.h"
#include "doctor/job.h"
#include "doctor/limits.h"
#include "doctor/name.h"
#include "doctor/prediction.h"
#include "doctor/proxy.h"
#include "doctor/state_disk.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/version.h"

namespace signpost::doctor {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Property;

// Those of warnings and faults, as "check where".
std::vector<std::string> Findings(const DoctorReport& report) {
  std::vector<std::string> findings;
  for (const DoctorLine& line : report.lines()) {
    if (line.verdict() == FINE || line.verdict() == UNCHECKED) continue;
    EXPECT_FALSE(line.mend().empty()) << line.DebugString();
    findings.push_back(line.check() + " " + line.where());
  }
  return findings;
}

using Found = std::vector<std::string>;

TEST(Proxies, AreExceptedByNameDomainAndNetwork) {
  EXPECT_TRUE(IsExcepted("10.0.0.1", "localhost, 10.0.0.1"));
  EXPECT_TRUE(IsExcepted("10.0.7.1", "10.0.0.0/16"));
  EXPECT_FALSE(IsExcepted("10.1.0.1", "10.0.0.0/16"));
  EXPECT_TRUE(IsExcepted("10.1.0.1", "0.0.0.0/0"));
  EXPECT_FALSE(IsExcepted("10.1.0.1", "10.0.0.0/33"));
  EXPECT_TRUE(IsExcepted("a.cluster.local", ".cluster.local"));
  EXPECT_TRUE(IsExcepted("a.cluster.local", "*.local"));
  EXPECT_TRUE(IsExcepted("anything", "*"));
  EXPECT_FALSE(IsExcepted("a-cluster.local", "cluster.local"));
  EXPECT_FALSE(IsExcepted("a", ""));
}

TEST(Names, BehindLoopbackAreOfOtherHostsThanLocalhost) {
  ResolvedName name;
  name.set_host("b");
  name.add_addresses("127.0.1.1");
  EXPECT_TRUE(IsHiddenBehindLoopback(name));
  name.add_addresses("10.0.0.2");
  EXPECT_FALSE(IsHiddenBehindLoopback(name));
  name.clear_addresses();
  EXPECT_FALSE(IsHiddenBehindLoopback(name));
  for (const char* local : {"localhost", "127.0.0.1", "::1"}) {
    EXPECT_FALSE(IsHiddenBehindLoopback(Resolve(local))) << local;
  }
  EXPECT_EQ(HostOf("[::1]:70"), "::1");
  EXPECT_EQ(HostOf("a:70"), "a");
  EXPECT_EQ(PortOf("[::1]:70"), "70");
}

TEST(StateDisk, IsUnderADirectoryThatIsThereOrCanBeMade) {
  const std::string file = testing::TempDir() + "/state-file";
  std::ofstream(file) << "x";
  for (const std::string& none :
       {file, file + "/below", testing::TempDir() + "/" + std::string(300, 'x')}) {
    const StateDisk disk = TryStateDisk(none, ShardId());
    EXPECT_TRUE(absl::IsInvalidArgument(disk.status)) << none << ": " << disk.status;
    DoctorReport report;
    Reporter to("here", report);
    CheckStateDisk(disk, {.state_dir = none}, to);
    EXPECT_EQ(Findings(report), Found{"disk here"});
  }
  const StateDisk made = TryStateDisk(testing::TempDir() + "/not/yet", ShardId());
  EXPECT_TRUE(made.status.ok()) << made.status;
  EXPECT_TRUE(std::filesystem::equivalent(made.path, testing::TempDir()));
}

TEST(StateDisk, HasRoomInTheUnitOfTheMemory) {
  DoctorReport report;
  Reporter to("here", report);
  CheckStateDisk({.path = "/state", .free_bytes = uint64_t{75} << 30, .fsync_s = 0.001}, Job(), to);
  ASSERT_EQ(report.lines_size(), 1);
  EXPECT_THAT(report.lines(0).text(), HasSubstr("75 GiB free"));
}

TEST(Memory, IsForWorkersAndTheAggregatorOfThisHost) {
  Job job = {.workers = 4, .parameters = 100'000'000};
  const uint64_t alone = NeedsOf(job)->worker_bytes;
  EXPECT_GE(alone, 32 * job.parameters);  // a parameter, and deploy/requirements.h's 28
  job.warm_up_codec = BFLOAT16;
  job.shard = ShardId{1, 2};
  job.local_workers = 2;
  const absl::StatusOr<Needs> needs = NeedsOf(job);
  ASSERT_TRUE(needs.ok()) << needs.status();
  EXPECT_LT(needs->worker_bytes, alone);                                 // smaller frames
  EXPECT_GE(needs->aggregator_bytes, (4 + 2 + 2) * job.parameters / 2);  // the error, two answers
  EXPECT_GE(needs->state_bytes, 3 * (4 + 2 + 2) * job.parameters / 2);
  const uint64_t needed = 2 * needs->worker_bytes + needs->aggregator_bytes;
  for (const bool enough : {true, false}) {
    DoctorReport report;
    Reporter to("here", report);
    CheckLimits({1024, 1024, needed - (enough ? 0 : 1), "this machine"}, job, to);
    EXPECT_EQ(Findings(report), enough ? Found() : Found{"memory here"});
  }
}

TEST(Memory, IsNotOfAJobThatCannotBe) {
  DoctorReport report;
  Reporter to("here", report);
  CheckLimits({1 << 21, 1 << 21, 1 << 30, "this machine"}, {.workers = 1 << 20, .parameters = 1000},
              to);
  EXPECT_EQ(Findings(report), Found{"memory here"});
  EXPECT_THAT(report.lines(1).text(), HasSubstr("1048576 workers; a job has 1 to "));
}

TEST(OpenFiles, AreAsManyAsWorkers) {
  const Job job = {.workers = 1000};
  DoctorReport report;
  Reporter to("here", report);
  CheckLimits({1024, 4096, 1 << 30, "this machine"}, job, to);
  EXPECT_EQ(Findings(report), Found{"open files here"});
  EXPECT_THAT(report.lines(0).mend(), HasSubstr("ulimit -n 4096"));
}

TEST(Prediction, SaysWhatItCountsWith) {
  bench::Cluster cluster = {.link_bits_per_s = 100e9, .workers = 4, .shards = 4, .colocated = true};
  std::vector<std::string> exchanges;
  for (const uint32_t cores : {2, 64}) {
    cluster.cores_per_host = cores;
    DoctorReport report;
    Reporter to("here", report);
    AddPrediction(cluster, {.parameters = 100'000'000}, to);
    EXPECT_EQ(report.lines(0).text(),
              absl::StrCat("100000000 parameters; 4 workers and 4 aggregators, these on the "
                           "workers' hosts, with ",
                           cores, " cores, ", std::min(cores, 8u),
                           " threads in each worker; links of 100000 Mbit/s"));
    exchanges.push_back(report.lines(1).text());
  }
  EXPECT_NE(exchanges[0], exchanges[1]);
}

TEST(CongestionControl, IsWhatConnectionsBeginWith) {
  char name[16] = "";  // as tcp(7) has it
  socklen_t size = sizeof name;
  const int connection = socket(AF_INET, SOCK_STREAM, 0);
  ASSERT_EQ(getsockopt(connection, IPPROTO_TCP, TCP_CONGESTION, name, &size), 0);
  close(connection);
  EXPECT_EQ(FindCongestionControl(), std::string(name));
}

TEST(CongestionControl, IsAFindingIfItIsBbr) {
  DoctorReport report;
  Reporter to("here", report);
  CheckCongestionControl("cubic", to);
  CheckCongestionControl("reno", to);
  EXPECT_THAT(Findings(report), IsEmpty());
  ASSERT_EQ(report.lines_size(), 2);
  EXPECT_THAT(report.lines(0).text(), HasSubstr("cubic"));
  CheckCongestionControl("bbr", to);
  EXPECT_EQ(Findings(report), Found{"congestion here"});
  EXPECT_FALSE(HasFault(report));
  EXPECT_THAT(report.lines(2).mend(), HasSubstr("sysctl -w net.ipv4.tcp_congestion_control=cubic"));
}

TEST(CongestionControl, IsNotShownWhereTheKernelDoesNotTell) {
  DoctorReport report;
  Reporter to("here", report);
  CheckCongestionControl("", to);
  EXPECT_EQ(report.lines_size(), 0);
}

TEST(Gpu, IsLookedForWhenItIsAskedFor) {
  GpuFacts facts = {.has_driver = true, .devices = "cuda: NVIDIA H200"};
  facts.torch = TorchFacts{"2.4.0", /*sees_gpu=*/false};
  DoctorReport report;
  Reporter to("here", report);
  CheckGpu(facts, {}, to);
  EXPECT_THAT(Findings(report), IsEmpty());
  CheckGpu(facts, {.gpu = 0}, to);
  EXPECT_EQ(Findings(report), Found{"pytorch here"});
  facts.torch->value().sees_gpu = true;
  facts.kernels = absl::UnavailableError("no such GPU");
  CheckGpu(facts, {.gpu = 7}, to);
  EXPECT_EQ(Findings(report), (Found{"pytorch here", "gpu here"}));
}

TEST(AggregatorStatus, TellsWarningsOfItsStart) {
  StatusResponse status;
  status.set_version(kVersion);
  status.set_shard_count(1);
  DoctorReport report;
  Reporter to("here", report);
  CheckAggregatorStatus(status, "a:1", 0, 1, to);
  EXPECT_THAT(Findings(report), IsEmpty());
  status.add_warnings("a job was given up");
  CheckAggregatorStatus(status, "a:1", 0, 1, to);
  EXPECT_EQ(Findings(report), Found{"aggregator here"});
  status.clear_warnings();
  status.clear_version();
  CheckAggregatorStatus(status, "a:1", 0, 1, to);
  EXPECT_EQ(Findings(report), (Found{"aggregator here", "version here"}));
}

// Hosts "a:1", "b:1" ... that were asked, with paths of 10 Gbit/s between them.
Hosts HealthyHosts(size_t count) {
  Hosts hosts;
  for (size_t i = 0; i < count; ++i) {
    Host host = {.address = std::string(1, static_cast<char>('a' + i)) + ":1"};
    host.facts.emplace().set_version(kVersion);
    for (size_t name = 0; name < count; ++name) {
      ResolvedName& seen = *host.facts->add_names();
      seen.set_host(std::string(1, static_cast<char>('a' + name)));
      seen.add_addresses("10.0.0." + std::to_string(name));
    }
    hosts.hosts.push_back(std::move(host));
  }
  hosts.paths.resize(count, std::vector<std::optional<PathFacts>>(count));
  for (size_t from = 0; from < count; ++from) {
    for (size_t to = 0; to < count; ++to) {
      if (from == to) continue;
      PathFacts& path = hosts.paths[from][to].emplace();
      path.set_interface("eth0");
      path.set_local_address("10.0.0." + std::to_string(from));
      path.set_mtu(1500);
      path.set_bits_per_s(10e9);
    }
  }
  return hosts;
}

// Where an ok line is of a path.
std::vector<std::string> GoodPaths(const DoctorReport& report) {
  std::vector<std::string> paths;
  for (const DoctorLine& line : report.lines()) {
    if (line.verdict() == FINE && line.check() == "path") paths.push_back(line.where());
  }
  return paths;
}

void SetFinding(const std::string& check, PathFacts& path) {
  path.set_bits_per_s(0);
  DoctorLine& line = *path.add_findings();
  line.set_verdict(FAULT);
  line.set_check(check);
  line.set_mend("mend it");
}

TEST(BetweenHosts, NothingIsFoundWhereAllIsWell) {
  for (const size_t count : {1, 2, 3, 8}) {
    EXPECT_THAT(Findings(CheckHosts(HealthyHosts(count))), IsEmpty()) << count;
  }
  EXPECT_EQ(SlowestRate(HealthyHosts(3)), 10e9);
}

TEST(BetweenHosts, VersionsMustBeTheSame) {
  Hosts hosts = HealthyHosts(2);
  hosts.hosts[1].facts->set_version("0.0.9");
  const DoctorReport report = CheckHosts(hosts);
  EXPECT_EQ(Findings(report), Found{"version all hosts"});
  EXPECT_THAT(report.lines(0).text(), HasSubstr("0.0.9 on b:1"));
}

TEST(BetweenHosts, ClocksAreComparedWithTheMedian) {
  Hosts hosts = HealthyHosts(3);
  // Who asked may be the one that is wrong.
  for (Host& host : hosts.hosts) host.clock_ahead_s = -100;
  EXPECT_THAT(Findings(CheckHosts(hosts)), IsEmpty());
  hosts.hosts[0].clock_ahead_s = 0;
  EXPECT_EQ(Findings(CheckHosts(hosts)), Found{"clock a:1"});
  EXPECT_FALSE(HasFault(CheckHosts(hosts)));
  hosts.hosts[0].clock_ahead_s = 1000;
  EXPECT_TRUE(HasFault(CheckHosts(hosts)));
}

TEST(BetweenHosts, NamesMustStandForTheSameEverywhere) {
  Hosts hosts = HealthyHosts(3);
  hosts.hosts[2].facts->mutable_names(1)->set_addresses(0, "10.9.9.9");
  const DoctorReport report = CheckHosts(hosts);
  EXPECT_EQ(Findings(report), Found{"name c:1"});
}

TEST(BetweenHosts, APathThatNothingCameThroughIsNotAGoodOne) {
  Hosts hosts = HealthyHosts(2);
  hosts.paths[0][1]->set_bits_per_s(0);
  const DoctorReport report = CheckHosts(hosts);
  EXPECT_THAT(Findings(report), IsEmpty());
  EXPECT_THAT(GoodPaths(report), ElementsAre("b:1 -> a:1"));
  EXPECT_THAT(report.lines(), Contains(AllOf(Property(&DoctorLine::where, "a:1 -> b:1"),
                                             Property(&DoctorLine::verdict, UNCHECKED))));
}

TEST(BetweenHosts, AHostThatNobodyReachesIsOneFinding) {
  Hosts hosts = HealthyHosts(4);
  for (const size_t from : {0, 1, 2}) SetFinding("reach", *hosts.paths[from][3]);
  EXPECT_EQ(Findings(CheckHosts(hosts)), Found{"reach d:1"});
  // And one that some reach is a finding for each that does not.
  hosts = HealthyHosts(4);
  SetFinding("reach", *hosts.paths[1][3]);
  SetFinding("reach", *hosts.paths[2][3]);
  EXPECT_EQ(Findings(CheckHosts(hosts)), (Found{"reach b:1 -> d:1", "reach c:1 -> d:1"}));
}

TEST(BetweenHosts, PacketsThatAreLostBothWaysAreOneFinding) {
  Hosts hosts = HealthyHosts(2);
  SetFinding("mtu", *hosts.paths[0][1]);
  SetFinding("mtu", *hosts.paths[1][0]);
  EXPECT_EQ(Findings(CheckHosts(hosts)), Found{"mtu b:1 -> a:1"});
}

TEST(BetweenHosts, ASlowLinkIsTheHostsThatHasItsShareInAllSlowPaths) {
  Hosts hosts = HealthyHosts(4);
  for (const size_t other : {0, 1, 3}) {
    hosts.paths[other][2]->set_bits_per_s(1e9);
    hosts.paths[2][other]->set_bits_per_s(1e9);
  }
  EXPECT_EQ(Findings(CheckHosts(hosts)), Found{"bandwidth c:1"});
  EXPECT_EQ(SlowestRate(hosts), 1e9);
  // Between two that are fast otherwise it is the path's.
  hosts = HealthyHosts(4);
  hosts.paths[1][2]->set_bits_per_s(10e6);
  EXPECT_EQ(Findings(CheckHosts(hosts)), Found{"bandwidth b:1 -> c:1"});
}

TEST(BetweenHosts, ALinkThatIsSlowInOneDirectionIsSlow) {
  for (const bool out : {true, false}) {
    Hosts hosts = HealthyHosts(3);
    for (const size_t other : {0, 1}) {
      (out ? hosts.paths[2][other] : hosts.paths[other][2])->set_bits_per_s(50e6);
    }
    const DoctorReport report = CheckHosts(hosts);
    EXPECT_EQ(Findings(report), Found{"bandwidth c:1"});
    EXPECT_THAT(
        report.lines(report.lines_size() - 1).text(),
        HasSubstr(
            out ? "50 Mbit/s come through out of it at most, and 10 Gbit/s out of others; eth0"
                : "50 Mbit/s come through into it at most, and 10 Gbit/s into others; eth0"));
    EXPECT_EQ(SlowestRate(hosts), 50e6);
    // Of two it shows no host, but is as slow.
    hosts = HealthyHosts(2);
    hosts.paths[out ? 1 : 0][out ? 0 : 1]->set_bits_per_s(50e6);
    EXPECT_EQ(Findings(CheckHosts(hosts)),
              Found{out ? "bandwidth b:1 -> a:1" : "bandwidth a:1 -> b:1"});
    EXPECT_EQ(SlowestRate(hosts), 50e6);
  }
}

TEST(BetweenHosts, OnePathDoesNotShowWhoseLinkIsSlow) {
  Hosts hosts = HealthyHosts(3);
  hosts.hosts[2].facts.reset();
  hosts.paths[2].assign(3, std::nullopt);
  hosts.paths[0][1]->set_bits_per_s(50e6);
  // Into b nobody but a sends.
  EXPECT_EQ(Findings(CheckHosts(hosts)), Found{"bandwidth a:1 -> b:1"});
  // Into c b does too, and fast.
  hosts.paths[0][2]->set_bits_per_s(50e6);
  EXPECT_EQ(Findings(CheckHosts(hosts)), Found{"bandwidth a:1"});
  hosts.paths[1][2]->set_bits_per_s(0);
  EXPECT_EQ(Findings(CheckHosts(hosts)), (Found{"bandwidth a:1 -> b:1", "bandwidth a:1 -> c:1"}));
}

// Of which a host is slow only beside the others.
TEST(BetweenHosts, OfThreeHostsOneIsFoundSlowThoughAPathWasNotMeasured) {
  Hosts hosts = HealthyHosts(3);
  for (const size_t other : {0, 1}) {
    hosts.paths[2][other]->set_bits_per_s(1e9);
    hosts.paths[other][2]->set_bits_per_s(1e9);
  }
  hosts.paths[0][1]->set_bits_per_s(0);
  const DoctorReport report = CheckHosts(hosts);
  EXPECT_EQ(Findings(report), Found{"bandwidth c:1"});
  EXPECT_THAT(report.lines(report.lines_size() - 1).text(),
              HasSubstr("1 Gbit/s come through out of it at most, and 10 Gbit/s out of others"));
}

TEST(BetweenHosts, ASlowHostIsFoundThoughItGetsNowhereItself) {
  Hosts hosts = HealthyHosts(3);
  for (const size_t other : {0, 1}) {
    hosts.paths[other][2]->set_bits_per_s(50e6);
    hosts.paths[2][other].emplace();
    SetFinding("reach", *hosts.paths[2][other]);
  }
  const DoctorReport report = CheckHosts(hosts);
  EXPECT_EQ(Findings(report), (Found{"reach c:1 -> a:1", "reach c:1 -> b:1", "bandwidth c:1"}));
  const DoctorLine& line = report.lines(report.lines_size() - 1);
  EXPECT_EQ(line.text(), "50 Mbit/s come through into it at most, and 10 Gbit/s into others");
  EXPECT_THAT(line.mend(), HasSubstr("ethtool INTERFACE "));
}

TEST(BetweenHosts, APathWhoseRateIsAFindingIsNotOk) {
  Hosts hosts = HealthyHosts(2);
  hosts.paths[0][1]->set_bits_per_s(50e6);
  EXPECT_EQ(GoodPaths(CheckHosts(hosts)), Found{"b:1 -> a:1"});
  hosts.paths[1][0]->set_bits_per_s(50e6);  // what is told of a -> b stands for both
  EXPECT_THAT(GoodPaths(CheckHosts(hosts)), IsEmpty());
  // Nor one of a host that is slow beside others only.
  hosts = HealthyHosts(3);
  for (const size_t other : {0, 1}) hosts.paths[2][other]->set_bits_per_s(1e9);
  EXPECT_EQ(GoodPaths(CheckHosts(hosts)),
            (Found{"a:1 -> b:1", "a:1 -> c:1", "b:1 -> a:1", "b:1 -> c:1"}));
}

TEST(BetweenHosts, ProcessorsAreThoseOfTheHostThatHasFewest) {
  Hosts hosts = HealthyHosts(3);
  EXPECT_EQ(FewestProcessors(hosts), 0);  // of a version that does not tell
  hosts.hosts[0].facts->set_processors(8);
  hosts.hosts[1].facts->set_processors(4);
  EXPECT_EQ(FewestProcessors(hosts), 4);
  hosts.hosts[1].facts.reset();
  EXPECT_EQ(FewestProcessors(hosts), 8);
}

TEST(BetweenHosts, EachIsNamedOnce) {
  const absl::Status status = AskHosts({"127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:1"}, {}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("--hosts names 127.0.0.1:1 twice"));
}

TEST(BetweenHosts, ALinkIsHeldAgainstWhatItsInterfaceSays) {
  Hosts hosts = HealthyHosts(2);
  hosts.paths[0][1]->set_link_mbit(1000);
  hosts.paths[0][1]->set_bits_per_s(240e6);
  EXPECT_EQ(Findings(CheckHosts(hosts)), Found{"bandwidth a:1 -> b:1"});
  hosts.paths[0][1]->set_bits_per_s(260e6);
  EXPECT_THAT(Findings(CheckHosts(hosts)), IsEmpty());
}

TEST(BetweenHosts, WhatAHostFoundAboutItselfIsToldOnce) {
  Hosts hosts = HealthyHosts(2);
  Reporter("b:1", *hosts.hosts[1].facts->mutable_report()).Fault("disk", "full", "df");
  EXPECT_EQ(Findings(CheckHosts(hosts)), Found{"disk b:1"});
}

}  // namespace
}  // namespace signpost::doctor
