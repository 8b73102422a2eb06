#include "client/start_values.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/reduction_session.h"
#include "kernels/dense.h"
#include "worker/page_vector.h"

namespace signpost {
namespace {

bool AllArePackable(absl::Span<const absl::Span<float>> values) {
  return absl::c_all_of(values, [](absl::Span<const float> all) {
    return kernels::DenseWithinRange(kernels::DenseType::kFloat32,
                                     reinterpret_cast<const uint8_t*>(all.data()), all.size());
  });
}

}  // namespace

absl::Status TakeValuesOfRank0(const SessionOptions& options, Worker& worker,
                               absl::Span<const Parameter> parameters, kernels::cuda::Gpu* gpu) {
  // Those of the others are zeros.
  const bool is_rank_0 = options.worker.rank == 0;
  std::vector<absl::Span<float>> values;
  std::vector<PageVector<float>> copies;
  for (const Parameter& parameter : parameters) {
    values.push_back(parameter.values);
    if (gpu == nullptr) continue;
    copies.emplace_back(parameter.values.size());
    values.back() = absl::MakeSpan(copies.back());
    if (!is_rank_0) continue;
    absl::Status status = gpu->Read(values.back().data(), parameter.values.data(),
                                    values.back().size() * sizeof(float), /*stream=*/nullptr);
    if (!status.ok()) return status;
  }
  SessionOptions for_all = options;
  for_all.worker.round_deadline = absl::ZeroDuration();
  for_all.worker.min_workers = 0;
  for_all.gpu.reset();
  for_all.worker.is_interrupted = nullptr;  // values of two ranks would be left
  for_all.worker.check_may_wait = [&worker] { return worker.CheckEpochStands(); };
  absl::StatusOr<std::unique_ptr<ReductionSession>> reduction =
      ReductionSession::Join(for_all, "values of rank 0", {.codec = FLOAT32, .sum = true},
                             std::vector<Parameter>(parameters.begin(), parameters.end()));
  if (!reduction.ok()) return reduction.status();
  if (options.worker.is_interrupted && options.worker.is_interrupted()) {
    (*reduction)->Leave().IgnoreError();
    return absl::CancelledError(
        absl::StrFormat("interrupted while joining job '%s'", options.worker.job));
  }

  if (!is_rank_0 && gpu == nullptr) {
    for (const absl::Span<float> zeros : values) std::fill(zeros.begin(), zeros.end(), 0.0f);
  }
  // What of them is not finite takes its whole chunk along.
  std::vector<std::vector<float>> kept;
  if (is_rank_0 && gpu == nullptr && !AllArePackable(values)) {
    for (const absl::Span<float> all : values) kept.emplace_back(all.begin(), all.end());
  }
  const absl::StatusOr<StepReport> report = (*reduction)->Reduce(values);
  for (size_t i = 0; i < kept.size(); ++i) absl::c_copy(kept[i], values[i].begin());
  // Whatever came of it: else its name would be taken for a while, and a new start refused.
  const absl::Status left = (*reduction)->Leave();
  if (!report.ok()) return report.status();
  if (!left.ok()) return left;
  if (!report->skipped.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the parameters that rank 0 begins with are not finite, or out of range: %s",
        report->skipped.front().block));
  }
  absl::Status written;
  for (size_t i = 0; i < copies.size(); ++i) {
    written.Update(gpu->Write(parameters[i].values.data(), copies[i].data(),
                              copies[i].size() * sizeof(float), /*stream=*/nullptr));
  }
  return written;
}

}  // namespace signpost
