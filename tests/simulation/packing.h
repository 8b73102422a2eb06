// What each codec makes of a chunk, once more: a number at a time, in fp32, and every bit of it.
// What kernels share with one another is not shared with this.

#ifndef SIGNPOST_TESTS_SIMULATION_PACKING_H_
#define SIGNPOST_TESTS_SIMULATION_PACKING_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "proto/aggregator.pb.h"
#include "proto/layout.h"

namespace signpost::simulation {

// Of jobs with a codec from outside, which sends the largest numbers of each block.
inline constexpr char kCodecLibrary[] = "client/examples/libtopk.so";
inline constexpr char kCodecOptions[] = "ratio=0.25";

struct Packed {
  std::vector<uint8_t> payload;
  std::vector<float> numbers;  // that it stands for
};

// Blocks that have a number which no codec packs are zeros, as is what they stand for.
Packed Pack(const Layout& layout, uint32_t chunk, Codec codec, absl::Span<const float> numbers);

}  // namespace signpost::simulation

#endif  // SIGNPOST_TESTS_SIMULATION_PACKING_H_
