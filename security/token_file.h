// The token that a process shows with its calls: a file that its cluster renews while it runs.

#ifndef SIGNPOST_SECURITY_TOKEN_FILE_H_
#define SIGNPOST_SECURITY_TOKEN_FILE_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "grpcpp/security/credentials.h"

namespace signpost {

// Thread-safe.
class TokenFile {
 public:
  // Gets a line for a person when the file can no longer be read, or has no token any more: the one
  // from before stays in use. From a caller's thread.
  using OnWarning = std::function<void(const std::string& line)>;

  // Errors as ReadSmallFile's; INVALID_ARGUMENT when there is no token in it.
  static absl::StatusOr<std::shared_ptr<TokenFile>> Open(const std::string& path,
                                                         OnWarning on_warning);

  // What it says, or said a second ago.
  std::string Token(absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  TokenFile(std::string path, std::string token, OnWarning on_warning)
      : path_(std::move(path)), on_warning_(std::move(on_warning)), token_(std::move(token)) {}

  const std::string path_;
  const OnWarning on_warning_;
  absl::Mutex mutex_;
  absl::Time last_look_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  std::string token_ ABSL_GUARDED_BY(mutex_), last_error_ ABSL_GUARDED_BY(mutex_);
};

// "authorization: Bearer TOKEN" with each call; over TLS only.
std::shared_ptr<grpc::CallCredentials> CredentialsOf(std::shared_ptr<TokenFile> file);

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_TOKEN_FILE_H_
