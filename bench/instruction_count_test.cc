// Holds how many instructions the kernels take, which no other load of the machine changes.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/target.h"

namespace signpost::bench {
namespace {

constexpr char kRecord[] = "bench/instruction_counts.txt";
constexpr char kCompiler[] = "g++ " __VERSION__;
constexpr size_t kElements = 64 << 10;
constexpr double kTolerance = 0.03;

// Instructions per 32 elements, by kernel.
using Counts = std::map<std::string, double>;

struct Record {
  std::string compiler;
  Counts counts;
};

// A line of comment, the compiler, and a count and a name per line.
Record ReadRecord() {
  std::ifstream file(kRecord);
  Record record;
  std::string name;
  std::getline(file, name);
  std::getline(file, record.compiler);
  for (double count; file >> count && std::getline(file >> std::ws, name);) {
    record.counts[name] = count;
  }
  return record;
}

void WriteRecord(const Counts& counts, const std::string& path) {
  std::ofstream file(path);
  file << "Instructions per 32 elements on AVX2, by instruction_count_test, compiled with\n"
       << kCompiler << "\n";
  for (const auto& [name, count] : counts) file << absl::StrFormat("%8.2f  %s\n", count, name);
  ASSERT_TRUE(file.flush()) << "cannot write " << path;
}

// The instructions in a file of callgrind's.
double ReadTotal(const std::string& path) {
  std::ifstream file(path);
  for (std::string word; file >> word;) {
    if (double total; word == "totals:" && file >> total) return total;
  }
  ADD_FAILURE() << "no totals in " << path;
  return 0;
}

// Callgrind writes a file for each call of CountedRun.
Counts CountInstructions() {
  const std::string prefix = testing::TempDir() + "/callgrind.out", names = prefix + ".names";
  const std::string command = absl::StrCat(
      "valgrind --quiet --tool=callgrind --toggle-collect=CountedRun --dump-after=CountedRun ",
      "--callgrind-out-file='", prefix, "' bench/counted_kernels ", kElements, " >'", names, "'");
  Counts counts;
  if (std::system(command.c_str()) != 0) {
    ADD_FAILURE() << "failed: " << command;
    return counts;
  }
  std::ifstream file(names);
  int call = 0;
  for (std::string name; std::getline(file, name);) {
    counts[name] = ReadTotal(absl::StrCat(prefix, ".", ++call)) / (kElements / 32);
  }
  return counts;
}

bool IsSet(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr && *value != '\0';
}

TEST(InstructionCount, OfEachKernelIsWhatIsRecorded) {
  if (std::system("valgrind --version >/dev/null 2>&1") != 0) {
    ASSERT_FALSE(IsSet("CI")) << "no valgrind, without which nothing notices slower kernels";
    GTEST_SKIP() << "no valgrind";
  }
  const auto targets = kernels::SupportedTargets();
  if (std::find(targets.begin(), targets.end(), kernels::Target::kAvx2) == targets.end()) {
    ASSERT_FALSE(IsSet("CI")) << "this processor has no AVX2, for which counts are recorded";
    GTEST_SKIP() << "this processor has no AVX2";
  }
  const Counts counts = CountInstructions();
  if (IsSet("RECORD")) {
    const char* const workspace = std::getenv("BUILD_WORKSPACE_DIRECTORY");
    ASSERT_NE(workspace, nullptr) << "RECORD=1 is for `bazel run`";
    return WriteRecord(counts, absl::StrCat(workspace, "/", kRecord));
  }
  const Record record = ReadRecord();
  if (record.compiler != kCompiler) {
    ASSERT_FALSE(IsSet("CI")) << "recorded with " << record.compiler << ", compiled with "
                              << kCompiler << ": RECORD=1 bazel run //bench:instruction_count_test";
    GTEST_SKIP() << "recorded with " << record.compiler << ", compiled with " << kCompiler;
  }
  EXPECT_EQ(counts.size(), record.counts.size());
  for (const auto& [name, count] : counts) {
    const auto recorded = record.counts.find(name);
    const double wanted = recorded == record.counts.end() ? 0 : recorded->second;
    EXPECT_NEAR(count, wanted, kTolerance * wanted)
        << name << ". If the change is meant: RECORD=1 bazel run //bench:instruction_count_test";
  }
}

}  // namespace
}  // namespace signpost::bench
