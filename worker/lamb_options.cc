#include "worker/lamb_options.h"

#include <cmath>

#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace signpost {

absl::Status CheckLambOptions(const LambOptions& options) {
  const auto error = [](absl::string_view option, double got, absl::string_view wanted) {
    return absl::InvalidArgumentError(
        absl::StrFormat("optimizer option %s is %g, wanted %s", option, got, wanted));
  };
  if (!(options.min_coeff > 0 && std::isfinite(options.min_coeff))) {
    return error("min_coeff", options.min_coeff, "a positive number");
  }
  if (!(options.max_coeff >= options.min_coeff && std::isfinite(options.max_coeff))) {
    return error("max_coeff", options.max_coeff, "a number that is not below min_coeff");
  }
  if (!(options.coeff_beta >= 0 && options.coeff_beta < 1)) {
    return error("coeff_beta", options.coeff_beta, "[0, 1)");
  }
  if (!(options.factor_min > 0 && options.factor_min <= 1)) {
    return error("factor_min", options.factor_min, "(0, 1]");
  }
  if (!(options.factor_max >= 1 && std::isfinite(options.factor_max))) {
    return error("factor_max", options.factor_max, "a number that is not below 1");
  }
  if (!(options.factor_threshold >= 0 && options.factor_threshold < 1)) {
    return error("factor_threshold", options.factor_threshold, "[0, 1)");
  }
  return absl::OkStatus();
}

std::string DescribeLambOptions(const LambOptions& options) {
  return absl::StrFormat(
      "max_coeff=%.17g min_coeff=%.17g coeff_beta=%.17g factor_max=%.17g factor_min=%.17g "
      "factor_threshold=%.17g",
      options.max_coeff, options.min_coeff, options.coeff_beta, options.factor_max,
      options.factor_min, options.factor_threshold);
}

}  // namespace signpost
