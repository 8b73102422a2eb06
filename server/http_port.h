// A port that answers questions over HTTP and takes nothing: GET and HEAD of the few paths that its
// owner knows. A thread of its own serves all connections, so whoever holds one up holds up nobody
// else. Plain text, without authentication: only what anybody may know.

#ifndef SIGNPOST_SERVER_HTTP_PORT_H_
#define SIGNPOST_SERVER_HTTP_PORT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

struct MHD_Daemon;

namespace signpost {

struct HttpPage {
  std::string type;  // of the content
  std::string body;
  // What a browser may do with it: nothing but show it.
  std::string security_policy = "default-src 'none'; frame-ancestors 'none'";
};

struct HttpLimits {
  uint32_t connections = 32;  // further ones wait until one of these ends
  uint32_t connections_per_peer = 8;
  absl::Duration idle_timeout = absl::Seconds(10);  // in whole seconds
  uint32_t connection_bytes = 16 << 10;             // of a request's line and headers
};

class HttpPort {
 public:
  // The page at a path; none: there is nothing. Called by one thread at a time.
  using Find = std::function<std::optional<HttpPage>(absl::string_view path)>;

  // On a "host:port" that CheckTransport accepts: on the first address that the host resolves
  // to. UNAVAILABLE when it cannot be had.
  static absl::StatusOr<std::unique_ptr<HttpPort>> Listen(const std::string& address, Find find,
                                                          const HttpLimits& limits = {});

  ~HttpPort();  // ends all connections

  uint16_t port() const;

 private:
  explicit HttpPort(Find find) : find_(std::move(find)) {}

  const Find find_;
  MHD_Daemon* daemon_ = nullptr;
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_HTTP_PORT_H_
