// The hosts that a benchmark's processes run on.

#ifndef SIGNPOST_BENCH_HOSTS_H_
#define SIGNPOST_BENCH_HOSTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace signpost::bench {

// "1gbit", "100mbit", "64kbit", as tc writes rates, in bit/s. INVALID_ARGUMENT otherwise.
absl::StatusOr<double> ParseRate(absl::string_view rate);

// What the addresses of hosts with links begin with: one network of 256.
inline constexpr char kHostNetwork[] = "10.77.0.";

// All of them are this machine; or each is a network namespace of its own, with a link to a switch
// that carries so much in each direction.
class Hosts {
 public:
  // Bytes that a link which was idle carries at once, whatever its rate. With less tbf drops the
  // large packets that the kernel cuts up late.
  static constexpr int kBurst = 256 << 10;

  // At most 250, as root, for links of a `rate` (ParseRate) of at least 64 kbit/s; any number if it
  // is empty. Errors name the command that failed. Takes down the namespaces of processes that are
  // gone and could not.
  static absl::StatusOr<std::unique_ptr<Hosts>> Create(uint32_t count, const std::string& rate);

  ~Hosts();  // takes the namespaces down; nothing may run in them any more
  Hosts(const Hosts&) = delete;
  Hosts& operator=(const Hosts&) = delete;

  std::string address(uint32_t host) const;
  // With links, what a host's namespace is called, without "-" and its number.
  std::string name_prefix() const;
  // The network interface of a host's link.
  std::string interface() const { return rate_.empty() ? "lo" : "eth0"; }
  // Whether the hosts' TCP has cubic, Linux's default, for its congestion control. What this
  // machine has been set to instead need not suit such links: BBR takes several flows' queues for
  // the links' own delay, and has taken twice as long. A kernel lets namespaces choose only what
  // stands in net.ipv4.tcp_allowed_congestion_control. Without links it is the machine's, and this
  // is true.
  bool has_cubic() const { return has_cubic_; }
  // The command as it is run on the host.
  std::vector<std::string> On(uint32_t host, std::vector<std::string> command) const;

 private:
  Hosts(uint32_t count, const std::string& rate) : count_(count), rate_(rate) {}
  absl::Status Connect();
  std::string name(uint32_t host) const;
  std::string switch_name() const;

  const uint32_t count_;
  const std::string rate_;
  bool has_cubic_ = true;
};

}  // namespace signpost::bench

#endif  // SIGNPOST_BENCH_HOSTS_H_
