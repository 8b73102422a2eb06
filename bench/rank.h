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

// That a payload has for each parameter.
double BitsPerParameter(Codec codec);

struct RankOptions {
  // What an exchange is.
  //   "frames"  transport and aggregation: frames that were packed before go out, the answers come
  //             in and are checked, and nothing is done with them; if CanPackFrames
  //   "mean"    gradients in, their mean out, in memory; errors are kept
  //   "step"    a whole step of 1-bit Adam in its one-bit stage, or of Adam with another codec
  //   "tcp"     as many bytes as payloads have, over plain TCP: this rank plays all, and all servers
  std::string mode = "frames";
  Codec codec = ONE_BIT;
  uint64_t parameters = 25'000'000;
  uint32_t chunk_elements = 0;  // 0: SuitableChunkElements
};

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
