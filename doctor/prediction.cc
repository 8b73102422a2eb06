#include "doctor/prediction.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace signpost::doctor {

void AddPrediction(const bench::Cluster& cluster, const bench::Training& training, Reporter& to) {
  const bench::Prediction prediction = bench::Predict(cluster, training);
  to.Fine("prediction",
          absl::StrFormat("%d parameters, %d workers, %d aggregators, links of %.4g Gbit/s:",
                          training.parameters, cluster.workers, cluster.shards,
                          cluster.link_bits_per_s / 1e9));
  const std::pair<const char*, const bench::StepTimes&> codecs[] = {
      {"fp32", prediction.fp32}, {"bf16", prediction.bf16}, {"1 bit", prediction.one_bit}};
  for (const auto& [codec, times] : codecs) {
    to.Fine("prediction",
            absl::StrCat(
                absl::StrFormat("%s: an exchange takes %.4g ms", codec, 1e3 * times.exchange_s),
                training.compute_s > 0
                    ? absl::StrFormat(", a step with overlap %.4g ms", 1e3 * times.overlapped_s)
                    : ""));
  }
  to.Fine("prediction",
          training.compute_s > 0
              ? prediction.verdict
              : "with --compute-ms, what a step computes, it says whether 1 bit pays");
}

}  // namespace signpost::doctor
