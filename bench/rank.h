// One rank of a group whose exchanges are timed, of Signpost's own.

#ifndef SIGNPOST_BENCH_RANK_H_
#define SIGNPOST_BENCH_RANK_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session_options.h"
#include "proto/aggregator.pb.h"

namespace signpost::bench {

// By the name that --codec takes.
const std::map<std::string, Codec>& Codecs();
std::string NameOfCodec(Codec codec);
// Of what "frames" has.
bool CanPackFrames(Codec codec);

// Of a payload.
double BitsPerParameter(Codec codec);

// Whose steps are taken: 1-bit Adam, or Adam; 1-bit LAMB, or LAMB; 0/1 Adam.
enum class StepOptimizer { kAdam, kLamb, kZeroOneAdam };
// By the name that --optimizer takes, which is the one in configurations.
const std::map<std::string, StepOptimizer>& StepOptimizers();
std::string NameOfOptimizer(StepOptimizer optimizer);

struct RankOptions {
  // What an exchange is.
  //   "frames"  transport and aggregation: frames that were packed before go out, the answers come
  //             in and are checked, and nothing is done with them; if CanPackFrames
  //   "mean"    gradients in, their mean out, in memory; errors are kept
  //   "step"    a whole step of `optimizer` in its one-bit stage, or with another codec in its
  //             dense one; of 0/1 Adam, in any codec, the steps from one synchronisation to the
  //             next
  //   "tcp"     as many bytes as payloads have, over plain TCP; one rank plays all of them
  //   "memory"  as many bytes as the kernels of a step go through, in memory; likewise
  std::string mode = "frames";
  StepOptimizer optimizer = StepOptimizer::kAdam;  // of "step"
  Codec codec = ONE_BIT;
  uint64_t parameters = 25'000'000;
  uint32_t chunk_elements = 0;  // 0: SuitableChunkElements
};

// 1, but with 0/1 Adam as many as there are from one synchronisation to the next at most.
uint32_t StepsPerExchange(const RankOptions& options);

// What takes exchanges, once it has joined its job. Not thread-safe.
class Rank {
 public:
  virtual ~Rank() = default;
  virtual absl::Status Prepare() { return absl::OkStatus(); }  // not timed
  virtual absl::Status Exchange() = 0;
  virtual absl::Status Leave() = 0;
};

// Joins, and blocks until all ranks have. INVALID_ARGUMENT names the option that is wrong;
// otherwise errors as Session::Join.
absl::StatusOr<std::unique_ptr<Rank>> JoinAsRank(SessionOptions session,
                                                 const RankOptions& options);

// Prints "ready", and then for each line of standard input, a number of exchanges, a line with how
// many seconds each of them took; leaves at the end of the input.
absl::Status ServeLines(Rank& rank);

}  // namespace signpost::bench

#endif  // SIGNPOST_BENCH_RANK_H_
