#include "storage/disk.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "absl/strings/str_cat.h"

namespace signpost {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class DirectoryTest : public ::testing::Test {
 protected:
  DirectoryTest() : path_(absl::StrCat(::testing::TempDir(), "/a/b")) {
    std::filesystem::remove_all(path_);
    EXPECT_TRUE(MakeDirectory(path_).ok());
    disk_ = OpenDirectory(path_);
  }

  const std::string path_;
  std::unique_ptr<Disk> disk_;
};

TEST_F(DirectoryTest, SubdirectoriesComeWithTheirFirstFileAndGoWithTheirLast) {
  ASSERT_TRUE(Replace(*disk_, "top", {"1"}).ok());
  ASSERT_TRUE(Replace(*disk_, "sub/first", {"2", "3"}).ok());
  ASSERT_TRUE(Replace(*disk_, "sub/second", {"4"}).ok());
  EXPECT_THAT(*disk_->List(), ElementsAre("sub/first", "sub/second", "top"));
  EXPECT_EQ(*disk_->Read("sub/first"), "23");
  ASSERT_TRUE(disk_->Remove("sub/first").ok());
  EXPECT_TRUE(std::filesystem::exists(path_ + "/sub"));
  ASSERT_TRUE(disk_->Remove("sub/second").ok());
  EXPECT_FALSE(std::filesystem::exists(path_ + "/sub"));
  EXPECT_TRUE(disk_->SyncDirectory().ok());
  EXPECT_THAT(*disk_->List(), ElementsAre("top"));
}

TEST_F(DirectoryTest, WhatIsNotThereIsNotFoundAndNamed) {
  const absl::Status status = disk_->Read("sub/none").status();
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(path_ + "/sub/none"));
  EXPECT_TRUE(absl::IsNotFound(disk_->Remove("sub/none")));
  EXPECT_TRUE(absl::IsNotFound(OpenDirectory(path_ + "/none")->List().status()));
  EXPECT_THAT(*disk_->List(), IsEmpty());
}

}  // namespace
}  // namespace signpost
