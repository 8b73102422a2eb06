#include "proto/steady_time.h"

namespace signpost {

using std::chrono::steady_clock;
using std::chrono::system_clock;

absl::Time SteadyNow() {
  struct Start {
    absl::Time system = absl::FromChrono(system_clock::now());
    steady_clock::time_point steady = steady_clock::now();
  };
  static const Start start;
  return start.system + absl::FromChrono(steady_clock::now() - start.steady);
}

system_clock::time_point ToSystemClock(absl::Time steady) {
  return absl::ToChronoTime(absl::FromChrono(system_clock::now()) + (steady - SteadyNow()));
}

}  // namespace signpost
