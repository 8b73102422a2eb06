#include "security/test_issuer.h"

#include <openssl/bio.h>
#include <openssl/bn.h>
#include <openssl/core_names.h>
#include <openssl/ecdsa.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rsa.h>

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "security/openssl_ptr.h"

namespace signpost::testing {
namespace {

constexpr int kRsaBits = 2048;
constexpr int kP256Bytes = 32;

using BigNumber = OpensslPtr<BIGNUM, BN_free>;

// In so many bytes, or as many as it needs.
std::string BytesOf(const BIGNUM* number, int size = 0) {
  std::string bytes(size > 0 ? size : BN_num_bytes(number), '\0');
  BN_bn2binpad(number, reinterpret_cast<unsigned char*>(bytes.data()),
               static_cast<int>(bytes.size()));
  return bytes;
}

std::string Parameter(EVP_PKEY* key, const char* name, int size = 0) {
  BIGNUM* number = nullptr;
  EVP_PKEY_get_bn_param(key, name, &number);
  const BigNumber owner(number);
  return absl::WebSafeBase64Escape(BytesOf(number, size));
}

std::string FromDer(const std::string& der) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(der.data());
  const OpensslPtr<ECDSA_SIG, ECDSA_SIG_free> signature(
      d2i_ECDSA_SIG(nullptr, &bytes, static_cast<long>(der.size())));
  return BytesOf(ECDSA_SIG_get0_r(signature.get()), kP256Bytes) +
         BytesOf(ECDSA_SIG_get0_s(signature.get()), kP256Bytes);
}

}  // namespace

std::string JoinToken(absl::string_view header, absl::string_view payload,
                      absl::string_view signature) {
  return absl::StrCat(absl::WebSafeBase64Escape(header), ".", absl::WebSafeBase64Escape(payload),
                      ".", absl::WebSafeBase64Escape(signature));
}

struct TestIssuer::Key {
  OpensslPtr<EVP_PKEY, EVP_PKEY_free> key;
};

TestIssuer::TestIssuer(std::string name, std::string algorithm)
    : name_(std::move(name)), algorithm_(std::move(algorithm)), key_(std::make_unique<Key>()) {
  key_->key.reset(algorithm_ == "RS256" ? EVP_RSA_gen(kRsaBits) : EVP_EC_gen("P-256"));
}

TestIssuer::~TestIssuer() = default;

std::string TestIssuer::jwk() const {
  EVP_PKEY* const key = key_->key.get();
  const std::string rest =
      algorithm_ == "RS256"
          ? absl::StrCat(R"("kty":"RSA","n":")", Parameter(key, OSSL_PKEY_PARAM_RSA_N),
                         R"(","e":")", Parameter(key, OSSL_PKEY_PARAM_RSA_E))
          : absl::StrCat(R"("kty":"EC","crv":"P-256","x":")",
                         Parameter(key, OSSL_PKEY_PARAM_EC_PUB_X, kP256Bytes), R"(","y":")",
                         Parameter(key, OSSL_PKEY_PARAM_EC_PUB_Y, kP256Bytes));
  return absl::StrCat(R"({"use":"sig","alg":")", algorithm_, R"(","kid":")", name_, R"(",)", rest,
                      R"("})");
}

std::string TestIssuer::public_key_pem() const {
  const OpensslPtr<BIO, BIO_free_all> bio(BIO_new(BIO_s_mem()));
  PEM_write_bio_PUBKEY(bio.get(), key_->key.get());
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &data);
  return std::string(data, size);
}

std::string TestIssuer::header() const {
  return absl::StrCat(R"({"alg":")", algorithm_, R"(","kid":")", name_, R"("})");
}

std::string TestIssuer::Sign(absl::string_view bytes) const {
  const OpensslPtr<EVP_MD_CTX, EVP_MD_CTX_free> digest(EVP_MD_CTX_new());
  const auto* data = reinterpret_cast<const unsigned char*>(bytes.data());
  size_t size = EVP_PKEY_get_size(key_->key.get());
  std::string signature(size, '\0');
  EVP_DigestSignInit(digest.get(), nullptr, EVP_sha256(), nullptr, key_->key.get());
  EVP_DigestSign(digest.get(), reinterpret_cast<unsigned char*>(signature.data()), &size, data,
                 bytes.size());
  signature.resize(size);
  return algorithm_ == "RS256" ? signature : FromDer(signature);
}

std::string TestIssuer::Issue(const std::string& header, const std::string& payload) const {
  const std::string signed_bytes =
      absl::StrCat(absl::WebSafeBase64Escape(header), ".", absl::WebSafeBase64Escape(payload));
  return JoinToken(header, payload, Sign(signed_bytes));
}

std::string JwksOf(const std::vector<std::string>& jwks) {
  return absl::StrCat(R"({"keys":[)", absl::StrJoin(jwks, ","), "]}");
}

}  // namespace signpost::testing
