#include "proto/steady_time.h"

#include <pthread.h>
#include <signal.h>

#include <mutex>
#include <thread>

#include "proto/running_time.h"

namespace signpost {
namespace {

using std::chrono::steady_clock;
using std::chrono::system_clock;

absl::Duration SinceStart() {
  static const steady_clock::time_point start = steady_clock::now();
  return absl::FromChrono(steady_clock::now() - start);
}

constinit RunningTime running_time(SinceStart);

void KeepTicking() {
  while (true) {
    std::this_thread::sleep_for(absl::ToChronoNanoseconds(RunningTime::kTickInterval));
    running_time.Tick();
  }
}

}  // namespace

absl::Time SteadyNow() {
  static const absl::Time start = absl::FromChrono(system_clock::now()) - running_time.Now();
  return start + running_time.Now();
}

void CountWhileRunning() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(/*prepare=*/nullptr, /*parent=*/nullptr, [] { running_time.EndTicks(); });
    running_time.Tick();
    // Signals are for threads that expect them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread(KeepTicking).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  });
}

system_clock::time_point ToSystemClock(absl::Time steady) {
  return absl::ToChronoTime(absl::FromChrono(system_clock::now()) + (steady - SteadyNow()));
}

}  // namespace signpost
