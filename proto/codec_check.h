// Whether a codec from outside keeps what signpost_codec.h asks of it, as far as that can be tried.

#ifndef SIGNPOST_PROTO_CODEC_CHECK_H_
#define SIGNPOST_PROTO_CODEC_CHECK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace signpost {

struct CodecFinding {
  std::string what;     // "the same numbers give the same bytes"
  std::string trouble;  // where they do not; empty: nowhere
};

struct CodecReport {
  std::string name, version;
  double bits_per_parameter = 0;  // one way
  // The mean of ||error|| / ||values|| over the last quarter of 2000 rounds of normal numbers with
  // a fixed mean: what error feedback leaves waiting.
  double error_ratio = 0;
  std::vector<CodecFinding> findings;  // all that was tried

  bool is_good() const;
};

struct CodecTrials {
  uint32_t block_elements = 4096;  // as a job's
  uint32_t seed = 1;
};

// Loads the shared object, and tries it with numbers that follow from the seed. Memory that a codec
// must not touch is the process's own, so one that does may end it. Errors as LoadCodecLibrary and
// OpenCodec.
absl::StatusOr<CodecReport> CheckCodecLibrary(const std::string& path, const std::string& options,
                                              const CodecTrials& trials = {});

}  // namespace signpost

#endif  // SIGNPOST_PROTO_CODEC_CHECK_H_
