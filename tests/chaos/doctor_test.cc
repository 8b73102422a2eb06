// `signpost doctor` on hosts with a fault that was put there for real: it finds that, says how to
// mend it, and finds nothing else; and nothing at all where nothing is wrong. Hosts are network
// namespaces; tests are skipped where there may be none.

#include <gmock/gmock.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "bench/hosts.h"
#include "doctor/doctor.pb.h"
#include "proto/aggregator.grpc.pb.h"
#include "security/certificate.h"
#include "security/tls_dir.h"
#include "tests/chaos/supervised.h"

namespace signpost::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Matcher;
using ::testing::Not;

constexpr char kProgram[] = "cli/signpost";  // tests run where their data is
constexpr char kPreload[] = "LD_PRELOAD=tests/chaos/libwrong_host.so";
// Sanitizers want to be what is loaded first.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kCanPreload = false;
#else
constexpr bool kCanPreload = true;
#endif
constexpr char kPlain[] = "--insecure-i-understand";
constexpr int kFault = 64, kNoFault = 0;
constexpr char kCongestionControl[] = "/proc/sys/net/ipv4/tcp_congestion_control";

// An empty directory of the test.
std::string NewDirectory(const std::string& name) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/doctor/", name);
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

// A shell command's words; those given are none that a shell would take apart.
std::string Command(const std::vector<std::string>& wrapper, const std::string& arguments) {
  return absl::StrCat(absl::StrJoin(wrapper, " "), " ", kProgram, " doctor ", arguments);
}

bool Shell(const std::string& command) {
  return std::system(absl::StrCat("PATH=$PATH:/usr/sbin:/sbin; ", command).c_str()) == 0;
}

// A machine that is set to BBR is no healthy host, and not the tests' to change: there they have a
// network of their own. Any namespace may choose reno; cubic, a machine may keep from them.
class HealthyNetwork : public ::testing::Environment {
  void SetUp() override {
    std::string name;
    std::ifstream(kCongestionControl) >> name;
    if (name != "bbr") return;
    if (unshare(CLONE_NEWNET) != 0 || !Shell("ip link set lo up") ||
        !(std::ofstream(kCongestionControl) << "reno" << std::flush)) {
      GTEST_SKIP() << "this machine is set to BBR, and there may be no network namespaces";
    }
  }
};
const ::testing::Environment* const kHealthyNetwork =
    ::testing::AddGlobalTestEnvironment(new HealthyNetwork);

struct Examined {
  int exit_code = -1;
  DoctorReport report;

  std::vector<DoctorLine> findings() const {
    std::vector<DoctorLine> found;
    for (const DoctorLine& line : report.lines()) {
      if (line.verdict() == WARNING || line.verdict() == FAULT) found.push_back(line);
    }
    return found;
  }
};

Examined Examine(const std::string& command) {
  Examined examined;
  FILE* const stream =
      popen(absl::StrCat("PATH=$PATH:/usr/sbin:/sbin; ", command, " --json").c_str(), "r");
  std::string json;
  for (int byte; (byte = fgetc(stream)) != EOF;) json.push_back(static_cast<char>(byte));
  examined.exit_code = WEXITSTATUS(pclose(stream));
  EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(json, &examined.report).ok())
      << command << "\n"
      << json;
  return examined;
}

Examined ExamineHere(const std::string& arguments, const std::vector<std::string>& wrapper = {}) {
  return Examine(Command(wrapper, arguments));
}

// One finding, of this check, which says and mends that. What else a busy machine makes of links
// is not what a test of something else is about.
void ExpectOnly(const Examined& examined, int exit_code, const std::string& check,
                const Matcher<std::string>& text, const Matcher<std::string>& mend) {
  std::vector<DoctorLine> findings = examined.findings();
  if (check != "bandwidth") {
    std::erase_if(findings, [](const DoctorLine& line) { return line.check() == "bandwidth"; });
  }
  EXPECT_EQ(examined.exit_code, exit_code);
  ASSERT_EQ(findings.size(), 1) << examined.report.DebugString();
  EXPECT_EQ(findings[0].check(), check);
  EXPECT_THAT(findings[0].text(), text);
  EXPECT_THAT(findings[0].mend(), mend);
}

void ExpectNothing(const Examined& examined) {
  EXPECT_EQ(examined.exit_code, kNoFault);
  EXPECT_GE(examined.report.lines_size(), 5);
  for (const DoctorLine& line : examined.report.lines()) {
    EXPECT_EQ(line.verdict(), FINE) << line.DebugString();
  }
}

// An authority, and a TLS directory of it for each role.
std::string NewCertificates(const std::string& name, const std::string& domain = "signpost") {
  const std::string path = NewDirectory(name);
  EXPECT_TRUE(Shell(
      absl::StrCat(kProgram, " cert init ", path, " --trust-domain ", domain, " >/dev/null")));
  return path;
}

std::unique_ptr<Supervised> Aggregator(uint32_t shard, uint32_t shards,
                                       std::vector<std::string> flags = {kPlain}) {
  SupervisedOptions options = {.shard = shard, .shard_count = shards};
  options.flags = std::move(flags);
  return std::make_unique<Supervised>(options);
}

// --- One host ---

TEST(DoctorHere, FindsNothingOnAHealthyHost) {
  const std::string certificates = NewCertificates("healthy");
  const auto first = Aggregator(0, 2, {"--tls-dir", certificates + "/aggregator"});
  const auto second = Aggregator(1, 2, {"--tls-dir", certificates + "/aggregator"});
  ExpectNothing(ExamineHere(absl::StrCat(
      "--aggregators ", first->target(), ",", second->target(), " --tls-dir ", certificates,
      "/worker --workers 4 --parameters 1000000 --shard 0/2 --state-dir ", NewDirectory("state"),
      "/0")));
  ExpectNothing(ExamineHere(""));
}

TEST(DoctorHere, FindsACertificateThatHasExpired) {
  const auto authority = Authority::Make("test", absl::Hours(1));
  ASSERT_TRUE(authority.ok());
  const auto files = authority->Issue({"signpost", PeerRole::kWorker}, absl::Minutes(-1));
  ASSERT_TRUE(files.ok());
  const std::string directory = NewDirectory("expired");
  ASSERT_TRUE(WriteTlsDir(directory, *files).ok());
  ExpectOnly(ExamineHere("--tls-dir " + directory), kFault, "certificate",
             AllOf(HasSubstr(directory), HasSubstr("the clock here says")),
             AllOf(HasSubstr("signpost cert issue"), HasSubstr("timedatectl")));
}

TEST(DoctorHere, SaysThatTheBandwidthIsNotMeasured) {
  const auto aggregator = Aggregator(0, 1);
  const Examined examined = ExamineHere("--aggregators " + aggregator->target());
  ExpectNothing(examined);
  for (const DoctorLine& line : examined.report.lines()) {
    if (line.check() != "reach") continue;
    EXPECT_THAT(line.text(), HasSubstr("its bandwidth is not measured here, --hosts does that"));
    return;
  }
  ADD_FAILURE() << "nothing is said of the way to the aggregator";
}

TEST(DoctorHere, FindsAProxy) {
  const auto aggregator = Aggregator(0, 1);
  const std::vector<std::string> proxy = {"env", "http_proxy=http://10.1.1.1:3128"};
  ExpectOnly(ExamineHere("--aggregators " + aggregator->target(), proxy), kNoFault, "proxy",
             HasSubstr("http_proxy=http://10.1.1.1:3128 is set"), HasSubstr("export no_proxy="));
  std::vector<std::string> excepted = proxy;
  excepted.push_back("no_proxy=127.0.0.0/8");
  ExpectNothing(ExamineHere("--aggregators " + aggregator->target(), excepted));
}

TEST(DoctorHere, FindsThatTooFewFilesMayBeOpen) {
  ExpectOnly(ExamineHere("", {"ulimit -n 64;"}), kFault, "open files",
             HasSubstr("64 files may be open"), HasSubstr("ulimit -n"));
}

TEST(DoctorHere, FindsThatTcpIsSetToBbr) {
  const auto in_namespace_with = [](const std::string& name) -> std::vector<std::string> {
    return {"unshare", "--net", "sh", "-c",
            absl::StrCat("'echo ", name, " >", kCongestionControl, " && exec \"$@\"' sh")};
  };
  const auto may_choose = [&](const std::string& name) {
    return Shell(absl::StrCat(absl::StrJoin(in_namespace_with(name), " "), " true 2>/dev/null"));
  };
  if (!may_choose("bbr")) GTEST_SKIP() << "no network namespace may have BBR here";
  ExpectOnly(ExamineHere("", in_namespace_with("bbr")), kNoFault, "congestion",
             HasSubstr("TCP's congestion control is bbr"),
             AllOf(HasSubstr("sysctl -w net.ipv4.tcp_congestion_control=cubic"),
                   HasSubstr("of pods: on their node")));
  ExpectNothing(ExamineHere("", in_namespace_with("reno")));
}

// A file system in memory, of this process and its children; null: none may be mounted.
class Mount {
 public:
  static std::unique_ptr<Mount> Create(const std::string& path, const std::string& options,
                                       unsigned long flags) {
    if (mount("signpost-doctor", path.c_str(), "tmpfs", flags, options.c_str()) != 0)
      return nullptr;
    return std::unique_ptr<Mount>(new Mount(path));
  }
  ~Mount() { EXPECT_EQ(umount(path_.c_str()), 0); }

 private:
  explicit Mount(std::string path) : path_(std::move(path)) {}
  const std::string path_;
};

TEST(DoctorHere, FindsAFullDisk) {
  const std::string directory = NewDirectory("full");
  const auto disk = Mount::Create(directory, "size=64k", 0);
  if (disk == nullptr) GTEST_SKIP() << "nothing can be mounted here";
  ExpectOnly(ExamineHere("--state-dir " + directory), kFault, "disk", HasSubstr("is full"),
             HasSubstr("df -h " + directory));
}

TEST(DoctorHere, FindsADiskThatIsTooSmallForTheJob) {
  const std::string directory = NewDirectory("small");
  const auto disk = Mount::Create(directory, "size=32m", 0);
  if (disk == nullptr) GTEST_SKIP() << "nothing can be mounted here";
  ExpectOnly(ExamineHere("--parameters 10000000 --state-dir " + directory), kFault, "disk",
             HasSubstr("are needed for three snapshots"), HasSubstr("df -h " + directory));
}

TEST(DoctorHere, FindsAStateDirectoryThatCannotBeWritten) {
  const std::string directory = NewDirectory("read-only");
  const auto disk = Mount::Create(directory, "size=64k", MS_RDONLY);
  if (disk == nullptr) GTEST_SKIP() << "nothing can be mounted here";
  ExpectOnly(ExamineHere("--state-dir " + directory), kFault, "disk",
             HasSubstr("cannot be written"), HasSubstr("mount -o remount,rw " + directory));
}

TEST(DoctorHere, FindsASlowDisk) {
  if (!kCanPreload) GTEST_SKIP() << "nothing can be preloaded";
  ExpectOnly(
      ExamineHere("--state-dir " + NewDirectory("slow"), {"env", "WRONG_FSYNC_MS=200", kPreload}),
      kNoFault, "disk", HasSubstr("rounds will wait for snapshots"), HasSubstr("iostat"));
}

TEST(DoctorHere, FindsAStateDirectoryOfAnotherShard) {
  const std::string directory = NewDirectory("other-shard");
  {
    SupervisedOptions options = {.shard = 0, .shard_count = 2};
    options.state_dir = directory;
    EXPECT_FALSE(Supervised(options).target().empty());
  }
  ExpectOnly(ExamineHere("--shard 1/2 --state-dir " + directory), kFault, "state",
             HasSubstr("it belongs to shard 0 of 2"), HasSubstr("is --shard 1/2 right here?"));
  ExpectNothing(ExamineHere("--shard 0/2 --state-dir " + directory));
}

// A memory cgroup, version 2 or 1.
class MemoryGroup {
 public:
  MemoryGroup() {
    for (const auto& [root, name] : {std::pair{"/sys/fs/cgroup", "memory.max"},
                                     {"/sys/fs/cgroup/memory", "memory.limit_in_bytes"}}) {
      path_ = absl::StrCat(root, "/signpost-doctor-", getpid());
      if (mkdir(path_.c_str(), 0755) != 0) continue;
      const std::string limit = absl::StrCat(path_, "/", name);  // the kernel makes it
      if (std::filesystem::exists(limit) && std::ofstream(limit) << "1G" << std::flush) return;
      rmdir(path_.c_str());
    }
    path_.clear();
  }
  ~MemoryGroup() {
    if (!path_.empty()) rmdir(path_.c_str());
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(DoctorHere, FindsTooLittleMemory) {
  const MemoryGroup group;
  const bool is_group = !group.path().empty();
  const std::string bound =
      is_group ? absl::StrCat("echo $$ >", group.path(), "/cgroup.procs;") : "ulimit -v 1000000;";
  ExpectOnly(ExamineHere("--parameters 50000000",
                         {"sh", "-c", absl::StrCat("'", bound, " exec \"$@\"' sh")}),
             kFault, "memory", HasSubstr("the kernel would end a process"),
             HasSubstr(is_group ? group.path() : "ulimit -v"));
}

TEST(DoctorHere, FindsThatThereIsNoGpuDriver) {
  if (std::filesystem::exists("/proc/driver/nvidia")) GTEST_SKIP() << "there is one";
  ExpectOnly(ExamineHere("--device cuda"), kFault, "gpu", HasSubstr("no NVIDIA driver is loaded"),
             HasSubstr("apt-get install nvidia-driver"));
}

TEST(DoctorHere, FindsThatThereIsNoPyTorch) {
  ExpectOnly(ExamineHere("--python /bin/false"), kFault, "pytorch",
             HasSubstr("/bin/false has none"), HasSubstr("-m pip install torch"));
}

TEST(DoctorHere, FindsAnAggregatorThatIsNotThere) {
  std::string gone;
  { gone = Aggregator(1, 2)->target(); }
  const auto there = Aggregator(0, 2);
  ExpectOnly(ExamineHere(absl::StrCat("--aggregators ", there->target(), ",", gone)), kFault,
             "reach", HasSubstr(gone + " refuses"),
             HasSubstr("signpost aggregator --shard 1/2 --listen " + gone));
}

TEST(DoctorHere, FindsAWrongOrderOfShards) {
  const auto first = Aggregator(0, 2), second = Aggregator(1, 2);
  const Examined examined =
      ExamineHere(absl::StrCat("--aggregators ", second->target(), ",", first->target()));
  EXPECT_EQ(examined.exit_code, kFault);
  const std::vector<DoctorLine> findings = examined.findings();
  ASSERT_EQ(findings.size(), 2);  // each stands where the other belongs
  for (const DoctorLine& finding : findings) {
    EXPECT_EQ(finding.check(), "shards");
    EXPECT_THAT(finding.mend(), HasSubstr("in the order of their shards"));
  }
  EXPECT_THAT(findings[0].text(), HasSubstr("stands where shard 0/2 belongs, and is shard 1/2"));
  ExpectOnly(ExamineHere("--aggregators " + first->target()), kFault, "shards",
             HasSubstr("is shard 0/2, and 1 aggregator is named"), HasSubstr("name all 2"));
}

class OldAggregator final : public AggregatorService::Service {
 public:
  grpc::Status Status(grpc::ServerContext*, const StatusRequest*,
                      StatusResponse* response) override {
    response->set_shard_count(1);
    response->set_version("0.0.9");
    return grpc::Status::OK;
  }
};

TEST(DoctorHere, FindsAnAggregatorOfAnotherVersion) {
  OldAggregator old;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&old);
  const auto server = builder.BuildAndStart();
  ExpectOnly(ExamineHere(absl::StrCat("--aggregators 127.0.0.1:", port)), kFault, "version",
             HasSubstr("is signpost 0.0.9, and this is"), HasSubstr("start it again"));
}

TEST(DoctorHere, FindsACertificateOfAnotherTrustDomain) {
  const std::string ours = NewCertificates("ours"), theirs = NewCertificates("theirs", "elsewhere");
  const auto aggregator = Aggregator(0, 1, {"--tls-dir", theirs + "/aggregator"});
  ExpectOnly(
      ExamineHere(
          absl::StrCat("--aggregators ", aggregator->target(), " --tls-dir ", ours, "/worker")),
      kFault, "certificate",
      AllOf(HasSubstr("is spiffe://elsewhere/aggregator"), HasSubstr("trust domain signpost")),
      HasSubstr("--trust-domain signpost"));
}

TEST(DoctorHere, FindsACertificateOfAnotherAuthority) {
  const std::string ours = NewCertificates("ours"), theirs = NewCertificates("theirs");
  const auto aggregator = Aggregator(0, 1, {"--tls-dir", theirs + "/aggregator"});
  ExpectOnly(ExamineHere(absl::StrCat("--aggregators ", aggregator->target(), " --tls-dir ", ours,
                                      "/worker")),
             kFault, "certificate", HasSubstr("is not trusted here"),
             HasSubstr("signpost cert issue"));
}

TEST(DoctorHere, FindsThatOneSideSpeaksPlainText) {
  const std::string certificates = NewCertificates("one-side");
  const auto plain = Aggregator(0, 1);
  ExpectOnly(ExamineHere(absl::StrCat("--aggregators ", plain->target(), " --tls-dir ",
                                      certificates, "/worker")),
             kFault, "certificate", HasSubstr("speaks plain text, and this host mTLS"),
             HasSubstr("--tls-dir"));
  const auto tls = Aggregator(0, 1, {"--tls-dir", certificates + "/aggregator"});
  ExpectOnly(ExamineHere("--aggregators " + tls->target()), kFault, "certificate",
             HasSubstr("speaks mTLS, and this host plain text"), HasSubstr("--tls-dir"));
}

// What has a command run on one processor.
std::vector<std::string> OnOneProcessor() {
  cpu_set_t processors;
  EXPECT_EQ(sched_getaffinity(0, sizeof processors, &processors), 0);
  int first = 0;
  while (!CPU_ISSET(first, &processors)) ++first;
  return {"taskset", "-c", absl::StrCat(first)};
}

std::string PredictionsOf(const Examined& examined) {
  std::string predictions;
  for (const DoctorLine& line : examined.report.lines()) {
    if (line.check() == "prediction") absl::StrAppend(&predictions, line.text(), "\n");
  }
  return predictions;
}

TEST(DoctorHere, PredictsWhatALinkMakesOfTheJob) {
  const Examined examined =
      ExamineHere("--predict --link 100mbit --parameters 25000000 --workers 4 --compute-ms 200");
  ExpectNothing(examined);
  EXPECT_THAT(PredictionsOf(examined),
              AllOf(HasSubstr("25000000 parameters; 4 workers and 4 aggregators"),
                    HasSubstr("fp32: an exchange takes 12"), HasSubstr("bf16: "),
                    HasSubstr("one-bit: "), HasSubstr("one-bit saves"), Not(HasSubstr("int8"))));
  const Examined cheap = ExamineHere(
      "--predict --link 100mbit --parameters 25000000 --workers 4 --compute-ms 200 --codec int8");
  EXPECT_THAT(PredictionsOf(cheap), HasSubstr("int8: an exchange takes "));
}

TEST(DoctorHere, PredictsWithTheProcessorsThatItMayRunOn) {
  EXPECT_THAT(PredictionsOf(
                  ExamineHere("--predict --link 100mbit --parameters 25000000", OnOneProcessor())),
              HasSubstr("with 1 core, 1 thread in each worker"));
}

// --- Between hosts ---

// `signpost doctor --listen` on a host.
class Listening {
 public:
  Listening(const std::vector<std::string>& on, const std::string& arguments,
            const std::string& variables) {
    stream_ = popen(
        absl::StrCat("PATH=$PATH:/usr/sbin:/sbin; echo $$; exec ", absl::StrJoin(on, " "), " env ",
                     variables, " ", kProgram, " doctor --for 2m ", arguments, " 2>/dev/null")
            .c_str(),
        "r");
    EXPECT_TRUE(absl::SimpleAtoi(ReadLine(), &pid_));
    const std::string line = ReadLine();
    EXPECT_THAT(line, HasSubstr("listening on "));
    address_ = std::string(absl::StripAsciiWhitespace(line.substr(line.rfind(' ') + 1)));
  }
  ~Listening() {
    kill(pid_, SIGTERM);
    EXPECT_EQ(pclose(stream_), 0);
  }
  const std::string& address() const { return address_; }

 private:
  std::string ReadLine() {
    char line[256] = "";
    return fgets(line, sizeof line, stream_) == nullptr ? "" : line;
  }

  FILE* stream_;
  pid_t pid_ = 0;
  std::string address_;
};

TEST(DoctorBetween, FindsNothingOnLoopback) {
  const Listening a({}, "--listen 127.0.0.1:0", ""), b({}, "--listen 127.0.0.1:0", "");
  ExpectNothing(ExamineHere(absl::StrCat("--hosts ", a.address(), ",", b.address(),
                                         " --predict --parameters 25000000 --compute-ms 100")));
}

TEST(DoctorBetween, PredictsWithTheProcessorsOfTheHostThatHasFewest) {
  const Listening a({}, "--listen 127.0.0.1:0", "");
  const Listening b(OnOneProcessor(), "--listen 127.0.0.1:0", "");
  EXPECT_THAT(PredictionsOf(ExamineHere(absl::StrCat("--hosts ", a.address(), ",", b.address(),
                                                     " --predict --parameters 25000000"))),
              HasSubstr("with 1 core, 1 thread in each worker"));
}

TEST(DoctorBetween, FindsAHostThatNobodyListensOn) {
  std::string gone;
  {
    const Listening listening({}, "--listen 127.0.0.1:0", "");
    gone = listening.address();
  }
  const Listening a({}, "--listen 127.0.0.1:0", "");
  ExpectOnly(ExamineHere(absl::StrCat("--hosts ", a.address(), ",", gone)), kFault, "reach",
             HasSubstr(gone + " refuses"), HasSubstr("signpost doctor --listen " + gone));
}

TEST(DoctorBetween, FindsNothingFromAHostThatListensItself) {
  const Listening other({}, "--listen 127.0.0.1:0", "");
  std::string own;
  {
    const Listening listening({}, "--listen 127.0.0.1:0", "");
    own = listening.address();
  }
  ExpectNothing(
      ExamineHere(absl::StrCat("--listen ", own, " --hosts ", own, ",", other.address())));
}

TEST(DoctorBetween, IsNotForObservers) {
  const std::string certificates = NewCertificates("observed");
  const Listening host({}, absl::StrCat("--listen 127.0.0.1:0 --tls-dir ", certificates, "/worker"),
                       "");
  const std::string question =
      absl::StrCat("--hosts ", host.address(), " --tls-dir ", certificates);
  ExpectOnly(ExamineHere(question + "/observer"), kFault, "certificate",
             HasSubstr("may not call /signpost.DoctorService/Describe"),
             HasSubstr("signpost cert show"));
  for (const char* role : {"/admin", "/aggregator", "/worker"}) {
    ExpectNothing(ExamineHere(question + role));
  }
}

// Hosts a, b and c, behind a switch.
class DoctorOnHosts : public ::testing::Test {
 protected:
  void Begin(uint32_t count) {
    auto hosts = bench::Hosts::Create(count, "2gbit");
    if (!hosts.ok()) GTEST_SKIP() << hosts.status();
    hosts_ = *std::move(hosts);
    for (uint32_t host = 0; host < count && !hosts_->has_cubic(); ++host) {
      ASSERT_TRUE(
          RunOn(absl::StrCat(host), absl::StrCat("sh -c 'echo reno >", kCongestionControl, "'")));
    }
  }

  void TearDown() override {
    listening_.clear();
    if (hosts_ == nullptr) return;
    for (uint32_t host = 0; host < 3; ++host) std::filesystem::remove_all(NamesOf(host));
  }

  std::string Namespace(const std::string& host) const {
    return absl::StrCat(hosts_->name_prefix(), "-", host);
  }
  std::string At(uint32_t host, const std::string& port = "7000") const {
    return absl::StrCat(hosts_->address(host), ":", port);
  }
  bool RunOn(const std::string& host, const std::string& command) const {
    return Shell(absl::StrCat("ip netns exec ", Namespace(host), " ", command));
  }

  // What /etc is there, beside this machine's.
  std::string NamesOf(uint32_t host) const {
    return absl::StrCat("/etc/netns/", Namespace(absl::StrCat(host)));
  }
  void WriteNames(uint32_t host, const std::string& lines) const {
    std::filesystem::create_directories(NamesOf(host));
    std::ofstream(NamesOf(host) + "/hosts") << lines;
  }

  void Listen(uint32_t host, const std::string& arguments = kPlain,
              const std::string& variables = "") {
    listening_.push_back(std::make_unique<Listening>(
        hosts_->On(host, {}), absl::StrCat("--listen ", At(host), " ", arguments), variables));
  }

  // From host 0.
  Examined Ask(const std::vector<std::string>& hosts, const std::string& arguments = kPlain) const {
    return Examine(Command(hosts_->On(0, {}),
                           absl::StrCat("--hosts ", absl::StrJoin(hosts, ","), " ", arguments)));
  }

  std::unique_ptr<bench::Hosts> hosts_;
  std::vector<std::unique_ptr<Listening>> listening_;
};

#define BEGIN(count) \
  Begin(count);      \
  if (hosts_ == nullptr) return

TEST_F(DoctorOnHosts, FindsNothingBetweenHealthyOnes) {
  BEGIN(3);
  const std::string certificates = NewCertificates("hosts");
  const std::string flags = absl::StrCat("--tls-dir ", certificates, "/worker");
  for (uint32_t host = 0; host < 3; ++host) Listen(host, flags);
  const Examined examined = Ask({At(0), At(1), At(2)}, flags);
  ExpectNothing(examined);
  int paths = 0;
  for (const DoctorLine& line : examined.report.lines()) {
    if (line.check() != "path") continue;
    ++paths;
    EXPECT_THAT(line.text(),
                AllOf(HasSubstr("by eth0"), HasSubstr("MTU 1500"), HasSubstr("bit/s")));
  }
  EXPECT_EQ(paths, 6);
}

TEST_F(DoctorOnHosts, FindsPacketsThatDoNotFit) {
  BEGIN(2);
  // The switch's port of b carries less than both ends believe; whole packets, as a switch sees
  // them.
  ASSERT_TRUE(RunOn("0", "ip link set dev eth0 gso_max_segs 1") &&
              RunOn("1", "ip link set dev eth0 gso_max_segs 1") &&
              RunOn("switch", "ip link set dev port1 mtu 1400"));
  Listen(0);
  Listen(1);
  ExpectOnly(Ask({At(0), At(1)}), kFault, "mtu",
             AllOf(HasSubstr("packets of 1500 bytes"), HasSubstr("those of 1400 come through")),
             HasSubstr("ip link set dev eth0 mtu 1400"));
}

TEST_F(DoctorOnHosts, FindsMtusThatDiffer) {
  BEGIN(2);
  ASSERT_TRUE(RunOn("1", "ip link set dev eth0 mtu 1400"));
  Listen(0);
  Listen(1);
  ExpectOnly(Ask({At(0), At(1)}), kNoFault, "mtu",
             AllOf(HasSubstr("1400 at 10.77.0.2"), HasSubstr("1500 at 10.77.0.1")),
             HasSubstr("ip link set dev"));
}

TEST_F(DoctorOnHosts, FindsAPortThatIsFilteredInOneDirection) {
  BEGIN(2);
  ASSERT_TRUE(RunOn("0", "nft add table inet f") &&
              RunOn("0", "nft add chain inet f in \"{ type filter hook input priority 0; }\"") &&
              RunOn("0", "nft add rule inet f in iifname eth0 tcp dport 7000 drop"));
  Listen(0);
  Listen(1);
  const Examined examined = Ask({At(0), At(1)});
  ExpectOnly(examined, kFault, "reach", HasSubstr("nothing comes back from 10.77.0.1:7000"),
             HasSubstr("nft insert rule inet filter input tcp dport 7000 accept"));
  EXPECT_EQ(examined.findings().at(0).where(), "10.77.0.2:7000 -> 10.77.0.1:7000");
}

TEST_F(DoctorOnHosts, FindsALinkOfTenMegabitsAndWhoseItIs) {
  BEGIN(3);
  ASSERT_TRUE(
      RunOn("1", "tc qdisc replace dev eth0 root tbf rate 10mbit burst 64kb latency 50ms") &&
      RunOn("switch", "tc qdisc replace dev port1 root tbf rate 10mbit burst 64kb latency 50ms"));
  for (uint32_t host = 0; host < 3; ++host) Listen(host);
  const Examined examined = Ask({At(0), At(1), At(2)});
  ExpectOnly(examined, kNoFault, "bandwidth", HasSubstr("Mbit/s come through"),
             AllOf(HasSubstr("ethtool eth0"), HasSubstr("tc qdisc show dev eth0")));
  EXPECT_EQ(examined.findings().at(0).where(), At(1));
}

TEST_F(DoctorOnHosts, FindsALinkOfTenMegabitsBetweenTwo) {
  BEGIN(2);
  ASSERT_TRUE(RunOn("1", "tc qdisc replace dev eth0 root tbf rate 10mbit burst 64kb latency 50ms"));
  Listen(0);
  Listen(1);
  const Examined examined =
      Ask({At(0), At(1)}, absl::StrCat(kPlain, " --predict --parameters 25000000"));
  ExpectOnly(examined, kNoFault, "bandwidth", HasSubstr("Mbit/s come through"),
             HasSubstr("ethtool eth0"));
  // The other direction's 2 Gbit/s are not what an exchange can count with.
  EXPECT_THAT(PredictionsOf(examined), ContainsRegex("links of 1?[0-9]([.][0-9]+)? Mbit/s"));
}

TEST_F(DoctorOnHosts, FindsAClockThatIsOff) {
  if (!kCanPreload) GTEST_SKIP() << "nothing can be preloaded";
  BEGIN(3);
  Listen(0);
  Listen(1, kPlain, absl::StrCat("WRONG_CLOCK_S=3600 ", kPreload));
  Listen(2);
  const Examined examined = Ask({At(0), At(1), At(2)});
  ExpectOnly(examined, kFault, "clock",
             AllOf(HasSubstr("the clock is 3"), HasSubstr(" s ahead of the others'")),
             HasSubstr("timedatectl set-ntp true"));
  EXPECT_EQ(examined.findings().at(0).where(), At(1));
}

TEST_F(DoctorOnHosts, FindsANameThatDebianGaveToLoopback) {
  BEGIN(2);
  WriteNames(0, "127.0.0.1 localhost\n10.77.0.1 a\n10.77.0.2 b\n");
  WriteNames(1, "127.0.0.1 localhost\n127.0.1.1 b\n10.77.0.1 a\n");
  Listen(0);
  Listen(1);
  // Where an aggregator would listen by that name:
  ExpectOnly(Examine(Command(hosts_->On(1, {}), absl::StrCat("--aggregators b:4000 ", kPlain))),
             kFault, "name", HasSubstr("'b' is 127.0.1.1 here"), HasSubstr("/etc/hosts"));
  // And among all:
  const Examined examined = Ask({"a:7000", "b:7000"});
  ExpectOnly(examined, kFault, "name",
             AllOf(HasSubstr("'b' is 127.0.1.1 here"), HasSubstr("10.77.0.2 for others")),
             HasSubstr("echo '10.77.0.2 b' >> /etc/hosts"));
}

TEST_F(DoctorOnHosts, FindsANameThatOneOfThemDoesNotKnow) {
  BEGIN(3);
  for (uint32_t host = 0; host < 3; ++host) {
    WriteNames(host, absl::StrCat("10.77.0.1 a\n10.77.0.2 b\n", host == 1 ? "" : "10.77.0.3 c\n"));
    std::ofstream(NamesOf(host) + "/nsswitch.conf") << "hosts: files\n";
    Listen(host);
  }
  const Examined examined = Ask({"a:7000", "b:7000", "c:7000"});
  ExpectOnly(examined, kFault, "name", HasSubstr("'c' is not known here"),
             HasSubstr("echo '10.77.0.3 c' >> /etc/hosts"));
}

TEST_F(DoctorOnHosts, FindsAHostOfAnotherTrustDomain) {
  BEGIN(2);
  const std::string ours = NewCertificates("ours"), theirs = NewCertificates("theirs", "elsewhere");
  Listen(0, absl::StrCat("--tls-dir ", ours, "/worker"));
  Listen(1, absl::StrCat("--tls-dir ", theirs, "/worker"));
  ExpectOnly(Ask({At(0), At(1)}, absl::StrCat("--tls-dir ", ours, "/worker")), kFault,
             "certificate",
             AllOf(HasSubstr("is spiffe://elsewhere/worker"), HasSubstr("trust domain signpost")),
             HasSubstr("--trust-domain signpost"));
}

TEST_F(DoctorOnHosts, ListensInPlainTextOnlyWhereItIsAskedTo) {
  BEGIN(1);
  FILE* const stream = popen(
      absl::StrCat(Command(hosts_->On(0, {}), absl::StrCat("--listen ", At(0))), " 2>&1").c_str(),
      "r");
  char line[512] = "";
  ASSERT_NE(fgets(line, sizeof line, stream), nullptr);
  EXPECT_EQ(WEXITSTATUS(pclose(stream)), 64);
  EXPECT_THAT(std::string(line), HasSubstr("refusing plain text"));
}

}  // namespace
}  // namespace signpost::testing
