// What 1-bit LAMB (arXiv:2104.06069) has to choose beside what 1-bit Adam has. The defaults are
// those of the paper's authors.

#ifndef SIGNPOST_WORKER_LAMB_OPTIONS_H_
#define SIGNPOST_WORKER_LAMB_OPTIONS_H_

#include <string>

#include "absl/status/status.h"

namespace signpost {

struct LambOptions {
  // A tensor's trust ratio, ||parameters|| / ||update||, is clipped to [min_coeff, max_coeff].
  double max_coeff = 10;
  double min_coeff = 0.01;
  // Of the moving average of trust ratios that is frozen with the variance.
  double coeff_beta = 0.9;
  // In one-bit steps that average is multiplied by a factor, which is clipped to
  // [factor_min, factor_max], and then changes by at most this fraction from step to step.
  double factor_max = 4;
  double factor_min = 0.5;
  double factor_threshold = 0.1;
};

// INVALID_ARGUMENT that names the option.
absl::Status CheckLambOptions(const LambOptions& options);

// "max_coeff=10 ...": equal exactly if the options are.
std::string DescribeLambOptions(const LambOptions& options);

}  // namespace signpost

#endif  // SIGNPOST_WORKER_LAMB_OPTIONS_H_
