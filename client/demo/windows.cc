#include "client/demo/windows.h"

#include <algorithm>
#include <random>

namespace signpost::demo {
namespace {

// The finaliser of SplitMix64: neighbouring inputs give unrelated outputs.
uint64_t Scramble(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t Seed(const BatchKey& key) {
  return Scramble(Scramble(Scramble(key.seed) + key.rank) + key.step);
}

uint64_t Places(absl::Span<const uint8_t> text, uint32_t window_bytes) {
  return text.size() - window_bytes + 1;
}

}  // namespace

Batch RandomWindows(absl::Span<const uint8_t> text, uint32_t window_bytes, uint32_t count,
                    const BatchKey& key) {
  std::mt19937_64 random(Seed(key));
  const uint64_t places = Places(text, window_bytes);
  Batch batch(count);
  for (const uint8_t*& window : batch) window = &text[random() % places];
  return batch;
}

Batch SpreadWindows(absl::Span<const uint8_t> text, uint32_t window_bytes, uint32_t count) {
  const uint64_t places = Places(text, window_bytes);
  Batch batch(std::min<uint64_t>(count, places));
  for (uint64_t i = 0; i < batch.size(); ++i) batch[i] = &text[i * places / batch.size()];
  return batch;
}

}  // namespace signpost::demo
