// A port that answers questions over HTTP and takes nothing: GET and HEAD of the few paths that its
// owner knows. A thread of its own serves all connections, so whoever holds one up holds up nobody
// else; a second thread ends connections that take too long. Plain text, without authentication:
// only what anybody may know.

#ifndef SIGNPOST_SERVER_HTTP_PORT_H_
#define SIGNPOST_SERVER_HTTP_PORT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/http_connections.h"

struct MHD_Daemon;

namespace signpost {

struct HttpPage {
  std::string type;  // of the content
  std::string body;
  // Content-Security-Policy: by default a browser may only show the page.
  std::string security_policy = "default-src 'none'; frame-ancestors 'none'";
};

struct HttpLimits {
  uint32_t connections = 32;
  uint32_t connections_per_peer = 8;  // for another one, the peer's slowest is ended
  uint32_t free_connections = 8;      // of `connections`: for a newcomer, the slowest is ended
  absl::Duration request_timeout = absl::Seconds(10);  // for a request's line and headers
  absl::Duration answer_timeout = absl::Minutes(1);    // for a peer to take the answer
  uint32_t connection_bytes = 16 << 10;                // of a request's line and headers
};

class HttpPort {
 public:
  // The page at a path; none: there is nothing. Called by one thread at a time.
  using Find = std::function<std::optional<HttpPage>(absl::string_view path)>;

  // On a "host:port" that CheckTransport accepts: on the first address that the host resolves to
  // and that can be had, otherwise UNAVAILABLE. INVALID_ARGUMENT for a name that is none. `names`
  // are those by which it may be asked, besides the host, localhost and numbers: see IsOwnHost.
  static absl::StatusOr<std::unique_ptr<HttpPort>> Listen(const std::string& address,
                                                          const std::vector<std::string>& names,
                                                          Find find, const HttpLimits& limits = {});

  ~HttpPort();  // ends all connections

  uint16_t port() const;

 private:
  class Callbacks;  // libmicrohttpd's

  HttpPort(std::vector<std::string> names, Find find, const HttpLimits& limits);

  void EndSlowOnes();

  const std::vector<std::string> names_;
  const Find find_;
  absl::Mutex mutex_;
  HttpConnections connections_ ABSL_GUARDED_BY(mutex_);
  absl::Notification stopping_;
  MHD_Daemon* daemon_ = nullptr;
  std::thread slow_ones_;
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_HTTP_PORT_H_
