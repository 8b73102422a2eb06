#include "node/path_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace signpost::node {
namespace {

std::string NewPath(const char* name) { return absl::StrCat(::testing::TempDir(), "/", name); }

TEST(PathLock, IsRefusedUntilItsHolderHasGoneAndLeavesNothing) {
  const std::string path = NewPath("refused");
  auto holder = PathLock::Take(path);
  ASSERT_TRUE(holder.ok()) << holder.status();
  const absl::Status refused = PathLock::Take(path).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr(path + ".lock"));
  EXPECT_TRUE(PathLock::Take(NewPath("other")).ok());
  holder->reset();
  EXPECT_FALSE(std::filesystem::exists(path + ".lock"));
  EXPECT_TRUE(PathLock::Take(path).ok());
}

TEST(PathLock, CanBeNoneWhereThereIsNoDirectory) {
  EXPECT_EQ(PathLock::Take("/nowhere/path").status().code(), absl::StatusCode::kUnavailable);
}

TEST(PathLock, IsHeldByOneAtATimeWhileItsFileComesAndGoes) {
  constexpr int kTakes = 100;  // that succeed
  const std::string path = NewPath("held");
  std::atomic<int> holders = 0, takes = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      while (takes < kTakes) {
        const auto lock = PathLock::Take(path);
        if (!lock.ok()) continue;
        EXPECT_EQ(++holders, 1);
        ++takes;
        std::this_thread::yield();  // for others to come
        --holders;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace signpost::node
