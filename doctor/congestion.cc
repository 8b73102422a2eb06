#include "doctor/congestion.h"

#include <fstream>

#include "absl/strings/str_cat.h"

namespace signpost::doctor {

std::string FindCongestionControl() {
  std::ifstream file("/proc/sys/net/ipv4/tcp_congestion_control");
  std::string name;
  file >> name;
  return name;
}

// Of others than BBR and cubic nothing was measured (docs/measurements.md).
void CheckCongestionControl(const std::string& name, Reporter& to) {
  if (name.empty()) return;
  if (name != "bbr") {
    to.Fine("congestion", absl::StrCat("TCP's congestion control is ", name));
    return;
  }
  to.Warn("congestion",
          "TCP's congestion control is bbr: one-bit exchanges of 100M parameters, one every 4 s at "
          "1 Gbit/s, took 154 to 160 ms in the median and up to 233, with cubic 133 to 134 and up "
          "to 145",
          "sysctl -w net.ipv4.tcp_congestion_control=cubic, and start the job's processes after "
          "that; of pods: on their node, before they start (kubelets let a pod set it for itself "
          "only with --allowed-unsafe-sysctls)");
}

}  // namespace signpost::doctor
