#include "doctor/prediction.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace signpost::doctor {
namespace {

std::string FormatSeconds(double seconds) {
  return seconds >= 1 ? absl::StrFormat("%.1f s", seconds)
                      : absl::StrFormat("%.3g ms", 1e3 * seconds);
}

}  // namespace

void AddPrediction(const bench::Cluster& cluster, const bench::Training& training, Reporter& to) {
  const bench::Prediction prediction = bench::Predict(cluster, training);
  to.Fine("prediction",
          absl::StrCat(training.parameters, " parameters; ", bench::Describe(cluster)));
  const bool computes = training.compute_s > 0;
  for (const auto& [codec, times] : bench::TimesByCodec(prediction)) {
    const std::string step =
        computes ? absl::StrCat(", a step with overlap ", FormatSeconds(times.overlapped_s)) : "";
    to.Fine("prediction",
            absl::StrCat(codec, ": an exchange takes ", FormatSeconds(times.exchange_s), step));
  }
  to.Fine("prediction",
          computes ? prediction.verdict
                   : "with --compute-ms, what a step computes, it says whether one-bit pays");
}

}  // namespace signpost::doctor
