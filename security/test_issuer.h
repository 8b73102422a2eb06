// A cluster that issues tokens, for tests: it has a key, and signs whatever it is given.

#ifndef SIGNPOST_SECURITY_TEST_ISSUER_H_
#define SIGNPOST_SECURITY_TEST_ISSUER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace signpost::testing {

// "header.payload.signature" of the bytes of each.
std::string JoinToken(absl::string_view header, absl::string_view payload,
                      absl::string_view signature);

class TestIssuer {
 public:
  // A new key of that name, for RS256 or ES256.
  TestIssuer(std::string name, std::string algorithm);
  ~TestIssuer();

  // Its public key: {"kty": ..., "kid": ...}.
  std::string jwk() const;
  std::string public_key_pem() const;

  // {"alg":"RS256","kid":"its name"}
  std::string header() const;

  // As RFC 7518 has signatures.
  std::string Sign(absl::string_view bytes) const;
  // A token of its own header, or another.
  std::string Issue(const std::string& payload) const { return Issue(header(), payload); }
  std::string Issue(const std::string& header, const std::string& payload) const;

 private:
  struct Key;

  const std::string name_, algorithm_;
  const std::unique_ptr<Key> key_;
};

// {"keys": [...]}
std::string JwksOf(const std::vector<std::string>& jwks);

}  // namespace signpost::testing

#endif  // SIGNPOST_SECURITY_TEST_ISSUER_H_
