// Which windows of a text the model sees: drawn at random to train on, evenly spread to validate.

#ifndef SIGNPOST_CLIENT_DEMO_WINDOWS_H_
#define SIGNPOST_CLIENT_DEMO_WINDOWS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "client/demo/language_model.h"

namespace signpost::demo {

// Each worker of a job draws its own windows at each step.
struct BatchKey {
  uint64_t seed = 0;
  uint32_t rank = 0;
  uint64_t step = 0;
};

// `count` windows, each place of the text equally likely. The same key gives the same windows on
// every machine. The text has at least window_bytes.
Batch RandomWindows(absl::Span<const uint8_t> text, uint32_t window_bytes, uint32_t count,
                    const BatchKey& key);

// min(count, number of windows in the text) windows at equal distances. The text has at least
// window_bytes.
Batch SpreadWindows(absl::Span<const uint8_t> text, uint32_t window_bytes, uint32_t count);

}  // namespace signpost::demo

#endif  // SIGNPOST_CLIENT_DEMO_WINDOWS_H_
