#include "client/start_values.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/reduction_session.h"

namespace signpost {

absl::Status TakeValuesOfRank0(const SessionOptions& options,
                               absl::Span<const Parameter> parameters) {
  SessionOptions for_all = options;
  for_all.worker.round_deadline = absl::ZeroDuration();
  for_all.worker.min_workers = 0;
  absl::StatusOr<std::unique_ptr<ReductionSession>> reduction =
      ReductionSession::Join(for_all, "values of rank 0", {.codec = FLOAT32, .sum = true},
                             std::vector<Parameter>(parameters.begin(), parameters.end()));
  if (!reduction.ok()) return reduction.status();

  std::vector<absl::Span<float>> values;
  for (const Parameter& parameter : parameters) values.push_back(parameter.values);
  if (options.worker.rank != 0) {
    for (const absl::Span<float> zeros : values) std::fill(zeros.begin(), zeros.end(), 0.0f);
  }
  const absl::StatusOr<StepReport> report = (*reduction)->Reduce(values);
  // Whatever came of it: else its name would be taken for a while, and a new start refused.
  const absl::Status left = (*reduction)->Leave();
  if (!report.ok()) return report.status();
  if (!left.ok()) return left;
  if (report->skipped.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("the parameters that rank 0 begins with are not finite, or out of range: %s",
                      report->skipped.front().block));
}

}  // namespace signpost
