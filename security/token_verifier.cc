#include "security/token_verifier.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/small_file.h"

namespace signpost {
namespace {

constexpr absl::Duration kLookInterval = absl::Seconds(1);
constexpr absl::Duration kUnknownKeyLookInterval = absl::Milliseconds(100);

// Some megabytes, for more workers than a job has. What is beyond begins anew.
constexpr size_t kMaxRemembered = 4096;

}  // namespace

absl::Status TokenOptions::Check() const {
  if (wanted()) return rules.Check();
  if (rules.issuer.empty() && rules.audience.empty() && rules.subjects.empty()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "tokens have an issuer, an audience or a subject, and no JWKS file to check them with");
}

absl::StatusOr<std::unique_ptr<TokenVerifier>> TokenVerifier::Open(const TokenOptions& options,
                                                                   OnWarning on_warning) {
  if (absl::Status status = options.rules.Check(); !status.ok()) return status;
  std::unique_ptr<TokenVerifier> verifier(new TokenVerifier(options, std::move(on_warning)));
  if (absl::Status status = verifier->Load(/*is_first=*/true); !status.ok()) return status;
  return verifier;
}

absl::Status TokenVerifier::FileError(absl::string_view why) const {
  return absl::InvalidArgumentError(absl::StrCat("JWKS file ", options_.jwks, ": ", why));
}

absl::Status TokenVerifier::Load(bool is_first) {
  absl::StatusOr<std::string> contents = ReadSmallFile(options_.jwks);
  if (!contents.ok()) return contents.status();
  {
    absl::ReaderMutexLock lock(&mutex_);
    if (*contents == contents_) return absl::OkStatus();
  }
  std::vector<std::string> wrong;
  absl::StatusOr<TokenKeys> keys = TokenKeys::ParseGood(*contents, wrong);
  if (!keys.ok()) return FileError(keys.status().message());
  if (!wrong.empty() && is_first) return FileError(wrong.front());
  // A key that was taken away must not count any longer for what is wrong with others.
  for (const std::string& what : wrong) {
    on_warning_(absl::StrCat(FileError(what).message(), "; without it the set counts from now on"));
  }
  auto shared = std::make_shared<const TokenKeys>(*std::move(keys));
  absl::MutexLock lock(&mutex_);
  contents_ = *std::move(contents);
  keys_ = std::move(shared);
  good_.clear();  // a key that is gone vouches for nobody
  return absl::OkStatus();
}

void TokenVerifier::LookAfter(absl::Duration interval, absl::Time now) {
  {
    absl::MutexLock lock(&mutex_);
    const bool is_early = now >= last_look_ && now < last_look_ + interval;
    if (is_early) return;
    last_look_ = now;
  }
  const absl::Status status = Load(/*is_first=*/false);
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(last_error_, std::string(status.message())) == status.message()) return;
  }
  if (!status.ok()) {
    on_warning_(absl::StrCat(status.message(), "; the keys from before stay in use"));
  }
}

bool TokenVerifier::IsRemembered(absl::string_view token, absl::Time now) const {
  absl::ReaderMutexLock lock(&mutex_);
  const auto found = good_.find(token);
  return found != good_.end() && found->second.Check(now).ok();
}

absl::Status TokenVerifier::Verify(absl::string_view token, absl::Time now) {
  std::shared_ptr<const TokenKeys> keys;
  {
    absl::ReaderMutexLock lock(&mutex_);
    keys = keys_;
  }
  const absl::StatusOr<TokenValidity> validity = CheckToken(token, *keys, options_.rules, now);
  if (!validity.ok()) return validity.status();
  absl::MutexLock lock(&mutex_);
  if (keys != keys_) return absl::OkStatus();
  if (good_.size() == kMaxRemembered) good_.clear();
  good_.insert_or_assign(std::string(token), *validity);
  return absl::OkStatus();
}

absl::Status TokenVerifier::Check(absl::string_view token, absl::Time now) {
  LookAfter(kLookInterval, now);
  if (IsRemembered(token, now)) return absl::OkStatus();
  absl::Status status = Verify(token, now);
  if (absl::IsNotFound(status)) {
    LookAfter(kUnknownKeyLookInterval, now);
    status = Verify(token, now);
  }
  return absl::IsNotFound(status) ? absl::UnauthenticatedError(status.message()) : status;
}

size_t TokenVerifier::remembered() const {
  absl::ReaderMutexLock lock(&mutex_);
  return good_.size();
}

}  // namespace signpost
