// Tokens of Kubernetes service accounts: JSON Web Tokens (RFC 7519) that the cluster has signed, as
// it projects them into a container's file system. They are judged by the cluster's public keys
// alone, a JSON Web Key Set (RFC 7517): nobody is asked.

#ifndef SIGNPOST_SECURITY_SERVICE_ACCOUNT_TOKEN_H_
#define SIGNPOST_SECURITY_SERVICE_ACCOUNT_TOKEN_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace signpost {

// A longer one would not fit into the metadata of a call, of which gRPC takes 8 KiB.
inline constexpr size_t kMaxTokenBytes = 7 << 10;

// How far this host's clock and the cluster's may be apart.
inline constexpr absl::Duration kTokenClockSkew = absl::Minutes(1);

// Whose tokens are good.
struct TokenRules {
  std::string issuer;                 // of the cluster: "https://kubernetes.default.svc"
  std::string audience;               // that the token is for
  std::vector<std::string> subjects;  // any of these: "system:serviceaccount:NAMESPACE:NAME"

  // INVALID_ARGUMENT for one that is missing, or a subject of another form.
  absl::Status Check() const;
};

// The public keys that sign tokens, by their "kid". Those for other signatures than RS256 and ES256
// are left out. Thread-safe, once it is there.
class TokenKeys {
 public:
  // INVALID_ARGUMENT, saying which key is wrong in what, for a set that is none, has no key for
  // tokens, two of one name, or an RSA key of less than 2048 bits or more than 8192.
  static absl::StatusOr<TokenKeys> Parse(absl::string_view jwks);
  // The keys that are right, perhaps none, of two that have one name the first. What is wrong with
  // the set otherwise is added to `wrong`. INVALID_ARGUMENT for what is no set.
  static absl::StatusOr<TokenKeys> ParseGood(absl::string_view jwks,
                                             std::vector<std::string>& wrong);

  TokenKeys(TokenKeys&&);
  TokenKeys& operator=(TokenKeys&&);
  ~TokenKeys();

  std::vector<std::string> names() const;

  // Whether the key of that name made `signature`, in the form of RFC 7518, of `signed_bytes`.
  // NOT_FOUND when there is no such key; UNAUTHENTICATED when it is for another algorithm, or made
  // no such signature.
  absl::Status Verify(absl::string_view name, absl::string_view algorithm,
                      absl::string_view signed_bytes, absl::string_view signature) const;

 private:
  struct Key;
  TokenKeys();

  std::map<std::string, Key, std::less<>> keys_;
};

// When a token that was found good is good.
struct TokenValidity {
  absl::Time from = absl::InfinitePast(), until = absl::InfinitePast();  // skew included

  // UNAUTHENTICATED, with the times, when `now` is not between them.
  absl::Status Check(absl::Time now) const;
};

// UNAUTHENTICATED says what is wrong with the token, never what it is; NOT_FOUND that no key has
// its name.
absl::StatusOr<TokenValidity> CheckToken(absl::string_view token, const TokenKeys& keys,
                                         const TokenRules& rules, absl::Time now);

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_SERVICE_ACCOUNT_TOKEN_H_
