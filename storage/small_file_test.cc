#include "storage/small_file.h"

#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost {
namespace {

using ::testing::HasSubstr;

class SmallFileTest : public ::testing::Test {
 protected:
  SmallFileTest() { EXPECT_NE(mkdtemp(directory_), nullptr); }
  ~SmallFileTest() override { std::filesystem::remove_all(directory_); }

  std::string PathOf(const std::string& name) const { return absl::StrCat(directory_, "/", name); }

  char directory_[32] = "/tmp/signpost-small-XXXXXX";
};

// As Kubernetes has secrets: a link to a file in a directory that is a link too.
TEST_F(SmallFileTest, IsReadAsAWholeBehindLinksToo) {
  const std::string text(100'000, 'x');
  std::filesystem::create_directory(PathOf("..version"));
  std::ofstream(PathOf("..version/token")) << text;
  std::filesystem::create_symlink("..version", PathOf("..data"));
  std::filesystem::create_symlink("..data/token", PathOf("token"));
  EXPECT_EQ(*ReadSmallFile(PathOf("token")), text);
}

TEST_F(SmallFileTest, IsRefusedWhereItIsNone) {
  ASSERT_EQ(mkfifo(PathOf("pipe").c_str(), S_IRUSR | S_IWUSR), 0);
  for (const std::string& path : {PathOf("pipe"), std::string(directory_)}) {
    const absl::Status status = ReadSmallFile(path).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr(absl::StrCat(path, ": it is no regular file")));
  }
}

TEST_F(SmallFileTest, IsRefusedWhereItIsNotThereOrNotSmall) {
  EXPECT_TRUE(absl::IsNotFound(ReadSmallFile(PathOf("token")).status()));
  std::ofstream(PathOf("token")) << std::string((1 << 20) + 1, 'x');
  EXPECT_TRUE(absl::IsInvalidArgument(ReadSmallFile(PathOf("token")).status()));
}

}  // namespace
}  // namespace signpost
