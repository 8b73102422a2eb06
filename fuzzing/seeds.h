// What a fuzz target defines beside LLVMFuzzerTestOneInput.

#ifndef SIGNPOST_FUZZING_SEEDS_H_
#define SIGNPOST_FUZZING_SEEDS_H_

#include <string>
#include <vector>

namespace signpost::fuzzing {

// Good inputs, made anew: libFuzzer begins with them, and the target's test changes them.
std::vector<std::string> Seeds();

}  // namespace signpost::fuzzing

#endif  // SIGNPOST_FUZZING_SEEDS_H_
