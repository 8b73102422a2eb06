// A fuzz target without libFuzzer: on its seeds, on each cut short, and on some thousand changes of
// them. It fails by a crash, as the target does.

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "fuzzing/seeds.h"
#include "gtest/gtest.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace signpost::fuzzing {
namespace {

constexpr int kChanges = 500;  // of each seed
constexpr size_t kCuts = 200;

void Try(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

class Mutator {
 public:
  std::string Change(std::string input) {
    for (uint32_t changes = 1 + Below(3); changes > 0; --changes) {
      const size_t place = Below(input.size() + 1);
      switch (Below(4)) {
        case 0:
          input.insert(place, 1, static_cast<char>(random_()));
          break;
        case 1:
          input.erase(place, 1 + Below(8));
          break;
        case 2:
          input.insert(place, input.substr(Below(input.size() + 1), Below(32)));
          break;
        default:
          if (place < input.size())
            input[place] = static_cast<char>(input[place] ^ (1 << Below(8)));
      }
    }
    return input;
  }

 private:
  size_t Below(size_t bound) { return random_() % bound; }

  std::mt19937 random_;  // the same each time
};

TEST(FuzzTarget, TakesItsSeedsAndWhatIsLikeThem) {
  const std::vector<std::string> seeds = Seeds();
  ASSERT_FALSE(seeds.empty());
  Mutator mutator;
  Try("");
  for (const std::string& seed : seeds) {
    Try(seed);
    for (size_t i = 0; i < kCuts; ++i) Try(seed.substr(0, seed.size() * i / kCuts));
    for (int i = 0; i < kChanges; ++i) Try(mutator.Change(seed));
  }
}

}  // namespace
}  // namespace signpost::fuzzing
