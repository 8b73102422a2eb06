#include "client/demo/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/demo/file.h"

namespace signpost::demo {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// An empty directory of this test's own.
std::string TestDirectory() {
  const std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
  const std::filesystem::path path = std::filesystem::path(testing::TempDir()) / name;
  std::filesystem::remove_all(path);
  std::filesystem::create_directory(path);
  return path.string();
}

std::string MakeFile(const std::string& path, const std::string& contents) {
  EXPECT_TRUE(WriteFile(path, contents).ok());
  return path;
}

std::string AsString(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

TEST(TextFiles, AreSortedAndWithoutLinksAndDirectoriesAndShortFiles) {
  const std::string directory = TestDirectory();
  const std::string text(kMinFileBytes, 'a');
  const std::string b = MakeFile(directory + "/b", text);
  const std::string a = MakeFile(directory + "/a", text);
  MakeFile(directory + "/short", text.substr(1));
  std::filesystem::create_symlink(b, directory + "/link");
  std::filesystem::create_directory(directory + "/directory");
  EXPECT_THAT(TextFiles(directory).value(), ElementsAre(a, b));
}

TEST(TextFiles, AskForATextWhenThereIsNone) {
  const std::string directory = TestDirectory();
  for (const std::string& path : {directory, directory + "/missing"}) {
    const absl::Status status = TextFiles(path).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(status.message(), HasSubstr("'" + path + "'"));
    EXPECT_THAT(status.message(), HasSubstr("--text"));
  }
}

TEST(TextFiles, HaveTheLicencesByDefault) {
  EXPECT_THAT(DefaultTextFiles().value(), Contains("/usr/share/common-licenses/GPL-3"));
}

TEST(LoadText, HoldsOutTheLastTenthOfEachFile) {
  const std::string directory = TestDirectory();
  const std::string first =
      MakeFile(directory + "/first", std::string(1800, 'a') + std::string(200, 'b'));
  const std::string second =
      MakeFile(directory + "/second", std::string(909, 'c') + std::string(100, 'd'));
  const Text text = LoadText({first, second}).value();
  EXPECT_EQ(AsString(text.training), std::string(1800, 'a') + std::string(909, 'c'));
  EXPECT_EQ(AsString(text.validation), std::string(200, 'b') + std::string(100, 'd'));
}

TEST(LoadText, NamesAFileThatIsMissing) {
  const absl::Status status = LoadText({"/nowhere/at.all"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("'/nowhere/at.all'"));
}

TEST(LoadText, NamesAFileThatIsTooShort) {
  const std::string path =
      MakeFile(TestDirectory() + "/short", std::string(kMinFileBytes - 1, 'a'));
  const absl::Status status = LoadText({path}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("'" + path + "' has 999 bytes, wanted at least 1000"));
}

TEST(LoadText, RefusesNoFiles) {
  EXPECT_EQ(LoadText({}).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace signpost::demo
