// Judges the tokens of calls by a JWKS file that may change at any time.

#ifndef SIGNPOST_SECURITY_TOKEN_VERIFIER_H_
#define SIGNPOST_SECURITY_TOKEN_VERIFIER_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "security/service_account_token.h"

namespace signpost {

struct TokenOptions {
  std::string jwks;  // the file. Empty: no tokens are wanted
  TokenRules rules;

  bool wanted() const { return !jwks.empty(); }
  // INVALID_ARGUMENT as TokenRules::Check, or when there are rules and no file.
  absl::Status Check() const;
};

// Remembers what it found good, until that expires or the keys change: a call with such a token
// costs a look into a table. Thread-safe.
class TokenVerifier {
 public:
  // Gets a line for a person when a new JWKS is not taken: the one from before stays in use. From a
  // caller's thread.
  using OnWarning = std::function<void(const std::string& line)>;

  // Errors as TokenOptions::Check's, ReadSmallFile's and TokenKeys::Parse's.
  static absl::StatusOr<std::unique_ptr<TokenVerifier>> Open(const TokenOptions& options,
                                                             OnWarning on_warning);

  // UNAUTHENTICATED as CheckToken, or when no key has the token's name. Looks at the file when it
  // did not for a second, and for a token whose key it does not know after a tenth of one.
  absl::Status Check(absl::string_view token, absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);

  // How many are remembered, of which there is a limit.
  size_t remembered() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  TokenVerifier(const TokenOptions& options, OnWarning on_warning)
      : options_(options), on_warning_(std::move(on_warning)) {}

  absl::Status FileError(absl::string_view why) const;
  absl::Status Load(bool is_first) ABSL_LOCKS_EXCLUDED(mutex_);
  void LookAfter(absl::Duration interval, absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);
  bool IsRemembered(absl::string_view token, absl::Time now) const ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Verify(absl::string_view token, absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);

  const TokenOptions options_;
  const OnWarning on_warning_;
  mutable absl::Mutex mutex_;
  absl::Time last_look_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::string contents_ ABSL_GUARDED_BY(mutex_), last_error_ ABSL_GUARDED_BY(mutex_);
  // Shared with the calls that verify with them while others take their place.
  std::shared_ptr<const TokenKeys> keys_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, TokenValidity> good_ ABSL_GUARDED_BY(mutex_);  // with keys_
};

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_TOKEN_VERIFIER_H_
