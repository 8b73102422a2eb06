// Arithmetic as the C language begins with it, whatever a program has asked for on its threads.

#ifndef SIGNPOST_WORKER_FLOAT_MODE_H_
#define SIGNPOST_WORKER_FLOAT_MODE_H_

#include <cfenv>

namespace signpost {

// As long as this is there, this thread, and those that it starts, round to nearest and compute
// with denormal numbers; afterwards this one has its mode back, and its exception flags as they
// were. Otherwise replicas would drift apart: torch.set_flush_denormal, or a library that was
// linked with -ffast-math, has another mode on one rank's thread, and on none of its helpers.
class DefaultFloatMode {
 public:
  DefaultFloatMode() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatMode() { std::fesetenv(&before_); }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_FLOAT_MODE_H_
