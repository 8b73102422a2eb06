// libFuzzer target: tokens, what is in signed ones, and key sets.
//
//   input = kind (uint8: 0 a token, 1 a signed token's payload, 2 its header, 3 a JWKS) bytes

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/internal/raw_logging.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "fuzzing/seeds.h"
#include "security/service_account_token.h"
#include "security/test_issuer.h"

namespace signpost {
namespace {

using testing::JwksOf;
using testing::TestIssuer;

constexpr char kClaims[] =
    R"({"iss":"iss","aud":["aud"],"sub":"system:serviceaccount:a:b","exp":1700003600,"nbf":1})";
const absl::Time kNow = absl::FromUnixSeconds(1'700'000'000);

const TestIssuer& Issuer() {
  static const TestIssuer* const issuer = new TestIssuer("key", "ES256");
  return *issuer;
}

const TokenKeys& Keys() {
  static const TokenKeys* const keys = new TokenKeys(*TokenKeys::Parse(JwksOf({Issuer().jwk()})));
  return *keys;
}

// Of this process: another's are signed with another key.
const std::string& GoodToken() {
  static const std::string* const token = new std::string(Issuer().Issue(kClaims));
  return *token;
}

bool TryToken(const std::string& token) {
  const TokenRules rules = {"iss", "aud", {"system:serviceaccount:a:b"}};
  const absl::StatusOr<TokenValidity> validity = CheckToken(token, Keys(), rules, kNow);
  ABSL_RAW_CHECK(validity.ok() || token != GoodToken(), "a good token is good");
  if (!validity.ok()) {
    ABSL_RAW_CHECK(validity.status().message().size() < 4096, "a message has its bounds");
    return false;
  }
  ABSL_RAW_CHECK(validity->from <= kNow && kNow < validity->until, "it is valid now");
  ABSL_RAW_CHECK(token.size() <= kMaxTokenBytes, "it has its bounds");
  return true;
}

std::string AsProtobufWritesIt(const std::string& json) {
  google::protobuf::Struct object;
  std::string again;
  if (google::protobuf::util::JsonStringToMessage(json, &object).ok()) {
    (void)google::protobuf::util::MessageToJsonString(object, &again);
  }
  return again;
}

void TryKeys(const std::string& jwks) {
  const absl::StatusOr<TokenKeys> keys = TokenKeys::Parse(jwks);
  if (!keys.ok()) return;
  const absl::StatusOr<TokenKeys> again = TokenKeys::Parse(AsProtobufWritesIt(jwks));
  ABSL_RAW_CHECK(again.ok() && again->names() == keys->names(), "it is the same, written again");
  for (const std::string& name : keys->names()) {
    for (const char* algorithm : {"RS256", "ES256"}) {
      ABSL_RAW_CHECK(!keys->Verify(name, algorithm, "bytes", std::string(64, 's')).ok(),
                     "nobody signed that");
    }
  }
}

void TryInput(absl::string_view input) {
  if (input.empty()) return;
  const std::string bytes(input.substr(1));
  switch (static_cast<uint8_t>(input[0]) % 4) {
    case 0:
      ABSL_RAW_CHECK(!TryToken(bytes) || bytes == GoodToken(), "no token but those issued is good");
      break;
    case 1:
      TryToken(Issuer().Issue(bytes));
      break;
    case 2:
      TryToken(Issuer().Issue(bytes, kClaims));
      break;
    default:
      TryKeys(bytes);
  }
}

}  // namespace

std::vector<std::string> fuzzing::Seeds() {
  const TestIssuer rsa("rsa", "RS256");
  return {std::string(1, '\0') + GoodToken(), std::string("\1") + kClaims, "\2" + Issuer().header(),
          "\3" + JwksOf({Issuer().jwk(), rsa.jwk()})};
}

}  // namespace signpost

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  signpost::TryInput({reinterpret_cast<const char*>(data), size});
  return 0;
}
