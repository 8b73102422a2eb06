#include "security/token_verifier.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "security/test_issuer.h"

namespace signpost {
namespace {

using ::signpost::testing::JwksOf;
using ::signpost::testing::TestIssuer;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const absl::Time kNow = absl::FromUnixSeconds(1'700'000'000);

std::string Claims(int number = 0, absl::Time expires = kNow + absl::Hours(1)) {
  return absl::StrCat(R"({"iss":"iss","aud":"aud","sub":"system:serviceaccount:a:b","jti":")",
                      number, R"(","exp":)", absl::ToUnixSeconds(expires), "}");
}

class TokenVerifierTest : public ::testing::Test {
 protected:
  TokenVerifierTest() {
    EXPECT_NE(mkdtemp(directory_), nullptr);
    Write(JwksOf({first_.jwk()}));
    verifier_ =
        *TokenVerifier::Open({Path(), {"iss", "aud", {"system:serviceaccount:a:b"}}},
                             [this](const std::string& line) { warnings_.push_back(line); });
  }
  ~TokenVerifierTest() override { std::filesystem::remove_all(directory_); }

  std::string Path() const { return absl::StrCat(directory_, "/jwks"); }
  void Write(const std::string& jwks) { std::ofstream(Path()) << jwks; }

  char directory_[32] = "/tmp/signpost-jwks-XXXXXX";
  const TestIssuer first_{"first", "ES256"}, second_{"second", "ES256"};
  std::vector<std::string> warnings_;
  std::unique_ptr<TokenVerifier> verifier_;
};

TEST_F(TokenVerifierTest, RemembersGoodTokensOnly) {
  const std::string good = first_.Issue(Claims());
  EXPECT_TRUE(verifier_->Check(good, kNow).ok());
  EXPECT_TRUE(verifier_->Check(good, kNow).ok());
  EXPECT_EQ(verifier_->remembered(), 1);
  EXPECT_TRUE(absl::IsUnauthenticated(verifier_->Check(good + "A", kNow)));
  EXPECT_TRUE(absl::IsUnauthenticated(verifier_->Check("", kNow)));
  EXPECT_EQ(verifier_->remembered(), 1);
}

TEST_F(TokenVerifierTest, WhatItRemembersExpires) {
  const std::string token = first_.Issue(Claims());
  EXPECT_TRUE(verifier_->Check(token, kNow).ok());
  const absl::Status status = verifier_->Check(token, kNow + absl::Hours(2));
  EXPECT_TRUE(absl::IsUnauthenticated(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("it was valid until"));
}

TEST_F(TokenVerifierTest, RemembersNoMoreThanItsLimit) {
  for (int i = 0; i < 4100; ++i) {
    ASSERT_TRUE(verifier_->Check(first_.Issue(Claims(i)), kNow).ok());
    ASSERT_LE(verifier_->remembered(), 4096);
  }
  EXPECT_EQ(verifier_->remembered(), 4);
}

TEST_F(TokenVerifierTest, TakesNewKeysWithoutBeingTold) {
  EXPECT_TRUE(absl::IsUnauthenticated(verifier_->Check(second_.Issue(Claims()), kNow)));
  Write(JwksOf({first_.jwk(), second_.jwk()}));
  // It has just looked for that key.
  const absl::Status soon =
      verifier_->Check(second_.Issue(Claims()), kNow + absl::Milliseconds(99));
  EXPECT_TRUE(absl::IsUnauthenticated(soon)) << soon;
  EXPECT_THAT(soon.message(), HasSubstr("no key in the JWKS has its name, 'second'"));
  EXPECT_TRUE(verifier_->Check(second_.Issue(Claims()), kNow + absl::Milliseconds(100)).ok());
  EXPECT_TRUE(verifier_->Check(first_.Issue(Claims()), kNow + absl::Milliseconds(100)).ok());
}

// Its tokens that are remembered too.
TEST_F(TokenVerifierTest, AKeyThatIsTakenAwayVouchesForNobodyASecondLater) {
  const std::string token = first_.Issue(Claims());
  EXPECT_TRUE(verifier_->Check(token, kNow).ok());
  Write(JwksOf({second_.jwk()}));
  EXPECT_TRUE(verifier_->Check(token, kNow + absl::Milliseconds(999)).ok());
  EXPECT_TRUE(absl::IsUnauthenticated(verifier_->Check(token, kNow + absl::Seconds(1))));
  EXPECT_EQ(verifier_->remembered(), 0);
}

TEST_F(TokenVerifierTest, AKeyThatIsTakenAwayIsGoneWhateverIsWrongWithOthers) {
  const std::string token = first_.Issue(Claims());
  const std::string wrong = R"({"kty":"EC","crv":"P-256","kid":"short","x":"AA","y":"AA"})";
  Write(JwksOf({second_.jwk(), wrong}));
  EXPECT_TRUE(absl::IsUnauthenticated(verifier_->Check(token, kNow)));
  EXPECT_TRUE(verifier_->Check(second_.Issue(Claims()), kNow).ok());
  EXPECT_THAT(warnings_,
              ElementsAre(HasSubstr("the key 'short': its x or y is not 32 bytes in "
                                    "base64url; without it the set counts from now on")));
}

TEST_F(TokenVerifierTest, AnEmptySetIsOneOfNobody) {
  const std::string token = first_.Issue(Claims());
  EXPECT_TRUE(verifier_->Check(token, kNow).ok());
  Write(R"({"keys":[]})");
  for (int s = 1; s < 4; ++s) {
    EXPECT_TRUE(absl::IsUnauthenticated(verifier_->Check(token, kNow + absl::Seconds(s))));
  }
  EXPECT_THAT(warnings_, ElementsAre(HasSubstr("it has no key with a name")));
}

TEST_F(TokenVerifierTest, AClockThatIsSetBackStopsNoLook) {
  EXPECT_TRUE(verifier_->Check(first_.Issue(Claims()), kNow).ok());
  Write(JwksOf({second_.jwk()}));
  EXPECT_TRUE(verifier_->Check(second_.Issue(Claims()), kNow - absl::Hours(1)).ok());
}

TEST_F(TokenVerifierTest, AFileThatIsNoneChangesNothingAndIsWarnedOfOnce) {
  const std::string token = first_.Issue(Claims());
  Write(R"({"keys":[)");
  for (int s = 0; s < 3; ++s) EXPECT_TRUE(verifier_->Check(token, kNow + absl::Seconds(s)).ok());
  EXPECT_THAT(warnings_, ElementsAre(HasSubstr("stay in use")));
  EXPECT_THAT(warnings_[0], HasSubstr(Path()));
  std::filesystem::remove(Path());
  for (int s = 3; s < 6; ++s) EXPECT_TRUE(verifier_->Check(token, kNow + absl::Seconds(s)).ok());
  EXPECT_THAT(warnings_, ElementsAre(HasSubstr("no JSON Web Key Set"), HasSubstr("No such file")));
}

TEST_F(TokenVerifierTest, OpensWithKeysAndRulesOnly) {
  const TokenRules rules = {"iss", "aud", {"system:serviceaccount:a:b"}};
  const auto open = [](const TokenOptions& options) {
    return TokenVerifier::Open(options, [](const std::string&) {}).status();
  };
  EXPECT_TRUE(open({Path(), rules}).ok());
  EXPECT_TRUE(absl::IsNotFound(open({"/nowhere", rules})));
  EXPECT_TRUE(absl::IsInvalidArgument(open({Path(), {}})));
  Write("{}");
  EXPECT_THAT(open({Path(), rules}).message(), HasSubstr(Path()));
}

TEST(TokenOptions, AreAllOrNone) {
  EXPECT_TRUE(TokenOptions().Check().ok());
  EXPECT_FALSE(TokenOptions().wanted());
  EXPECT_TRUE(TokenOptions({"jwks", {"iss", "aud", {"system:serviceaccount:a:b"}}}).Check().ok());
  EXPECT_FALSE(TokenOptions({"jwks", {}}).Check().ok());
  EXPECT_THAT(TokenOptions({"", {.issuer = "iss"}}).Check().message(), HasSubstr("no JWKS file"));
}

}  // namespace
}  // namespace signpost
