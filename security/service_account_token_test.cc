#include "security/service_account_token.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "security/test_issuer.h"

namespace signpost {
namespace {

using ::signpost::testing::JoinToken;
using ::signpost::testing::JwksOf;
using ::signpost::testing::TestIssuer;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

const absl::Time kNow = absl::FromUnixSeconds(1'700'000'000);

// As Kubernetes writes it.
constexpr char kClaims[] =
    R"({"aud":["other","signpost"],"exp":1700003600,"iat":1699999999,)"
    R"("iss":"https://kubernetes.default.svc","jti":"3f1b","kubernetes.io":{"namespace":"training",)"
    R"("serviceaccount":{"name":"worker","uid":"a"}},"nbf":1699999999,)"
    R"("sub":"system:serviceaccount:training:worker"})";

// kClaims with that in place of this.
std::string Claims(const std::string& text, const std::string& instead) {
  const std::string claims = absl::StrReplaceAll(kClaims, {{text, instead}});
  EXPECT_NE(claims, kClaims) << text;
  return claims;
}

std::string Hmac(const std::string& key, const std::string& bytes) {
  unsigned char code[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
       reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), code, &size);
  return std::string(reinterpret_cast<const char*>(code), size);
}

class ServiceAccountTokenTest : public ::testing::Test {
 protected:
  static const TestIssuer& Rsa() {
    static const TestIssuer* const issuer = new TestIssuer("rsa", "RS256");
    return *issuer;
  }
  static const TestIssuer& Ec() {
    static const TestIssuer* const issuer = new TestIssuer("ec", "ES256");
    return *issuer;
  }

  absl::Status Check(const std::string& token, absl::Time now = kNow) {
    return CheckToken(token, keys_, rules_, now).status();
  }

  const TokenKeys keys_ = *TokenKeys::Parse(JwksOf({Rsa().jwk(), Ec().jwk()}));
  const TokenRules rules_ = {
      "https://kubernetes.default.svc",
      "signpost",
      {"system:serviceaccount:training:launcher", "system:serviceaccount:training:worker"}};
};

TEST_F(ServiceAccountTokenTest, OfEitherKeyIsGoodUntilItExpires) {
  for (const TestIssuer* issuer : {&Rsa(), &Ec()}) {
    const auto validity = CheckToken(issuer->Issue(kClaims), keys_, rules_, kNow);
    ASSERT_TRUE(validity.ok()) << validity.status();
    EXPECT_EQ(validity->from, kNow - absl::Seconds(1) - kTokenClockSkew);
    EXPECT_EQ(validity->until, kNow + absl::Hours(1) + kTokenClockSkew);
  }
}

TEST_F(ServiceAccountTokenTest, ForOneAudienceIsGood) {
  EXPECT_TRUE(Check(Ec().Issue(Claims(R"(["other","signpost"])", R"("signpost")"))).ok());
}

TEST_F(ServiceAccountTokenTest, NeedNotSayFromWhenOnItIsValid) {
  EXPECT_TRUE(Check(Ec().Issue(Claims(R"("nbf":1699999999,)", ""))).ok());
}

TEST_F(ServiceAccountTokenTest, IsValidForItsTimeOnlyAndALittle) {
  const std::string token = Ec().Issue(kClaims);
  const absl::Time from = absl::FromUnixSeconds(1'699'999'999) - kTokenClockSkew;
  const absl::Time until = absl::FromUnixSeconds(1'700'003'600) + kTokenClockSkew;
  EXPECT_THAT(Check(token, from - absl::Seconds(1)).message(), HasSubstr("it is valid from 2023"));
  EXPECT_TRUE(Check(token, from).ok());
  EXPECT_TRUE(Check(token, until - absl::Seconds(1)).ok());
  EXPECT_THAT(Check(token, until).message(), HasSubstr("it was valid until 2023"));
}

TEST_F(ServiceAccountTokenTest, IsRefusedForEachClaimThatIsWrong) {
  struct Case {
    std::string claims, why;
  };
  const std::string issuer = R"("iss":"https://kubernetes.default.svc")";
  const std::string audience = R"(["other","signpost"])";
  const std::string subject = R"("sub":"system:serviceaccount:training:worker")";
  const std::string expires = R"("exp":1700003600)";
  const std::string begins = R"("nbf":1699999999)";
  const std::vector<Case> cases = {
      {Claims(issuer, R"("iss":"https://kubernetes.default.svc/")"), "its issuer is"},
      {Claims(issuer, R"("iss":7)"), "its issuer is"},
      {Claims(issuer, R"("issuer":"https://kubernetes.default.svc")"), "its issuer is"},
      {Claims(audience, R"(["other"])"), "another audience than signpost"},
      {Claims(audience, "[]"), "another audience"},
      {Claims(audience, R"("signpost2")"), "another audience"},
      {Claims(audience, R"({"signpost":"signpost"})"), "another audience"},
      {Claims(audience, R"([["signpost"]])"), "another audience"},
      {Claims(audience, "null"), "another audience"},
      {Claims(subject, R"("sub":"system:serviceaccount:training:default")"), "its subject is"},
      {Claims(subject, R"("sub":"system:serviceaccount:other:worker")"), "its subject is"},
      {Claims(subject, R"("sub":["system:serviceaccount:training:worker"])"), "its subject is"},
      {Claims(subject, R"("sub":"")"), "its subject is ''"},
      {Claims(expires, R"("exp":1699990000)"), "it was valid until"},
      {Claims(expires, R"("exp":"1700003600")"), "when it expires"},
      {Claims(expires, R"("exp":-1)"), "when it expires"},
      {Claims(expires, R"("exp":1e300)"), "when it expires"},
      {Claims(expires, R"("exp":"Infinity")"), "when it expires"},
      {Claims(expires, R"("exp":null)"), "when it expires"},
      {Claims(expires, R"("expires":1700003600)"), "when it expires"},
      {Claims(begins, R"("nbf":1700000100)"), "it is valid from"},
      {Claims(begins, R"("nbf":"1699999999")"), "from when on"},
      {Claims(begins, R"("nbf":null)"), "from when on"},
      // The second could be what another parser takes.
      {Claims(subject, subject + "," + subject), "its payload is no JSON object"},
      {Claims(expires, expires + R"(,"exp":1800003600)"), "its payload is no JSON object"},
      {R"(["iss"])", "its payload is no JSON object"},
      {"", "its payload is no JSON object"},
      {std::string(200, '['), "its payload is no JSON object"},
      {std::string(kClaims).substr(0, 100), "its payload is no JSON object"},
      {std::string(kClaims) + "x", "its payload is no JSON object"},
      {Claims("worker\"}", "worker\xff\"}"), "its payload is no JSON object"},
  };
  for (const Case& c : cases) {
    for (const TestIssuer* issuer : {&Rsa(), &Ec()}) {
      const absl::Status status = Check(issuer->Issue(c.claims));
      EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << c.claims;
      EXPECT_THAT(status.message(), HasSubstr(c.why)) << c.claims;
    }
  }
}

TEST_F(ServiceAccountTokenTest, IsRefusedForASignatureThatIsNotItsKeys) {
  const std::string payload = absl::WebSafeBase64Escape(kClaims);
  const std::string signed_bytes =
      absl::StrCat(absl::WebSafeBase64Escape(Ec().header()), ".", payload);
  const std::string signature = Ec().Sign(signed_bytes);
  const TestIssuer other("ec", "ES256"), other_rsa("rsa", "RS256");
  const auto signed_with_secret = [&](const std::string& header, const std::string& secret) {
    const std::string bytes = absl::StrCat(absl::WebSafeBase64Escape(header), ".", payload);
    return absl::StrCat(bytes, ".", absl::WebSafeBase64Escape(Hmac(secret, bytes)));
  };
  struct Case {
    std::string token, why;
  };
  const std::vector<Case> cases = {
      {other.Issue(kClaims), "its signature is not its key's"},
      {other_rsa.Issue(kClaims), "its signature is not its key's"},
      // Of other bytes.
      {JoinToken(Ec().header(), Claims("3f1b", "3f1c"), signature), "its signature is not"},
      {JoinToken(Ec().header() + " ", kClaims, signature), "its signature is not"},
      // ES256 with more, fewer, or other bytes.
      {JoinToken(Ec().header(), kClaims, signature + std::string(1, '\0')), "its signature is not"},
      {JoinToken(Ec().header(), kClaims, signature.substr(1)), "its signature is not"},
      {JoinToken(Ec().header(), kClaims, signature.substr(0, 32)), "its signature is not"},
      {JoinToken(Ec().header(), kClaims, ""), "its signature is not"},
      {JoinToken(Ec().header(), kClaims, std::string(64, '\0')), "its signature is not"},
      {JoinToken(Ec().header(), kClaims, std::string(64, '\xff')), "its signature is not"},
      {JoinToken(Ec().header(), kClaims, signature.substr(32) + signature.substr(0, 32)),
       "its signature is not"},
      // Another algorithm than the key's.
      {JoinToken(R"({"alg":"none","kid":"ec"})", kClaims, ""), "signed with 'none'"},
      {JoinToken(R"({"alg":"None","kid":"ec"})", kClaims, ""), "signed with 'None'"},
      {JoinToken(R"({"kid":"ec"})", kClaims, signature), "signed with ''"},
      {JoinToken(R"({"alg":["ES256"],"kid":"ec"})", kClaims, signature), "signed with ''"},
      {signed_with_secret(R"({"alg":"HS256","kid":"rsa"})", Rsa().public_key_pem()),
       "signed with 'HS256'"},
      {signed_with_secret(R"({"alg":"HS256","kid":"ec"})", Ec().public_key_pem()),
       "signed with 'HS256'"},
      {Rsa().Issue(R"({"alg":"RS256","kid":"ec"})", kClaims), "its key is for ES256"},
      {Rsa().Issue(R"({"alg":"PS256","kid":"rsa"})", kClaims), "its key is for RS256"},
      {Rsa().Issue(R"({"alg":"RS512","kid":"rsa"})", kClaims), "its key is for RS256"},
      {Ec().Issue(R"({"alg":"ES256","kid":"ec","crit":["b64"],"b64":false})", kClaims), "(crit)"},
      {Ec().Issue(R"({"alg":"ES256","kid":"ec","kid":"ec"})", kClaims), "its header is no JSON"},
  };
  for (const Case& c : cases) {
    const absl::Status status = Check(c.token);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << c.token;
    EXPECT_THAT(status.message(), HasSubstr(c.why)) << c.token;
  }
}

TEST_F(ServiceAccountTokenTest, OfAKeyThatIsNotThereIsNotFound) {
  for (const char* header : {R"({"alg":"ES256","kid":"other"})", R"({"alg":"ES256"})",
                             R"({"alg":"none","kid":""})", R"({"alg":"ES256","kid":7})"}) {
    const absl::Status status = Check(Ec().Issue(header, kClaims));
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << header;
    EXPECT_THAT(status.message(), HasSubstr("no key in the JWKS has its name"));
  }
}

TEST_F(ServiceAccountTokenTest, CutOrChangedAnywhereIsRefused) {
  for (const TestIssuer* issuer : {&Rsa(), &Ec()}) {
    const std::string token = issuer->Issue(kClaims);
    for (size_t i = 0; i < token.size(); ++i) {
      EXPECT_FALSE(Check(token.substr(0, i)).ok()) << i;
      EXPECT_FALSE(Check(token.substr(i + 1)).ok()) << i;
      std::string changed = token;
      changed[i] = changed[i] == 'A' ? 'B' : 'A';
      EXPECT_FALSE(Check(changed).ok()) << i;
    }
  }
}

// One token, one spelling: none but what the cluster wrote.
TEST_F(ServiceAccountTokenTest, WithAnythingAroundItIsRefused) {
  const std::string token = Ec().Issue(kClaims);
  for (const std::string& other :
       {token + "=", token + "==", token + ".", token + " ", " " + token, token + "\n", "." + token,
        token + "." + token, token + std::string(1, '\0'), std::string(), std::string("..")}) {
    EXPECT_EQ(Check(other).code(), absl::StatusCode::kUnauthenticated) << other;
  }
}

TEST_F(ServiceAccountTokenTest, ThatIsHugeIsRefusedBeforeItIsParsed) {
  const std::string claims = Claims("3f1b", std::string(kMaxTokenBytes, 'j'));
  EXPECT_THAT(Check(Ec().Issue(claims)).message(), HasSubstr("at most 7168"));
}

TEST_F(ServiceAccountTokenTest, IsInNoMessage) {
  for (const std::string& claims : {Claims("training:worker", "training:default"),
                                    std::string("[]"), Claims("1700003600", "1600000000")}) {
    const std::string token = Ec().Issue(claims);
    const std::string message(Check(token).message());
    EXPECT_THAT(message, Not(HasSubstr(token.substr(token.rfind('.')))));
    EXPECT_THAT(message, Not(HasSubstr(absl::WebSafeBase64Escape(claims))));
  }
  // What an unknown sender says is cut, and printable.
  const std::string name(3000, '\x01');
  const std::string header = absl::StrCat(R"({"alg":"ES256","kid":")",
                                          absl::StrReplaceAll(name, {{"\x01", "\\u0001"}}), "\"}");
  EXPECT_LT(CheckToken(Ec().Issue(header.substr(0, 5000) + "\"}", "{}"), keys_, rules_, kNow)
                .status()
                .message()
                .size(),
            1200);
}

TEST(TokenKeys, AreThoseForTheTwoSignatures) {
  const TestIssuer rsa("rsa", "RS256"), ec("ec", "ES256");
  const std::string jwks = JwksOf({
      rsa.jwk(),
      R"({"kty":"OKP","crv":"Ed25519","kid":"ed","x":"AA"})",
      R"({"kty":"EC","crv":"P-384","kid":"p384","x":"AA","y":"AA"})",
      absl::StrReplaceAll(ec.jwk(), {{R"("sig")", R"("enc")"}, {R"("ec")", R"("secret")"}}),
      absl::StrReplaceAll(rsa.jwk(), {{"RS256", "RS512"}, {R"("rsa")", R"("rsa512")"}}),
      absl::StrReplaceAll(ec.jwk(), {{R"("kid")", R"("name")"}}),
      ec.jwk(),
      "7",
  });
  const auto keys = TokenKeys::Parse(jwks);
  ASSERT_TRUE(keys.ok()) << keys.status();
  EXPECT_THAT(keys->names(), ElementsAre("ec", "rsa"));
}

TEST(TokenKeys, AreRefusedWithTheReason) {
  const TestIssuer rsa("rsa", "RS256"), ec("ec", "ES256");
  const auto with = [](const std::string& jwk, const char* member, const std::string& value) {
    const size_t begin =
        jwk.find(absl::StrCat("\"", member, "\":\"")) + std::string(member).size() + 4;
    return JwksOf({jwk.substr(0, begin) + value + jwk.substr(jwk.find('"', begin))});
  };
  const std::string short_modulus = absl::WebSafeBase64Escape(std::string(128, '\xff'));
  const std::string long_modulus = absl::WebSafeBase64Escape(std::string(1025, '\xff'));
  struct Case {
    std::string jwks, why;
  };
  const std::vector<Case> cases = {
      {"", "no JSON Web Key Set"},
      {"[]", "no JSON Web Key Set"},
      {"{}", "no JSON Web Key Set"},
      {R"({"keys":{}})", "no JSON Web Key Set"},
      {R"({"keys":[)", "no JSON Web Key Set"},
      {R"({"keys":[],"keys":[]})", "no JSON Web Key Set"},
      {R"({"keys":[]})", "has no key with a name"},
      {JwksOf({R"({"kty":"oct","kid":"a","k":"AA"})"}), "has no key with a name"},
      {JwksOf({ec.jwk(), ec.jwk()}), "two keys have the name 'ec'"},
      {with(rsa.jwk(), "n", short_modulus), "the key 'rsa': it has 1024 bits"},
      {with(rsa.jwk(), "n", long_modulus), "the key 'rsa': it has 8200 bits"},
      {with(rsa.jwk(), "n", "??"), "its n or e is not base64url"},
      {with(rsa.jwk(), "e", "AQ"), "its e is no exponent"},
      {with(rsa.jwk(), "e", "AQAC"), "its e is no exponent"},
      {with(rsa.jwk(), "e", ""), "its e is no exponent"},
      {with(ec.jwk(), "x", "AQAB"), "the key 'ec': its x or y is not 32 bytes"},
      {with(ec.jwk(), "y", absl::WebSafeBase64Escape(std::string(32, '\x01'))),
       "it is no point of P-256"},
      {with(ec.jwk(), "x", absl::WebSafeBase64Escape(std::string(32, '\0'))),
       "it is no point of P-256"},
  };
  for (const Case& c : cases) {
    const absl::Status status = TokenKeys::Parse(c.jwks).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.jwks;
    EXPECT_THAT(status.message(), HasSubstr(c.why)) << c.jwks;
  }
}

TEST(TokenRules, NeedAllThreeAndServiceAccounts) {
  const TokenRules good = {"iss", "aud", {"system:serviceaccount:training:worker"}};
  EXPECT_TRUE(good.Check().ok());
  EXPECT_THAT(TokenRules({"", "aud", good.subjects}).Check().message(), HasSubstr("an issuer"));
  EXPECT_THAT(TokenRules({"iss", "", good.subjects}).Check().message(), HasSubstr("an audience"));
  EXPECT_THAT(TokenRules({"iss", "aud", {}}).Check().message(), HasSubstr("a subject"));
  for (const char* subject : {"worker", "system:serviceaccount:training", "system:node:a:b",
                              "system:serviceaccount::worker", "system:serviceaccount:a:b:c"}) {
    EXPECT_THAT(TokenRules({"iss", "aud", {subject}}).Check().message(),
                HasSubstr("wanted system:serviceaccount:NAMESPACE:NAME"))
        << subject;
  }
}

}  // namespace
}  // namespace signpost
