#include "security/token_file.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "security/service_account_token.h"
#include "storage/small_file.h"

namespace signpost {
namespace {

constexpr absl::Duration kLookInterval = absl::Seconds(1);

// What a JSON Web Token consists of.
bool IsOfToken(char c) { return absl::ascii_isalnum(c) || c == '-' || c == '_' || c == '.'; }

absl::StatusOr<std::string> ReadToken(const std::string& path) {
  absl::StatusOr<std::string> contents = ReadSmallFile(path);
  if (!contents.ok()) return contents;
  const absl::string_view token = absl::StripAsciiWhitespace(*contents);
  if (token.empty() || token.size() > kMaxTokenBytes ||
      !std::all_of(token.begin(), token.end(), IsOfToken)) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": it has no token, which is letters, digits, '-', '_' and '.', at most ",
        kMaxTokenBytes));
  }
  return std::string(token);
}

class TokenPlugin final : public grpc::MetadataCredentialsPlugin {
 public:
  explicit TokenPlugin(std::shared_ptr<TokenFile> file) : file_(std::move(file)) {}

  bool IsBlocking() const override { return false; }
  grpc::Status GetMetadata(grpc::string_ref, grpc::string_ref, const grpc::AuthContext&,
                           std::multimap<grpc::string, grpc::string>* metadata) override {
    metadata->emplace("authorization", absl::StrCat("Bearer ", file_->Token(absl::Now())));
    return grpc::Status::OK;
  }

 private:
  const std::shared_ptr<TokenFile> file_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<TokenFile>> TokenFile::Open(const std::string& path,
                                                           OnWarning on_warning) {
  absl::StatusOr<std::string> token = ReadToken(path);
  if (!token.ok()) return token.status();
  return std::shared_ptr<TokenFile>(new TokenFile(path, *std::move(token), std::move(on_warning)));
}

std::string TokenFile::Token(absl::Time now) {
  {
    absl::MutexLock lock(&mutex_);
    const bool is_early = now >= last_look_ && now < last_look_ + kLookInterval;
    if (is_early) return token_;
    last_look_ = now;
  }
  absl::StatusOr<std::string> read = ReadToken(path_);
  const std::string error(read.status().message());
  std::string token;
  bool is_new_error;
  {
    absl::MutexLock lock(&mutex_);
    if (read.ok()) token_ = *std::move(read);
    token = token_;
    is_new_error = std::exchange(last_error_, error) != error && !error.empty();
  }
  if (is_new_error) on_warning_(absl::StrCat(error, "; the token from before stays in use"));
  return token;
}

std::shared_ptr<grpc::CallCredentials> CredentialsOf(std::shared_ptr<TokenFile> file) {
  return grpc::MetadataCredentialsFromPlugin(std::make_unique<TokenPlugin>(std::move(file)));
}

}  // namespace signpost
