#include "doctor/comparison.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "doctor/name.h"
#include "doctor/path.h"
#include "doctor/report.h"

namespace signpost::doctor {
namespace {

// Certificates are valid from five minutes before they are made.
constexpr double kFaultClockSeconds = 240, kWarningClockSeconds = 1;

constexpr double kLeastBitsPerSecond = 100e6;
// Of what its interface says it has, up to so much: one connection need not fill more.
constexpr double kLeastShare = 0.25, kJudgedMbit = 1000;
// Of the median of all hosts, and only below so much.
constexpr double kLeastShareOfOthers = 0.25, kComparedBitsPerSecond = 2.5e9;

double Median(std::vector<double> numbers) {
  std::sort(numbers.begin(), numbers.end());
  const size_t size = numbers.size();
  return (numbers[(size - 1) / 2] + numbers[size / 2]) / 2;
}

std::string Rate(double bits_per_s) {
  return bits_per_s >= 1e9 ? absl::StrFormat("%.3g Gbit/s", bits_per_s / 1e9)
                           : absl::StrFormat("%.3g Mbit/s", bits_per_s / 1e6);
}

// Of all that were asked, by index.
std::vector<size_t> Asked(const Hosts& hosts) {
  std::vector<size_t> asked;
  for (size_t i = 0; i < hosts.hosts.size(); ++i) {
    if (hosts.hosts[i].facts) asked.push_back(i);
  }
  return asked;
}

void CheckVersions(const Hosts& hosts, DoctorReport& report) {
  std::map<std::string, std::vector<std::string>> by_version;
  for (const size_t i : Asked(hosts)) {
    by_version[hosts.hosts[i].facts->version()].push_back(hosts.hosts[i].address);
  }
  if (by_version.size() < 2) return;
  std::vector<std::string> all;
  for (const auto& [version, addresses] : by_version) {
    all.push_back(absl::StrCat(version, " on ", absl::StrJoin(addresses, ", ")));
  }
  Reporter("all hosts", report)
      .Fault("version", absl::StrCat("versions differ: ", absl::StrJoin(all, "; ")),
             "the same version on all hosts; `signpost version` tells");
}

void CheckClocks(const Hosts& hosts, DoctorReport& report) {
  const std::vector<size_t> asked = Asked(hosts);
  if (asked.size() < 2) return;
  std::vector<double> ahead;
  for (const size_t i : asked) ahead.push_back(hosts.hosts[i].clock_ahead_s);
  // Of two hosts it is not known whose is wrong.
  const double right = asked.size() == 2 ? ahead[0] : Median(ahead);
  double most = 0;
  for (size_t n = 0; n < asked.size(); ++n) {
    const double off = ahead[n] - right;
    most = std::max(most, std::abs(off));
    if (std::abs(off) < kWarningClockSeconds) continue;
    const std::string than = asked.size() == 2 ? hosts.hosts[asked[0]].address : "the others'";
    Reporter to(hosts.hosts[asked[n]].address, report);
    const std::string text = absl::StrFormat("the clock is %.1f s %s %s", std::abs(off),
                                             off > 0 ? "ahead of" : "behind", than);
    constexpr char kMend[] =
        "timedatectl set-ntp true, on the host that is wrong; chronyc tracking, or timedatectl "
        "timesync-status, shows whether it is kept";
    if (std::abs(off) >= kFaultClockSeconds) {
      to.Fault("clock", absl::StrCat(text, ": new certificates are not valid yet on one side"),
               kMend);
    } else {
      to.Warn("clock", absl::StrCat(text, ": logs of hosts do not line up"), kMend);
    }
  }
  if (most < kWarningClockSeconds) {
    Reporter("all hosts", report).Fine("clock", absl::StrFormat("at most %.2g s apart", most));
  }
}

// As most others see it; empty: nobody knows it.
std::set<std::string> AddressesFor(const Hosts& hosts, size_t name) {
  std::map<std::set<std::string>, int> votes;
  for (const size_t i : Asked(hosts)) {
    const ResolvedName& seen = hosts.hosts[i].facts->names(static_cast<int>(name));
    const std::set<std::string> addresses(seen.addresses().begin(), seen.addresses().end());
    // Itself may have it as loopback.
    if (!addresses.empty()) votes[addresses] += IsHiddenBehindLoopback(seen) ? 1 : 1024;
  }
  if (votes.empty()) return {};
  return std::max_element(votes.begin(), votes.end(),
                          [](const auto& a, const auto& b) { return a.second < b.second; })
      ->first;
}

void CheckName(const ResolvedName& seen, const std::set<std::string>& wanted, Reporter& to) {
  const std::string right = absl::StrJoin(wanted, ", ");
  const std::string mend = absl::StrCat(
      "sed -i '/[[:space:]]", seen.host(), "$/d' /etc/hosts && echo '",
      wanted.empty() ? "ADDRESS" : *wanted.begin(), " ", seen.host(), "' >> /etc/hosts");
  if (!seen.error().empty()) {
    to.Fault("name", absl::StrCat("'", seen.host(), "' is not known here: ", seen.error()), mend);
  } else if (std::none_of(seen.addresses().begin(), seen.addresses().end(),
                          [&](const std::string& address) { return wanted.contains(address); })) {
    to.Fault("name",
             absl::StrCat("'", seen.host(), "' is ", absl::StrJoin(seen.addresses(), ", "),
                          " here, and ", right, " for others",
                          IsHiddenBehindLoopback(seen)
                              ? ": what listens by that name is reached by nobody else"
                              : ""),
             mend);
  }
}

void CheckNamesOfAll(const Hosts& hosts, DoctorReport& report) {
  for (size_t name = 0; name < hosts.hosts.size(); ++name) {
    const std::set<std::string> wanted = AddressesFor(hosts, name);
    for (const size_t i : Asked(hosts)) {
      const ResolvedName& seen = hosts.hosts[i].facts->names(static_cast<int>(name));
      if (!IsName(seen.host())) continue;
      Reporter to(hosts.hosts[i].address, report);
      CheckName(seen, wanted, to);
    }
  }
}

std::string Arrow(const Hosts& hosts, size_t from, size_t to) {
  return absl::StrCat(hosts.hosts[from].address, " -> ", hosts.hosts[to].address);
}

// Whether nobody who was asked gets to it, and all say the same.
bool IsReachedByNobody(const Hosts& hosts, size_t to) {
  std::set<std::string> checks;
  for (size_t from = 0; from < hosts.hosts.size(); ++from) {
    if (from == to || !hosts.paths[from][to]) continue;
    const PathFacts& path = *hosts.paths[from][to];
    checks.insert(path.findings().empty() ? "" : path.findings(0).check());
  }
  return checks.empty() || (checks.size() == 1 && !checks.contains(""));
}

void AddFinding(DoctorLine line, const std::string& where, DoctorReport& report) {
  line.set_where(where);
  *report.add_lines() = std::move(line);
}

// What less than that is a finding.
double LeastRate(const PathFacts& path) {
  return std::max(kLeastBitsPerSecond,
                  kLeastShare * 1e6 * std::min<double>(path.link_mbit(), kJudgedMbit));
}

// The best of those out of a host, if possible one that knows the interface; an empty one where
// there is none.
const PathFacts& PathOutOf(const Hosts& hosts, size_t host) {
  const PathFacts* best = &PathFacts::default_instance();
  for (const std::optional<PathFacts>& path : hosts.paths[host]) {
    if (!path) continue;
    if (best->interface().empty() || path->bits_per_s() > best->bits_per_s()) best = &*path;
  }
  return *best;
}

// By itself; one that was not measured is not.
bool IsSlow(const PathFacts& path) {
  return path.bits_per_s() > 0 && path.bits_per_s() < LeastRate(path);
}

// Calls `look(from, to, path)` for each path whose bandwidth was measured.
template <typename Look>
void ForEachRate(const Hosts& hosts, const Look& look) {
  for (size_t from = 0; from < hosts.hosts.size(); ++from) {
    for (size_t to = 0; to < hosts.hosts.size(); ++to) {
      const std::optional<PathFacts>& path = hosts.paths[from][to];
      if (path && path->bits_per_s() > 0) look(from, to, *path);
    }
  }
}

// A host's link in one direction, as the best of its paths shows it.
struct Direction {
  double bits_per_s = 0;         // 0: not measured
  size_t best_other = 0;         // the host at the other end of that path
  double second_bits_per_s = 0;  // of the paths with other hosts than that; 0: there is none
  size_t paths = 0;              // that were measured
  double others_bits_per_s = 0;  // the median of all hosts, if this one is slow; 0: it is not

  bool is_slow() const { return others_bits_per_s > 0; }
  // By one path alone, it may as well be the other host's.
  bool is_its_own() const { return paths >= 2; }
  // As the paths show it that are not with that host.
  double Without(size_t host) const { return best_other == host ? second_bits_per_s : bits_per_s; }
};

struct Link {
  Direction out, in;
};

void Widen(double bits_per_s, size_t other, Direction& direction) {
  ++direction.paths;
  if (bits_per_s > direction.bits_per_s) {
    direction.second_bits_per_s = std::exchange(direction.bits_per_s, bits_per_s);
    direction.best_other = other;
  } else {
    direction.second_bits_per_s = std::max(direction.second_bits_per_s, bits_per_s);
  }
}

// Of that host's link, and the others' as the paths between these show them. Of two in the middle
// it is the better one. 0: nothing shows others'.
double MedianAround(size_t host, Direction Link::*side, const std::vector<Link>& links) {
  std::vector<double> rates = {(links[host].*side).bits_per_s};
  for (size_t other = 0; other < links.size(); ++other) {
    const double rate = (links[other].*side).Without(host);
    if (other != host && rate > 0) rates.push_back(rate);
  }
  if (rates.size() < 2) return 0;
  const auto middle = rates.begin() + static_cast<ptrdiff_t>(rates.size() / 2);
  std::nth_element(rates.begin(), middle, rates.end());
  return *middle;
}

// Of three hosts or more it shows whose link is slow: theirs whose best path is.
void Judge(const Hosts& hosts, Direction Link::*side, std::vector<Link>& links) {
  for (size_t host = 0; host < links.size(); ++host) {
    Direction& direction = links[host].*side;
    if (!direction.is_its_own()) continue;
    const double others = MedianAround(host, side, links);
    const double least_of_others = std::min(kLeastShareOfOthers * others, kComparedBitsPerSecond);
    if (direction.bits_per_s < std::max(LeastRate(PathOutOf(hosts, host)), least_of_others)) {
      direction.others_bits_per_s = others;
    }
  }
}

// Of each host.
std::vector<Link> LinksOf(const Hosts& hosts) {
  std::vector<Link> links(hosts.hosts.size());
  ForEachRate(hosts, [&](size_t from, size_t to, const PathFacts& path) {
    Widen(path.bits_per_s(), to, links[from].out);
    Widen(path.bits_per_s(), from, links[to].in);
  });
  Judge(hosts, &Link::out, links);
  Judge(hosts, &Link::in, links);
  return links;
}

// Whether a host at either end is what makes it slow.
bool HasSlowEnd(const std::vector<Link>& links, size_t from, size_t to) {
  return links[from].out.is_slow() || links[to].in.is_slow();
}

void TellGoodPaths(const Hosts& hosts, const std::vector<Link>& links, DoctorReport& report) {
  for (size_t from = 0; from < hosts.hosts.size(); ++from) {
    for (size_t to = 0; to < hosts.hosts.size(); ++to) {
      if (!hosts.paths[from][to] || !hosts.paths[from][to]->findings().empty()) continue;
      const PathFacts& path = *hosts.paths[from][to];
      if (IsSlow(path) || HasSlowEnd(links, from, to)) continue;
      Reporter reporter(Arrow(hosts, from, to), report);
      if (path.bits_per_s() > 0) {
        reporter.Fine("path", absl::StrCat(Describe(path), ", ", Rate(path.bits_per_s())));
      } else {
        reporter.Unchecked("bandwidth", absl::StrCat(Describe(path), ": nothing came through it"));
      }
    }
  }
}

// A host that nobody gets to is one finding, and so is a pair that loses packets both ways.
void CheckPaths(const Hosts& hosts, DoctorReport& report) {
  std::set<std::pair<size_t, size_t>> told;  // pairs whose packets are lost
  for (size_t to = 0; to < hosts.hosts.size(); ++to) {
    const bool nobody = hosts.hosts.size() > 2 && IsReachedByNobody(hosts, to);
    bool is_told = false;
    for (size_t from = 0; from < hosts.hosts.size(); ++from) {
      if (!hosts.paths[from][to]) continue;
      const PathFacts& path = *hosts.paths[from][to];
      for (const DoctorLine& line : path.findings()) {
        if (line.check() == "name") continue;  // CheckNamesOfAll has told
        if (nobody && std::exchange(is_told, true)) continue;
        const bool is_mtu = line.check() == "mtu";
        if (is_mtu && !told.insert(std::minmax(from, to)).second) continue;
        AddFinding(line, nobody ? hosts.hosts[to].address : Arrow(hosts, from, to), report);
        is_told = true;
      }
    }
    if (hosts.hosts[to].facts) continue;
    const bool was_mtu = std::any_of(told.begin(), told.end(), [to](const auto& pair) {
      return pair.first == to || pair.second == to;
    });
    for (const DoctorLine& line : hosts.hosts[to].findings) {
      if (is_told || was_mtu) break;
      AddFinding(line, hosts.hosts[to].address, report);
    }
    Reporter(hosts.hosts[to].address, report)
        .Unchecked("host", "it could not be asked what it finds");
  }
}

void CheckMtus(const Hosts& hosts, DoctorReport& report) {
  std::map<uint32_t, std::set<std::string>> by_mtu;
  for (const auto& paths : hosts.paths) {
    for (const auto& path : paths) {
      if (!path || path->mtu() == 0 || path->interface() == "lo") continue;
      by_mtu[path->mtu()].insert(absl::StrCat(path->local_address(), " (", path->interface(), ")"));
    }
  }
  if (by_mtu.size() < 2) return;
  std::vector<std::string> all;
  for (const auto& [mtu, interfaces] : by_mtu) {
    all.push_back(absl::StrCat(mtu, " at ", absl::StrJoin(interfaces, ", ")));
  }
  Reporter("all hosts", report)
      .Warn("mtu", absl::StrCat("MTUs differ: ", absl::StrJoin(all, "; ")),
            "ip link set dev INTERFACE mtu N: the same on all hosts of a network, and no more than "
            "its switches carry");
}

void WarnOfRate(const std::string& where, const std::string& rates, const PathFacts& path,
                DoctorReport& report) {
  const bool is_known = !path.interface().empty();
  const std::string says =
      path.link_mbit() > 0 ? absl::StrCat(path.link_mbit(), " Mbit/s") : "nothing of its speed";
  const std::string interface = is_known ? path.interface() : "INTERFACE";
  Reporter(where, report)
      .Warn("bandwidth", is_known ? absl::StrCat(rates, "; ", interface, " says ", says) : rates,
            absl::StrCat("ethtool ", interface,
                         " shows what was negotiated (a cable, a "
                         "switch port); tc qdisc show dev ",
                         interface, " whether it is shaped"));
}

void WarnOfSlowHosts(const Hosts& hosts, const std::vector<Link>& links, DoctorReport& report) {
  for (size_t host = 0; host < links.size(); ++host) {
    std::vector<std::string> rates;
    for (const auto& [direction, way] :
         {std::pair{links[host].out, "out of"}, {links[host].in, "into"}}) {
      if (!direction.is_slow()) continue;
      rates.push_back(absl::StrCat(Rate(direction.bits_per_s), " come through ", way,
                                   " it at most, and ", Rate(direction.others_bits_per_s), " ", way,
                                   " others"));
    }
    if (rates.empty()) continue;
    WarnOfRate(hosts.hosts[host].address, absl::StrJoin(rates, "; "), PathOutOf(hosts, host),
               report);
  }
}

void CheckRates(const Hosts& hosts, const std::vector<Link>& links, DoctorReport& report) {
  WarnOfSlowHosts(hosts, links, report);
  std::set<std::pair<size_t, size_t>> told;
  ForEachRate(hosts, [&](size_t from, size_t to, const PathFacts& path) {
    if (!IsSlow(path) || HasSlowEnd(links, from, to)) return;
    if (!told.insert(std::minmax(from, to)).second) return;
    WarnOfRate(Arrow(hosts, from, to), absl::StrCat(Rate(path.bits_per_s()), " come through"), path,
               report);
  });
}

}  // namespace

DoctorReport CheckHosts(const Hosts& hosts) {
  const std::vector<Link> links = LinksOf(hosts);
  DoctorReport report;
  for (const size_t i : Asked(hosts)) report.MergeFrom(hosts.hosts[i].facts->report());
  CheckVersions(hosts, report);
  CheckClocks(hosts, report);
  CheckNamesOfAll(hosts, report);
  TellGoodPaths(hosts, links, report);
  CheckPaths(hosts, report);
  CheckMtus(hosts, report);
  CheckRates(hosts, links, report);
  return report;
}

double SlowestRate(const Hosts& hosts) {
  double slowest = 0;
  for (const Link& link : LinksOf(hosts)) {
    for (const double rate : {link.out.bits_per_s, link.in.bits_per_s}) {
      if (rate > 0 && (slowest == 0 || rate < slowest)) slowest = rate;
    }
  }
  return slowest;
}

uint32_t FewestProcessors(const Hosts& hosts) {
  uint32_t fewest = 0;
  for (const size_t i : Asked(hosts)) {
    const uint32_t processors = hosts.hosts[i].facts->processors();
    if (processors > 0 && (fewest == 0 || processors < fewest)) fewest = processors;
  }
  return fewest;
}

}  // namespace signpost::doctor
