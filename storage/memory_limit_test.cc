#include "storage/memory_limit.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"

namespace signpost {
namespace {

class MemoryLimitTest : public ::testing::Test {
 protected:
  MemoryLimitTest() {
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_ + "/a/b");
  }
  static void Write(const std::string& path, const std::string& text) {
    std::ofstream(path) << text << "\n";
  }
  uint64_t LimitIn(const std::string& own) {
    Write(root_ + "/own", own);
    return MemoryLimit({.own = root_ + "/own", .root = root_});
  }

  const std::string root_ = absl::StrCat(::testing::TempDir(), "/memory_limit");
  const uint64_t machine_ = MemoryLimit({.own = "", .root = root_ + "/nothing"});
};

TEST_F(MemoryLimitTest, IsTheLeastOfTheGroupAndThoseAboveIt) {
  Write(root_ + "/a/b/memory.max", "3000000");
  EXPECT_EQ(LimitIn("0::/a/b"), 3000000u);
  Write(root_ + "/a/memory.max", "2000000");
  EXPECT_EQ(LimitIn("0::/a/b"), 2000000u);
  Write(root_ + "/memory.max", "1000000");
  EXPECT_EQ(LimitIn("0::/a/b"), 1000000u);
}

TEST_F(MemoryLimitTest, IsTheMachinesWithoutGroups) {
  EXPECT_GT(machine_, 1u << 20);
  Write(root_ + "/a/memory.max", "max");
  EXPECT_EQ(LimitIn("0::/a"), machine_);
  EXPECT_EQ(LimitIn("12:memory:/a/b"), machine_);
}

// A container may not see the groups that it is told of.
TEST_F(MemoryLimitTest, IsThatOfTheRootWhereTheGroupIsNotSeen) {
  Write(root_ + "/memory.max", "1000000");
  EXPECT_EQ(LimitIn("0::/kubepods/pod7/container"), 1000000u);
  EXPECT_EQ(LimitIn("0::/"), 1000000u);
}

}  // namespace
}  // namespace signpost
