#include "client/demo/report.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "client/demo/file.h"
#include "client/demo/loss_chart.h"

namespace signpost::demo {
namespace {

absl::StatusOr<RunResults> ReadRun(const std::vector<std::string>& files) {
  RunResults run;
  for (const std::string& file : files) {
    absl::StatusOr<WorkerResult> result = ReadResult(file);
    if (!result.ok()) return result.status();
    run.push_back(*std::move(result));
  }
  return run;
}

absl::Status WriteUnlessUnwanted(const std::string& path, absl::string_view contents) {
  return path.empty() ? absl::OkStatus() : WriteFile(path, contents);
}

std::string Row(absl::string_view name, absl::string_view adam, absl::string_view onebit) {
  return absl::StrFormat("%-34s%18s%18s\n", name, adam, onebit);
}

std::string FormatBytes(uint64_t bytes) {
  const double megabytes = static_cast<double>(bytes) * 1e-6;
  return megabytes < 1000 ? absl::StrFormat("%.1f MB", megabytes)
                          : absl::StrFormat("%.2f GB", megabytes * 1e-3);
}

std::string FormatReplicas(const RunResults& run) {
  return ReplicasIdentical(run) ? absl::StrFormat("yes, %08x", run[0].parameters_crc32c) : "NO";
}

std::string FormatLoss(double loss) {
  return std::isfinite(loss) ? absl::StrFormat("%.4f", loss) : "diverged";
}

// Of 1-bit Adam against Adam; and what to do where there is nothing to compare.
std::string FormatGap(double adam, double onebit) {
  const double gap = 100 * (onebit / adam - 1);
  return std::isfinite(gap) ? absl::StrFormat("%+.2f%%", gap) : "-";
}
std::string AdviceFor(const WorkerResult& onebit) {
  if (std::isfinite(onebit.validation)) return "";
  return "\n1-bit Adam has diverged. Take a lower --learning-rate, or more --steps.\n";
}

std::string FormatRatio(double ratio) { return absl::StrFormat("%.1fx", ratio); }

std::string FormatBitsPerParameter(const WireBytes& bytes, uint64_t parameters, uint64_t steps) {
  return absl::StrFormat("%.3f / %.3f", BitsPerParameter(bytes.sent, parameters, steps),
                         BitsPerParameter(bytes.received, parameters, steps));
}

std::string Number(double value) {
  return std::isfinite(value) ? absl::StrFormat("%.8g", value) : "null";
}

void AppendCurve(absl::string_view optimizer, const RunResults& run, std::string& csv) {
  for (const CurvePoint& point : run[0].curve) {
    absl::StrAppendFormat(&csv, "%s,%d,%.6f,%.6f\n", optimizer, point.step, point.training_bpb,
                          point.validation_bpb);
  }
}

}  // namespace

absl::StatusOr<std::string> Report(const RunFiles& runs, const ReportFiles& files) {
  absl::StatusOr<RunResults> adam = ReadRun(runs.adam);
  if (!adam.ok()) return adam.status();
  absl::StatusOr<RunResults> onebit = ReadRun(runs.onebit);
  if (!onebit.ok()) return onebit.status();
  const Comparison comparison = {*std::move(adam), *std::move(onebit)};
  absl::Status status = CheckComparison(comparison);
  if (!status.ok()) return status;
  status.Update(WriteUnlessUnwanted(files.svg, FormatLossChart(comparison)));
  status.Update(WriteUnlessUnwanted(files.csv, FormatCsv(comparison)));
  status.Update(WriteUnlessUnwanted(files.json, FormatJson(comparison)));
  if (!status.ok()) return status;
  return FormatTable(comparison);
}

std::string FormatTable(const Comparison& comparison) {
  const WorkerResult& adam = comparison.adam[0];
  const WorkerResult& onebit = comparison.onebit[0];
  const WireBytes adam_bytes = MostBytes(comparison.adam);
  const WireBytes onebit_bytes = MostBytes(comparison.onebit);
  const WireBytes one_bit_steps = MostOneBitBytes(comparison.onebit);
  const uint64_t parameters = adam.parameters;
  return absl::StrCat(
      absl::StrFormat("%d parameters, %d workers; 1-bit Adam sends one bit in %d of %d steps\n\n",
                      parameters, adam.world_size, onebit.one_bit_steps, onebit.steps),
      Row("", "Adam", "1-bit Adam"),
      Row("sent per worker, whole run", FormatBytes(adam_bytes.sent),
          FormatBytes(onebit_bytes.sent)),
      Row("received per worker, whole run", FormatBytes(adam_bytes.received),
          FormatBytes(onebit_bytes.received)),
      Row("fewer bytes than fp32", FormatRatio(RatioToFp32(adam_bytes, parameters, adam.steps)),
          FormatRatio(RatioToFp32(onebit_bytes, parameters, onebit.steps))),
      Row("  in one-bit steps", "",
          FormatRatio(RatioToFp32(one_bit_steps, parameters, onebit.one_bit_steps))),
      Row("bits per parameter, up / down",
          FormatBitsPerParameter(adam_bytes, parameters, adam.steps),
          FormatBitsPerParameter(onebit_bytes, parameters, onebit.steps)),
      Row("  in one-bit steps", "",
          FormatBitsPerParameter(one_bit_steps, parameters, onebit.one_bit_steps)),
      Row("training loss, bits per byte", FormatLoss(adam.curve.back().training_bpb),
          FormatLoss(onebit.curve.back().training_bpb)),
      Row("validation loss, bits per byte", FormatLoss(adam.validation),
          FormatLoss(onebit.validation)),
      Row("  against Adam", "", FormatGap(adam.validation, onebit.validation)),
      Row("steps", absl::StrCat(adam.steps), absl::StrCat(onebit.steps)),
      Row("time", absl::StrFormat("%.0f s", adam.seconds),
          absl::StrFormat("%.0f s", onebit.seconds)),
      Row("replicas identical, CRC-32C", FormatReplicas(comparison.adam),
          FormatReplicas(comparison.onebit)),
      AdviceFor(onebit));
}

std::string FormatCsv(const Comparison& comparison) {
  std::string csv = "optimizer,step,training_bpb,validation_bpb\n";
  AppendCurve("adam", comparison.adam, csv);
  AppendCurve("onebit", comparison.onebit, csv);
  return csv;
}

std::string FormatJson(const Comparison& comparison) {
  const WorkerResult& adam = comparison.adam[0];
  const WorkerResult& onebit = comparison.onebit[0];
  const uint64_t parameters = onebit.parameters;
  const WireBytes all = MostBytes(comparison.onebit);
  const WireBytes rounds = MostOneBitBytes(comparison.onebit);
  const uint64_t one_bit_steps = onebit.one_bit_steps;
  const bool identical = ReplicasIdentical(comparison.adam) && ReplicasIdentical(comparison.onebit);
  return absl::StrCat(
      "{\n  \"val_bpb_adam\": ", Number(adam.validation),
      ",\n  \"val_bpb_onebit\": ", Number(onebit.validation), ",\n  \"wire_bits_per_param_up\": ",
      Number(BitsPerParameter(rounds.sent, parameters, one_bit_steps)),
      ",\n  \"wire_bits_per_param_down\": ",
      Number(BitsPerParameter(rounds.received, parameters, one_bit_steps)),
      ",\n  \"bytes_ratio_vs_fp32\": ", Number(RatioToFp32(all, parameters, onebit.steps)),
      ",\n  \"bytes_ratio_vs_fp32_one_bit_rounds\": ",
      Number(RatioToFp32(rounds, parameters, one_bit_steps)),
      ",\n  \"replicas_identical\": ", identical ? "true" : "false",
      ",\n  \"parameters\": ", parameters, ",\n  \"steps\": ", onebit.steps,
      ",\n  \"seconds\": ", Number(adam.seconds + onebit.seconds), "\n}\n");
}

}  // namespace signpost::demo
