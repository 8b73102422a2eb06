// Writes the target's seeds into the first directory that libFuzzer is given, before it reads it.

#include <filesystem>
#include <fstream>
#include <string>

#include "fuzzing/seeds.h"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  for (int i = 1; i < *argc; ++i) {
    const std::filesystem::path path((*argv)[i]);
    if (!std::filesystem::is_directory(path)) continue;
    int number = 0;
    for (const std::string& seed : signpost::fuzzing::Seeds()) {
      std::ofstream(path / ("seed-" + std::to_string(number++)), std::ios::binary) << seed;
    }
    break;
  }
  return 0;
}
