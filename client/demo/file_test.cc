#include "client/demo/file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace signpost::demo {
namespace {

using ::testing::HasSubstr;

TEST(File, HoldsWhatWasWritten) {
  const std::string path = testing::TempDir() + "/whole";
  const std::string bytes("a\0b\r\n\xff", 6);
  ASSERT_TRUE(WriteFile(path, "something longer that is replaced").ok());
  ASSERT_TRUE(WriteFile(path, bytes).ok());
  EXPECT_EQ(ReadFile(path).value(), bytes);
}

TEST(File, IsNamedWhenItIsMissing) {
  const absl::Status status = ReadFile("/nowhere/at.all").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("'/nowhere/at.all'"));
}

TEST(File, IsNamedWhenItIsADirectory) {
  const absl::Status status = ReadFile(testing::TempDir()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("is a directory"));
}

TEST(File, IsNamedWhenItCannotBeWritten) {
  const absl::Status status = WriteFile("/nowhere/at.all", "x");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("'/nowhere/at.all'"));
}

}  // namespace
}  // namespace signpost::demo
