#include "bench/hosts.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <csignal>
#include <filesystem>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "bench/leftovers.h"

namespace signpost::bench {
namespace {

constexpr uint32_t kMostHosts = 250;
// Below, what tbf lets through at once is all there is.
constexpr double kLeastBitsPerSecond = 64e3;

// A shell command, in whose PATH is what only root's has as a rule. What interrupts this process,
// at the terminal often all that belong to it, does not leave it half done, and comes when it is
// done.
absl::Status Run(const std::string& command) {
  const std::string script = absl::StrCat("PATH=$PATH:/usr/sbin:/sbin; ", command);
  constexpr int kInterrupts[] = {SIGINT, SIGQUIT, SIGTERM, SIGHUP};
  sigset_t interrupts, before;
  sigemptyset(&interrupts);
  for (const int signal : kInterrupts) sigaddset(&interrupts, signal);
  pthread_sigmask(SIG_BLOCK, &interrupts, &before);
  const pid_t pid = fork();
  if (pid == 0) {
    for (const int signal : kInterrupts) std::signal(signal, SIG_IGN);
    execl("/bin/sh", "sh", "-c", script.c_str(), nullptr);
    _exit(127);
  }
  int status = pid < 0 ? -1 : 0;
  while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (status == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("links of a rate are network namespaces, which need root, iproute2 and a kernel "
                   "with tbf; this failed: ",
                   command));
}

void TakeDownLeftovers() {
  for (const std::string& path : LeftIn("/var/run/netns")) {
    const std::string name = std::filesystem::path(path).filename();
    Run(absl::StrCat("ip netns delete '", name, "' 2>/dev/null")).IgnoreError();
  }
}

}  // namespace

absl::StatusOr<double> ParseRate(absl::string_view rate) {
  const std::string lower = absl::AsciiStrToLower(rate);  // as tc, which ignores case
  absl::string_view number = lower;
  double unit = 0;
  if (absl::ConsumeSuffix(&number, "bit")) unit = 1;
  if (unit == 0 && absl::ConsumeSuffix(&number, "bps")) unit = 8;  // bytes
  const bool is_binary = absl::ConsumeSuffix(&number, "i");
  constexpr absl::string_view kPrefixes = "kmgt";
  const size_t prefix = number.empty() ? kPrefixes.npos : kPrefixes.find(number.back());
  if (prefix != kPrefixes.npos) {
    unit *= std::pow(is_binary ? 1024 : 1000, prefix + 1);
    number.remove_suffix(1);
  } else if (is_binary) {
    unit = 0;
  }
  double value = 0;
  if (absl::SimpleAtod(number, &value) && value * unit >= 1 && value * unit <= 1e12) {
    return value * unit;
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("'%s' is no rate of a link; 1gbit, 100mbit or 64kbit are", rate));
}

absl::StatusOr<std::unique_ptr<Hosts>> Hosts::Create(uint32_t count, const std::string& rate) {
  auto hosts = std::unique_ptr<Hosts>(new Hosts(rate.empty() ? 0 : count, rate));
  if (rate.empty()) return hosts;
  if (count > kMostHosts) {
    return absl::InvalidArgumentError(
        absl::StrCat(count, " hosts behind links; at most ", kMostHosts));
  }
  if (absl::Status status = hosts->Connect(); !status.ok()) return status;
  return hosts;
}

absl::Status Hosts::Connect() {
  const absl::StatusOr<double> rate = ParseRate(rate_);
  if (!rate.ok()) return rate.status();
  if (*rate < kLeastBitsPerSecond) {
    return absl::InvalidArgumentError(
        absl::StrFormat("links of %s; 64kbit is the least that can be measured", rate_));
  }
  TakeDownLeftovers();
  const std::string tbf =
      absl::StrFormat("root tbf rate %.0fbit burst %d latency 50ms", *rate, kBurst);
  const std::string hub = switch_name();
  absl::Status status = Run(absl::StrFormat(
      "ip netns add %s && ip -n %s link add bridge type bridge && ip -n %s link set bridge up", hub,
      hub, hub));
  // A switch does not filter; the kernel would look rules up for each packet, where it can at all.
  Run(absl::StrFormat("ip netns exec %s sh -c 'cd /proc/sys/net/bridge && echo 0 | "
                      "tee bridge-nf-call-*' >/dev/null 2>&1",
                      hub))
      .IgnoreError();
  for (uint32_t host = 0; host < count_ && status.ok(); ++host) {
    const std::string space = name(host);
    status = Run(absl::StrFormat(
        "ip netns add %s && ip link add eth0 netns %s type veth peer name port%d netns %s && "
        "ip -n %s address add %s/24 dev eth0 && ip -n %s link set eth0 up && "
        "ip -n %s link set lo up && ip -n %s link set port%d master bridge up && "
        "tc -n %s qdisc add dev eth0 %s && tc -n %s qdisc add dev port%d %s",
        space, space, host, hub, space, address(host), space, space, hub, host, space, tbf, hub,
        host, tbf));
    has_cubic_ &= Run(absl::StrFormat("ip netns exec %s sh -c 'echo cubic "
                                      ">/proc/sys/net/ipv4/tcp_congestion_control' 2>/dev/null",
                                      space))
                      .ok();
  }
  return status;
}

Hosts::~Hosts() {
  if (rate_.empty()) return;
  std::string command = absl::StrCat("ip netns delete ", switch_name());
  for (uint32_t host = 0; host < count_; ++host) {
    absl::StrAppend(&command, "; ip netns delete ", name(host));
  }
  // Those that could not be made are not there.
  Run(absl::StrCat("{ ", command, "; } 2>/dev/null")).IgnoreError();
}

std::string Hosts::address(uint32_t host) const {
  return rate_.empty() ? "127.0.0.1" : absl::StrCat(kHostNetwork, host + 1);
}

std::vector<std::string> Hosts::On(uint32_t host, std::vector<std::string> command) const {
  if (rate_.empty()) return command;
  command.insert(command.begin(), {"ip", "netns", "exec", name(host)});
  return command;
}

std::string Hosts::name_prefix() const { return NamePrefix(); }

std::string Hosts::name(uint32_t host) const { return absl::StrCat(name_prefix(), "-", host); }

std::string Hosts::switch_name() const { return absl::StrCat(name_prefix(), "-switch"); }

}  // namespace signpost::bench
