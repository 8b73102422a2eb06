#include "doctor/proxy.h"

#include <arpa/inet.h>

#include <cstdint>
#include <cstdlib>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "doctor/name.h"

namespace signpost::doctor {
namespace {

constexpr absl::string_view kProxies[] = {"http_proxy", "https_proxy", "all_proxy", "grpc_proxy"};

bool IsInNetwork(absl::string_view host, absl::string_view network) {
  const std::vector<std::string> parts = absl::StrSplit(network, '/');
  in_addr address, base;
  uint32_t bits = 0;
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[1], &bits) || bits > 32 ||
      inet_pton(AF_INET, std::string(host).c_str(), &address) != 1 ||
      inet_pton(AF_INET, parts[0].c_str(), &base) != 1) {
    return false;
  }
  const uint32_t mask = bits == 0 ? 0 : ~uint32_t{0} << (32 - bits);
  return ((ntohl(address.s_addr) ^ ntohl(base.s_addr)) & mask) == 0;
}

std::string NoProxy(const std::map<std::string, std::string>& proxies) {
  std::string exceptions;
  for (const char* name : {"no_proxy", "NO_PROXY"}) {
    const auto found = proxies.find(name);
    if (found != proxies.end()) absl::StrAppend(&exceptions, ",", found->second);
  }
  return exceptions;
}

}  // namespace

std::map<std::string, std::string> FindProxies() {
  std::map<std::string, std::string> proxies;
  const auto find = [&proxies](const std::string& name) {
    const char* const value = std::getenv(name.c_str());
    if (value != nullptr && *value != '\0') proxies[name] = value;
  };
  for (const absl::string_view name : kProxies) {
    find(std::string(name));
    find(absl::AsciiStrToUpper(name));
  }
  find("no_proxy");
  find("NO_PROXY");
  return proxies;
}

bool IsExcepted(absl::string_view host, absl::string_view no_proxy) {
  for (absl::string_view entry : absl::StrSplit(no_proxy, ',', absl::SkipWhitespace())) {
    entry = absl::StripAsciiWhitespace(entry);
    if (entry == "*" || entry == host || IsInNetwork(host, entry)) return true;
    absl::ConsumePrefix(&entry, "*");
    absl::ConsumePrefix(&entry, ".");
    if (!entry.empty() && absl::EndsWith(host, absl::StrCat(".", entry))) return true;
  }
  return false;
}

void CheckProxies(const std::map<std::string, std::string>& proxies,
                  const std::vector<std::string>& hosts, Reporter& to) {
  std::vector<std::string> set;
  for (const auto& [name, value] : proxies) {
    if (absl::AsciiStrToLower(name) != "no_proxy") set.push_back(absl::StrCat(name, "=", value));
  }
  if (set.empty()) {
    to.Fine("proxy", "no proxy is set");
    return;
  }
  const std::string no_proxy = NoProxy(proxies);
  std::set<std::string> affected;
  for (const std::string& host : hosts) {
    if (!IsExcepted(HostOf(host), no_proxy)) affected.insert(HostOf(host));
  }
  const std::string all = absl::StrJoin(set, ", ");
  if (affected.empty()) {
    to.Fine("proxy", absl::StrCat(all, "; not for any host of the job"));
    return;
  }
  const std::string names = absl::StrJoin(affected, ",");
  to.Warn("proxy",
          absl::StrCat(all, " is set, and no_proxy does not except ", names,
                       ": signpost goes past it, other programs of the job may not"),
          absl::StrCat("export no_proxy=\"${no_proxy:+$no_proxy,}", names, "\""));
}

}  // namespace signpost::doctor
