#include "client/demo/comparison.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace signpost::demo {
namespace {

absl::Status CheckRun(const char* name, const RunResults& run) {
  if (run.empty()) return absl::InvalidArgumentError(absl::StrFormat("%s: no results", name));
  for (uint32_t rank = 0; rank < run.size(); ++rank) {
    const WorkerResult& result = run[rank];
    if (result.rank != rank || result.world_size != run.size()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: result %d is of rank %d of %d, wanted rank %d of %d", name, rank,
                          result.rank, result.world_size, rank, run.size()));
    }
    if (result.parameters != run[0].parameters || result.steps != run[0].steps ||
        result.one_bit_steps != run[0].one_bit_steps) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: ranks 0 and %d trained different jobs", name, rank));
    }
  }
  if (run[0].curve.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: rank 0 has no loss curve", name));
  }
  return absl::OkStatus();
}

WireBytes Most(const RunResults& run, WireBytes WorkerResult::*bytes) {
  WireBytes most;
  for (const WorkerResult& result : run) {
    most.sent = std::max(most.sent, (result.*bytes).sent);
    most.received = std::max(most.received, (result.*bytes).received);
  }
  return most;
}

}  // namespace

absl::Status CheckComparison(const Comparison& comparison) {
  absl::Status status = CheckRun("Adam", comparison.adam);
  status.Update(CheckRun("1-bit Adam", comparison.onebit));
  if (!status.ok()) return status;
  const WorkerResult& adam = comparison.adam[0];
  const WorkerResult& onebit = comparison.onebit[0];
  if (adam.parameters != onebit.parameters || adam.steps != onebit.steps ||
      adam.world_size != onebit.world_size) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "Adam ran %d steps of %d parameters on %d workers, 1-bit Adam %d of %d on %d", adam.steps,
        adam.parameters, adam.world_size, onebit.steps, onebit.parameters, onebit.world_size));
  }
  if (adam.one_bit_steps != 0 || onebit.one_bit_steps == 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("wanted one-bit steps with 1-bit Adam only; it had %d, and Adam %d",
                        onebit.one_bit_steps, adam.one_bit_steps));
  }
  return absl::OkStatus();
}

WireBytes MostBytes(const RunResults& run) { return Most(run, &WorkerResult::wire); }

WireBytes MostOneBitBytes(const RunResults& run) { return Most(run, &WorkerResult::one_bit_wire); }

double RatioToFp32(const WireBytes& bytes, uint64_t parameters, uint64_t steps) {
  return 64 / BitsPerParameter(bytes.sent + bytes.received, parameters, steps);
}

double BitsPerParameter(uint64_t bytes, uint64_t parameters, uint64_t steps) {
  return 8.0 * static_cast<double>(bytes) /
         (static_cast<double>(parameters) * static_cast<double>(steps));
}

bool ReplicasIdentical(const RunResults& run) {
  return std::all_of(run.begin(), run.end(), [&](const WorkerResult& result) {
    return result.parameters_crc32c == run[0].parameters_crc32c;
  });
}

}  // namespace signpost::demo
