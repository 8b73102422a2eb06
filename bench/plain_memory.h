// A step's bytes through memory, and nothing else.

#ifndef SIGNPOST_BENCH_PLAIN_MEMORY_H_
#define SIGNPOST_BENCH_PLAIN_MEMORY_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "bench/rank.h"
#include "bench/traffic.h"

namespace signpost::bench {

// What the kernels of all workers and aggregators must read and write in a step, once each, in
// bytes; scales do not count. None for 0/1 Adam, whose steps differ, and for what is not a "step".
std::optional<double> StepBytes(const RankOptions& options, uint32_t workers);

// All workers and aggregators on one machine: all of its processors change as many bytes in place,
// each in memory of its own. Nothing is computed, and nothing sent.
class PlainMemory final : public Rank {
 public:
  // For all processors together, at most: what no cache holds.
  static constexpr double kRoom = 512 << 20;

  // `bytes` are read or written in an exchange: what is changed counts twice.
  PlainMemory(double bytes, uint32_t processors);

  absl::Status Exchange() override;
  absl::Status Leave() override { return absl::OkStatus(); }

  double bytes() const;  // of an exchange

 private:
  uint32_t runs_;               // of each processor in an exchange
  std::vector<Traffic> rooms_;  // by processor
};

}  // namespace signpost::bench

#endif  // SIGNPOST_BENCH_PLAIN_MEMORY_H_
