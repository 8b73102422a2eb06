#include "tests/simulation/packing.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/algorithm/container.h"

namespace signpost::simulation {
namespace {

using Bytes = std::vector<uint8_t>;

// As kernels/block.h and kernels/quantized.h specify them, said once more: the kernels' own are
// what is checked.
constexpr size_t kSumLanes = 128;
constexpr float kLeastMagnitude = 0x1p-100f;

template <class Value>
void Put(Value value, uint8_t* bytes, size_t i) {
  std::memcpy(bytes + sizeof value * i, &value, sizeof value);
}

// To the nearest number with so many bits behind the first one, ties to even.
float RoundTo(float number, int bits, int least_exponent) {
  if (number == 0) return number;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(number), least_exponent) - bits);
  return static_cast<float>(std::nearbyint(number / unit) * unit);
}

uint16_t Bfloat16Bits(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return bits >> 16;
}

uint16_t Float16Bits(float number) {
  const float magnitude = std::abs(number);
  const uint16_t sign = std::signbit(number) ? 0x8000 : 0;
  if (magnitude < 0x1p-14f) return sign | static_cast<uint16_t>(magnitude * 0x1p24f);
  const int exponent = std::ilogb(magnitude);
  return sign + (exponent + 14) * 1024 +
         static_cast<uint16_t>(std::ldexp(magnitude, 10 - exponent));
}

// Writes element i of a chunk, and returns what it has become.
float PutDense(Codec codec, float number, uint8_t* payload, size_t i) {
  if (codec == BFLOAT16) {
    number = RoundTo(number, 7, -126);
    Put(Bfloat16Bits(number), payload, i);
  } else if (codec == FLOAT16) {
    number = std::clamp(RoundTo(number, 10, -14), -65504.0f, 65504.0f);
    Put(Float16Bits(number), payload, i);
  } else {
    Put(number, payload, i);
  }
  return number;
}

// In the lanes of kernels/block.h.
float SumOfSquares(absl::Span<const float> numbers) {
  std::array<float, kSumLanes> lanes = {};
  for (size_t i = 0; i < numbers.size(); ++i) lanes[i % lanes.size()] += numbers[i] * numbers[i];
  for (size_t width = lanes.size() / 2; width > 0; width /= 2) {
    for (size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// Each returns a block's scale. `bits` are the block's own.
float PutSigns(float gamma, absl::Span<const float> u, uint8_t* bits, absl::Span<float> out) {
  const float scale = gamma * std::sqrt(SumOfSquares(u) / static_cast<float>(u.size()));
  for (size_t i = 0; i < u.size(); ++i) {
    bits[i / 8] |= std::signbit(u[i]) << (i % 8);
    out[i] = std::copysign(scale, u[i]);
  }
  return scale;
}

float PutCodes(Codec codec, absl::Span<const float> u, uint8_t* codes, absl::Span<float> out) {
  float largest = 0;
  for (const float number : u) largest = std::max(largest, std::abs(number));
  const float most = codec == INT8 ? 127 : 7;
  const bool is_zero = largest < kLeastMagnitude;
  const float scale = is_zero ? 0 : largest / most;
  const float inverse = is_zero ? 0 : most / largest;
  for (size_t i = 0; i < u.size(); ++i) {
    const int code = static_cast<int>(std::nearbyint(u[i] * inverse));
    if (codec == INT8) {
      codes[i] = code & 0xff;
    } else {
      codes[i / 2] |= (code & 0xf) << (i % 2 * 4);
    }
    out[i] = static_cast<float>(code) * scale;
  }
  return scale;
}

// As client/examples/topk.c, with kCodecOptions.
void PutLargest(absl::Span<const float> u, uint8_t* block, absl::Span<float> out) {
  std::vector<uint16_t> indices(u.size());
  std::iota(indices.begin(), indices.end(), 0);
  absl::c_stable_sort(indices,
                      [&](uint16_t a, uint16_t b) { return std::abs(u[a]) > std::abs(u[b]); });
  indices.resize((u.size() + 3) / 4);
  absl::c_sort(indices);
  absl::c_fill(out, 0);
  block[0] = 1;  // it is packed
  for (size_t i = 0; i < indices.size(); ++i) {
    Put(indices[i], block + 1, i);
    Put(u[indices[i]], block + 1 + sizeof(uint16_t) * indices.size(), i);
    out[indices[i]] = u[indices[i]];
  }
}

}  // namespace

Packed Pack(const Layout& layout, uint32_t c, Codec codec, absl::Span<const float> numbers) {
  const Chunk& chunk = layout.chunks()[c];
  Packed packed = {Bytes(layout.PayloadBytes(codec, c)), std::vector<float>(chunk.elements)};
  uint8_t* const payload = packed.payload.data();
  uint8_t* const behind_scales = payload + sizeof(float) * chunk.blocks;
  const size_t stride = packed.payload.size() / chunk.blocks;  // of the codec from outside
  ForEachBlock(chunk, layout.options().block_elements(), [&](const Segment& block) {
    const uint32_t begin = block.chunk_offset;
    const absl::Span<const float> u = numbers.subspan(begin, block.elements);
    const absl::Span<float> out = absl::MakeSpan(packed.numbers).subspan(begin, block.elements);
    if (!absl::c_all_of(u, [](float number) { return std::isfinite(number); })) return;
    if (codec == ONE_BIT) {
      Put(PutSigns(layout.options().gamma(), u, behind_scales + block.bits_offset, out), payload,
          block.first_block);
    } else if (codec == INT8 || codec == INT4) {
      const size_t bits = codec == INT8 ? 8 : 4;
      Put(PutCodes(codec, u, behind_scales + bits * block.bits_offset, out), payload,
          block.first_block);
    } else if (codec == CUSTOM) {
      PutLargest(u, payload + stride * block.first_block, out);
    } else {
      for (uint32_t i = 0; i < block.elements; ++i) {
        out[i] = PutDense(codec, u[i], payload, begin + i);
      }
    }
  });
  return packed;
}

}  // namespace signpost::simulation
