#include "security/token_file.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const absl::Time kNow = absl::FromUnixSeconds(1'700'000'000);

class TokenFileTest : public ::testing::Test {
 protected:
  TokenFileTest() { EXPECT_NE(mkdtemp(directory_), nullptr); }
  ~TokenFileTest() override { std::filesystem::remove_all(directory_); }

  std::string Path() const { return absl::StrCat(directory_, "/token"); }
  void Write(const std::string& text) { std::ofstream(Path()) << text; }
  absl::StatusOr<std::shared_ptr<TokenFile>> Open() {
    return TokenFile::Open(Path(), [this](const std::string& line) { warnings_.push_back(line); });
  }

  char directory_[32] = "/tmp/signpost-token-XXXXXX";
  std::vector<std::string> warnings_;
};

TEST_F(TokenFileTest, IsReadAgainOnceASecond) {
  Write("a.b.c\n");
  const auto file = *Open();
  EXPECT_EQ(file->Token(kNow), "a.b.c");
  Write("d.e.f");
  EXPECT_EQ(file->Token(kNow + absl::Milliseconds(999)), "a.b.c");
  EXPECT_EQ(file->Token(kNow + absl::Seconds(1)), "d.e.f");
}

TEST_F(TokenFileTest, ThatIsGoneOrSpoiltKeepsItsTokenAndIsWarnedOfOnce) {
  Write("a.b.c");
  const auto file = *Open();
  Write("");
  EXPECT_EQ(file->Token(kNow), "a.b.c");
  EXPECT_EQ(file->Token(kNow + absl::Seconds(1)), "a.b.c");
  std::filesystem::remove(Path());
  EXPECT_EQ(file->Token(kNow + absl::Seconds(2)), "a.b.c");
  EXPECT_THAT(warnings_, ElementsAre(HasSubstr("it has no token"), HasSubstr("No such file")));
}

TEST_F(TokenFileTest, WithoutATokenIsRefused) {
  EXPECT_TRUE(absl::IsNotFound(Open().status()));
  for (const std::string& text : {std::string("\n"), std::string("a b"), std::string("a\r\nb: c"),
                                  std::string("a\0b", 3), std::string(8000, 'a')}) {
    Write(text);
    const absl::Status status = Open().status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << text;
    EXPECT_THAT(status.message(), HasSubstr(Path()));
  }
}

}  // namespace
}  // namespace signpost
