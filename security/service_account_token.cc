#include "security/service_account_token.h"

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <openssl/bn.h>
#include <openssl/core_names.h>
#include <openssl/ecdsa.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/param_build.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "security/openssl_ptr.h"

namespace signpost {
namespace {

using google::protobuf::ListValue;
using google::protobuf::Struct;
using google::protobuf::Value;

using BigNumber = OpensslPtr<BIGNUM, BN_free>;
using Digest = OpensslPtr<EVP_MD_CTX, EVP_MD_CTX_free>;
using EcdsaSignature = OpensslPtr<ECDSA_SIG, ECDSA_SIG_free>;
using KeyContext = OpensslPtr<EVP_PKEY_CTX, EVP_PKEY_CTX_free>;
using Parameters = OpensslPtr<OSSL_PARAM, OSSL_PARAM_free>;
using ParametersBuilder = OpensslPtr<OSSL_PARAM_BLD, OSSL_PARAM_BLD_free>;
using PublicKey = OpensslPtr<EVP_PKEY, EVP_PKEY_free>;

constexpr absl::string_view kRs256 = "RS256", kEs256 = "ES256";

constexpr int kMinRsaBits = 2048, kMaxRsaBits = 8192;
constexpr size_t kP256Bytes = 32;         // of a coordinate
constexpr double kMaxUnixSeconds = 1e11;  // the year 5138
constexpr size_t kMaxQuotedBytes = 200;

absl::Status Refused(absl::string_view why) {
  return absl::UnauthenticatedError(absl::StrCat("the token is refused: ", why));
}

// Somebody else's words, for a message.
std::string Quote(absl::string_view text) {
  return absl::StrCat("'", absl::Utf8SafeCHexEscape(text.substr(0, kMaxQuotedBytes)), "'");
}

// None for what is not exactly the one encoding, without padding, that RFC 7515 has.
std::optional<std::string> DecodeBase64Url(absl::string_view text) {
  std::string bytes;
  if (!absl::WebSafeBase64Unescape(text, &bytes)) return std::nullopt;
  // Abseil takes spaces and padding too.
  if (absl::WebSafeBase64Escape(bytes) != text) return std::nullopt;
  return bytes;
}

// None for what is no object, or has a name twice.
std::optional<Struct> ParseObject(absl::string_view json) {
  Struct object;
  const auto status = google::protobuf::util::JsonStringToMessage(
      google::protobuf::StringPiece(json.data(), json.size()), &object);
  if (!status.ok()) return std::nullopt;
  return object;
}

std::optional<Struct> ParseEncodedObject(absl::string_view base64url) {
  const std::optional<std::string> json = DecodeBase64Url(base64url);
  return json.has_value() ? ParseObject(*json) : std::nullopt;
}

const Value* Find(const Struct& object, const char* name) {
  const auto found = object.fields().find(name);
  return found == object.fields().end() ? nullptr : &found->second;
}

// Empty when it is not there, or no string.
absl::string_view StringOf(const Struct& object, const char* name) {
  const Value* const value = Find(object, name);
  return value == nullptr ? absl::string_view() : absl::string_view(value->string_value());
}

std::optional<absl::Time> TimeOf(const Value& value) {
  const double seconds = value.number_value();
  const bool is_time = value.kind_case() == Value::kNumberValue && std::isfinite(seconds) &&
                       seconds >= 0 && seconds <= kMaxUnixSeconds;
  if (!is_time) return std::nullopt;
  return absl::UnixEpoch() + absl::Seconds(seconds);
}

BigNumber BigNumberOf(absl::string_view bytes) {
  return BigNumber(BN_bin2bn(reinterpret_cast<const unsigned char*>(bytes.data()),
                             static_cast<int>(bytes.size()), nullptr));
}

// Null when OpenSSL does not take it for a key.
PublicKey MakeKey(const char* type, OSSL_PARAM_BLD* builder) {
  const Parameters parameters(OSSL_PARAM_BLD_to_param(builder));
  const KeyContext context(EVP_PKEY_CTX_new_from_name(nullptr, type, nullptr));
  EVP_PKEY* key = nullptr;
  if (parameters != nullptr && EVP_PKEY_fromdata_init(context.get()) == 1 &&
      EVP_PKEY_fromdata(context.get(), &key, EVP_PKEY_PUBLIC_KEY, parameters.get()) != 1) {
    key = nullptr;
  }
  ERR_clear_error();
  return PublicKey(key);
}

absl::StatusOr<PublicKey> RsaKey(const Struct& jwk) {
  const auto modulus = DecodeBase64Url(StringOf(jwk, "n"));
  const auto exponent = DecodeBase64Url(StringOf(jwk, "e"));
  if (!modulus || !exponent) return absl::InvalidArgumentError("its n or e is not base64url");
  const BigNumber n = BigNumberOf(*modulus), e = BigNumberOf(*exponent);
  const int bits = BN_num_bits(n.get());
  if (bits < kMinRsaBits || bits > kMaxRsaBits) {
    return absl::InvalidArgumentError(
        absl::StrCat("it has ", bits, " bits, wanted ", kMinRsaBits, " to ", kMaxRsaBits));
  }
  // As OpenSSL has it for moduli of more than 3072 bits; 65537 is what all use.
  if (BN_num_bits(e.get()) > 64 || !BN_is_odd(e.get()) || BN_is_one(e.get())) {
    return absl::InvalidArgumentError("its e is no exponent of RSA");
  }
  const ParametersBuilder builder(OSSL_PARAM_BLD_new());
  OSSL_PARAM_BLD_push_BN(builder.get(), OSSL_PKEY_PARAM_RSA_N, n.get());
  OSSL_PARAM_BLD_push_BN(builder.get(), OSSL_PKEY_PARAM_RSA_E, e.get());
  return MakeKey("RSA", builder.get());
}

absl::StatusOr<PublicKey> P256Key(const Struct& jwk) {
  const auto x = DecodeBase64Url(StringOf(jwk, "x")), y = DecodeBase64Url(StringOf(jwk, "y"));
  if (!x || !y || x->size() != kP256Bytes || y->size() != kP256Bytes) {
    return absl::InvalidArgumentError("its x or y is not 32 bytes in base64url");
  }
  constexpr char kUncompressed = 4;
  const std::string point = absl::StrCat(std::string(1, kUncompressed), *x, *y);
  const ParametersBuilder builder(OSSL_PARAM_BLD_new());
  OSSL_PARAM_BLD_push_utf8_string(builder.get(), OSSL_PKEY_PARAM_GROUP_NAME, "P-256", 0);
  OSSL_PARAM_BLD_push_octet_string(builder.get(), OSSL_PKEY_PARAM_PUB_KEY, point.data(),
                                   point.size());
  return MakeKey("EC", builder.get());
}

// Which of the two its signatures are; empty: neither.
absl::string_view AlgorithmOf(const Struct& jwk) {
  const absl::string_view use = StringOf(jwk, "use");
  if (!use.empty() && use != "sig") return "";
  const absl::string_view type = StringOf(jwk, "kty");
  const absl::string_view algorithm = type == "RSA" ? kRs256
                                      : type == "EC" && StringOf(jwk, "crv") == "P-256"
                                          ? kEs256
                                          : absl::string_view();
  const absl::string_view said = StringOf(jwk, "alg");
  return said.empty() || said == algorithm ? algorithm : "";
}

// OpenSSL's form of the two numbers that RFC 7518 has one behind the other; empty when they are
// none.
std::string ToDer(absl::string_view signature) {
  if (signature.size() != 2 * kP256Bytes) return "";
  BigNumber r = BigNumberOf(signature.substr(0, kP256Bytes));
  BigNumber s = BigNumberOf(signature.substr(kP256Bytes));
  const EcdsaSignature parsed(ECDSA_SIG_new());
  ECDSA_SIG_set0(parsed.get(), r.release(), s.release());  // which owns them now
  unsigned char* bytes = nullptr;
  const int size = i2d_ECDSA_SIG(parsed.get(), &bytes);
  if (size <= 0) return "";
  std::string der(reinterpret_cast<const char*>(bytes), size);
  OPENSSL_free(bytes);
  return der;
}

bool IsSignature(EVP_PKEY* key, absl::string_view signed_bytes, absl::string_view signature) {
  const Digest digest(EVP_MD_CTX_new());
  const auto bytes = [](absl::string_view text) {
    return reinterpret_cast<const unsigned char*>(text.data());
  };
  const bool is = EVP_DigestVerifyInit(digest.get(), nullptr, EVP_sha256(), nullptr, key) == 1 &&
                  EVP_DigestVerify(digest.get(), bytes(signature), signature.size(),
                                   bytes(signed_bytes), signed_bytes.size()) == 1;
  ERR_clear_error();
  return is;
}

bool IsFor(absl::string_view audience, const Value* claim) {
  if (claim == nullptr) return false;
  if (claim->kind_case() == Value::kStringValue) return claim->string_value() == audience;
  const ListValue& list = claim->list_value();
  return std::any_of(list.values().begin(), list.values().end(), [&](const Value& value) {
    return value.kind_case() == Value::kStringValue && value.string_value() == audience;
  });
}

absl::Status CheckClaims(const Struct& claims, const TokenRules& rules) {
  const absl::string_view issuer = StringOf(claims, "iss"), subject = StringOf(claims, "sub");
  if (issuer != rules.issuer) {
    return Refused(absl::StrCat("its issuer is ", Quote(issuer), ", wanted ", rules.issuer));
  }
  if (!IsFor(rules.audience, Find(claims, "aud"))) {
    return Refused(absl::StrCat("it is for another audience than ", rules.audience));
  }
  if (std::find(rules.subjects.begin(), rules.subjects.end(), subject) == rules.subjects.end()) {
    return Refused(absl::StrCat("its subject is ", Quote(subject), ", wanted ",
                                absl::StrJoin(rules.subjects, " or ")));
  }
  return absl::OkStatus();
}

absl::StatusOr<TokenValidity> ValidityOf(const Struct& claims) {
  const Value* const expires = Find(claims, "exp");
  const Value* const begins = Find(claims, "nbf");
  const auto until = expires == nullptr ? std::nullopt : TimeOf(*expires);
  if (!until) return Refused("it does not say when it expires (exp)");
  // Not all issuers say it.
  const auto from = begins == nullptr ? absl::InfinitePast() : TimeOf(*begins);
  if (!from) return Refused("it does not say from when on it is valid (nbf)");
  return TokenValidity{*from - kTokenClockSkew, *until + kTokenClockSkew};
}

}  // namespace

absl::Status TokenRules::Check() const {
  if (issuer.empty() || audience.empty() || subjects.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("tokens need ",
                                                   issuer.empty()     ? "an issuer"
                                                   : audience.empty() ? "an audience"
                                                                      : "a subject",
                                                   ": a JWKS alone says who signs, not for whom"));
  }
  for (const std::string& subject : subjects) {
    const std::vector<absl::string_view> parts = absl::StrSplit(subject, ':');
    if (parts.size() != 4 || parts[0] != "system" || parts[1] != "serviceaccount" ||
        parts[2].empty() || parts[3].empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the subject of a token is '", subject,
                       "', wanted system:serviceaccount:NAMESPACE:NAME"));
    }
  }
  return absl::OkStatus();
}

struct TokenKeys::Key {
  absl::string_view algorithm;
  PublicKey key;
};

TokenKeys::TokenKeys() = default;
TokenKeys::TokenKeys(TokenKeys&&) = default;
TokenKeys& TokenKeys::operator=(TokenKeys&&) = default;
TokenKeys::~TokenKeys() = default;

absl::StatusOr<TokenKeys> TokenKeys::Parse(absl::string_view jwks) {
  std::vector<std::string> wrong;
  absl::StatusOr<TokenKeys> keys = ParseGood(jwks, wrong);
  if (keys.ok() && !wrong.empty()) return absl::InvalidArgumentError(wrong.front());
  return keys;
}

absl::StatusOr<TokenKeys> TokenKeys::ParseGood(absl::string_view jwks,
                                               std::vector<std::string>& wrong) {
  const std::optional<Struct> set = ParseObject(jwks);
  const Value* const list = set.has_value() ? Find(*set, "keys") : nullptr;
  if (list == nullptr || list->kind_case() != Value::kListValue) {
    return absl::InvalidArgumentError("it is no JSON Web Key Set, {\"keys\": [...]}");
  }
  TokenKeys keys;
  for (const Value& value : list->list_value().values()) {
    const Struct& jwk = value.struct_value();
    const absl::string_view algorithm = AlgorithmOf(jwk), name = StringOf(jwk, "kid");
    if (algorithm.empty() || name.empty()) continue;
    absl::StatusOr<PublicKey> key = algorithm == kRs256 ? RsaKey(jwk) : P256Key(jwk);
    if (key.ok() && *key == nullptr) key = absl::InvalidArgumentError("it is no point of P-256");
    if (!key.ok()) {
      wrong.push_back(absl::StrCat("the key ", Quote(name), ": ", key.status().message()));
    } else if (!keys.keys_.try_emplace(std::string(name), Key{algorithm, *std::move(key)}).second) {
      wrong.push_back(absl::StrCat("two keys have the name ", Quote(name)));
    }
  }
  if (keys.keys_.empty()) {
    wrong.push_back("it has no key with a name (kid) for signatures with RS256 or ES256");
  }
  return keys;
}

std::vector<std::string> TokenKeys::names() const {
  std::vector<std::string> names;
  for (const auto& [name, key] : keys_) names.push_back(name);
  return names;
}

absl::Status TokenKeys::Verify(absl::string_view name, absl::string_view algorithm,
                               absl::string_view signed_bytes, absl::string_view signature) const {
  const auto found = keys_.find(name);
  if (found == keys_.end()) {
    return absl::NotFoundError(
        absl::StrCat("the token is refused: no key in the JWKS has its name, ", Quote(name)));
  }
  const Key& key = found->second;
  if (algorithm != key.algorithm) {
    return Refused(absl::StrCat("it is signed with ", Quote(algorithm), ", and its key is for ",
                                key.algorithm));
  }
  const std::string der = algorithm == kEs256 ? ToDer(signature) : std::string(signature);
  if (!der.empty() && IsSignature(key.key.get(), signed_bytes, der)) return absl::OkStatus();
  return Refused("its signature is not its key's");
}

absl::Status TokenValidity::Check(absl::Time now) const {
  const auto text = [](absl::Time time) {
    return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", time, absl::UTCTimeZone());
  };
  if (now < from) {
    return Refused(absl::StrCat("it is valid from ", text(from + kTokenClockSkew),
                                " on, and this host's clock says ", text(now)));
  }
  if (now >= until) {
    return Refused(absl::StrCat("it was valid until ", text(until - kTokenClockSkew),
                                ", and this host's clock says ", text(now)));
  }
  return absl::OkStatus();
}

absl::StatusOr<TokenValidity> CheckToken(absl::string_view token, const TokenKeys& keys,
                                         const TokenRules& rules, absl::Time now) {
  if (token.size() > kMaxTokenBytes) {
    return Refused(absl::StrCat("it has ", token.size(), " bytes, at most ", kMaxTokenBytes));
  }
  const std::vector<absl::string_view> parts = absl::StrSplit(token, '.');
  if (parts.size() != 3) return Refused("it is no JSON Web Token, header.payload.signature");
  const std::optional<Struct> header = ParseEncodedObject(parts[0]);
  if (!header) return Refused("its header is no JSON object in base64url");
  if (Find(*header, "crit") != nullptr) return Refused("its header has extensions (crit)");
  const std::optional<std::string> signature = DecodeBase64Url(parts[2]);
  if (!signature) return Refused("its signature is not base64url");
  const absl::string_view signed_bytes = token.substr(0, parts[0].size() + 1 + parts[1].size());
  absl::Status status =
      keys.Verify(StringOf(*header, "kid"), StringOf(*header, "alg"), signed_bytes, *signature);
  if (!status.ok()) return status;

  const std::optional<Struct> claims = ParseEncodedObject(parts[1]);
  if (!claims) return Refused("its payload is no JSON object in base64url");
  if (status = CheckClaims(*claims, rules); !status.ok()) return status;
  const absl::StatusOr<TokenValidity> validity = ValidityOf(*claims);
  if (!validity.ok()) return validity.status();
  if (status = validity->Check(now); !status.ok()) return status;
  return validity;
}

}  // namespace signpost
