#include "bench/leftovers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "absl/strings/str_cat.h"

namespace signpost::bench {
namespace {

TEST(Leftovers, AreThoseOfProcessesThatAreGone) {
  const pid_t gone = fork();
  if (gone == 0) _exit(0);
  waitpid(gone, nullptr, 0);
  const std::string directory = ::testing::TempDir() + "/leftovers";
  std::filesystem::remove_all(directory);
  const std::string left = absl::StrCat(directory, "/", NamePrefix(gone), "-switch");
  for (const std::string& path : {
           left,
           absl::StrCat(directory, "/", NamePrefix(), "-0"),
           absl::StrCat(directory, "/", NamePrefix(getppid()), "-0"),
           absl::StrCat(directory, "/", NamePrefix(gone)),
           absl::StrCat(directory, "/", NamePrefix(gone), "x-0"),
           absl::StrCat(directory, "/signpost-bench-1-", gone, "-0"),  // of another namespace
           absl::StrCat(directory, "/signpost-run-", gone, "-0"),
       }) {
    std::filesystem::create_directories(path);
  }
  EXPECT_THAT(LeftIn(directory), ::testing::ElementsAre(left));
  EXPECT_THAT(LeftIn(directory + "/none"), ::testing::IsEmpty());
}

}  // namespace
}  // namespace signpost::bench
