#include "bench/plain_memory.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <thread>

namespace signpost::bench {
namespace {

constexpr double kRead = sizeof(float), kChange = 2 * sizeof(float);

}  // namespace

std::optional<double> StepBytes(const RankOptions& options, uint32_t workers) {
  if (options.mode != "step" || StepsPerExchange(options) > 1) return std::nullopt;
  const bool is_one_bit = options.codec == ONE_BIT;
  const double payload = BitsPerParameter(options.codec) / 8;
  const double error = options.codec == FLOAT32 ? 0 : kChange;  // which loses nothing
  // As the streams in kernel_runs.cc. One bit is of the momentum, which is kept as it came.
  const double momentum = is_one_bit ? payload : 0;
  double worker = /*gradient=*/kRead + momentum + error + payload;
  if (options.optimizer == StepOptimizer::kLamb) {
    // What the ratios need, and behind them the parameters.
    worker += is_one_bit
                  ? payload + momentum + /*inverse=*/kRead + /*fresh variance=*/kChange + kRead
                  : payload + /*moments=*/2 * kChange + kRead;
    worker += (is_one_bit ? payload : /*momentum=*/kRead) + /*variance=*/kRead + kChange;
  } else {
    worker += is_one_bit ? payload + /*inverse=*/kRead + kChange
                         : payload + /*moments and parameters=*/3 * kChange;
  }
  const double aggregators = workers * payload + error + payload;
  return options.parameters * (workers * worker + aggregators);
}

PlainMemory::PlainMemory(double bytes, uint32_t processors) {
  runs_ = static_cast<uint32_t>(std::max(std::ceil(bytes / 2 / kRoom), 1.0));
  const auto elements = static_cast<size_t>(bytes / kChange / processors / runs_);
  for (uint32_t i = 0; i < processors; ++i) {
    rooms_.emplace_back(Streams{{Stream::Use::kChange, sizeof(float)}}, elements);
  }
}

absl::Status PlainMemory::Exchange() {
  std::vector<std::thread> processors;
  for (Traffic& room : rooms_) {
    processors.emplace_back([&room, runs = runs_] {
      for (uint32_t run = 0; run < runs; ++run) room.Run();
    });
  }
  for (std::thread& processor : processors) processor.join();
  return absl::OkStatus();
}

double PlainMemory::bytes() const {
  double bytes = 0;
  for (const Traffic& room : rooms_) bytes += 2.0 * runs_ * room.bytes();
  return bytes;
}

}  // namespace signpost::bench
