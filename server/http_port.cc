#include "server/http_port.h"

#include <microhttpd.h>
#include <sys/socket.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/steady_time.h"
#include "security/loopback.h"
#include "server/connection_table.h"
#include "server/listen_addresses.h"

namespace signpost {
namespace {

constexpr std::pair<const char*, const char*> kHeaders[] = {
    {"Cache-Control", "no-store"},
    {"Cross-Origin-Resource-Policy", "same-origin"},
    {"Referrer-Policy", "no-referrer"},
    {"X-Content-Type-Options", "nosniff"},
};

MHD_Result Answer(MHD_Connection* connection, unsigned int code, const HttpPage& page) {
  MHD_Response* const response = MHD_create_response_from_buffer(
      page.body.size(), const_cast<char*>(page.body.data()), MHD_RESPMEM_MUST_COPY);
  if (response == nullptr) return MHD_NO;
  for (const auto& [name, value] : kHeaders) MHD_add_response_header(response, name, value);
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, page.type.c_str());
  MHD_add_response_header(response, "Content-Security-Policy", page.security_policy.c_str());
  if (code == MHD_HTTP_METHOD_NOT_ALLOWED) {
    MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
  }
  const MHD_Result result = MHD_queue_response(connection, code, response);
  MHD_destroy_response(response);
  return result;
}

MHD_Result AnswerError(MHD_Connection* connection, unsigned int code) {
  return Answer(connection, code,
                {"text/plain; charset=utf-8", absl::StrCat(MHD_get_reason_phrase_for(code), "\n")});
}

constexpr absl::Duration kLookInterval = absl::Milliseconds(250);

int DescriptorOf(MHD_Connection* connection) {
  return MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
}

}  // namespace

// All of them are called by the daemon's thread, the last before it closes a descriptor.
class HttpPort::Callbacks {
 public:
  // Answers as soon as the headers are there, so no body is read.
  static MHD_Result Serve(void* self, MHD_Connection* connection, const char* url,
                          const char* method, const char* version, const char* upload,
                          size_t* upload_size, void** state) {
    HttpPort& port = *static_cast<HttpPort*>(self);
    {
      absl::MutexLock lock(&port.mutex_);
      port.connections_.Asked(DescriptorOf(connection), SteadyNow());
    }
    const absl::string_view asked = method;
    if (asked != MHD_HTTP_METHOD_GET && asked != MHD_HTTP_METHOD_HEAD) {
      return AnswerError(connection, MHD_HTTP_METHOD_NOT_ALLOWED);
    }
    const char* const host = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Host");
    if (host != nullptr && !IsOwnHost(host, port.names_)) {
      return Answer(connection, MHD_HTTP_MISDIRECTED_REQUEST,
                    {"text/plain; charset=utf-8",
                     "This port does not answer to that name. Ask by address, or start the "
                     "aggregator with --metrics-host and the name.\n"});
    }
    const std::optional<HttpPage> page = port.find_(url);
    if (!page) return AnswerError(connection, MHD_HTTP_NOT_FOUND);
    return Answer(connection, MHD_HTTP_OK, *page);
  }

  static void Completed(void* self, MHD_Connection* connection, void** state,
                        MHD_RequestTerminationCode why) {
    HttpPort& port = *static_cast<HttpPort*>(self);
    absl::MutexLock lock(&port.mutex_);
    port.connections_.Answered(DescriptorOf(connection), SteadyNow());
  }

  static void BeginsOrEnds(void* self, MHD_Connection* connection, void** state,
                           MHD_ConnectionNotificationCode what) {
    HttpPort& port = *static_cast<HttpPort*>(self);
    const int fd = DescriptorOf(connection);
    absl::MutexLock lock(&port.mutex_);
    if (what == MHD_CONNECTION_NOTIFY_CLOSED) return port.connections_.End(fd);
    sockaddr_storage address = {};
    socklen_t size = sizeof address;
    getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size);
    port.connections_.Begin(fd, PeerOf(address), SteadyNow());
    if (const std::optional<int> slow = port.connections_.TakeOneToEnd(fd)) {
      shutdown(*slow, SHUT_RDWR);
    }
  }
};

HttpPort::HttpPort(std::vector<std::string> names, Find find, const HttpLimits& limits)
    : names_(std::move(names)),
      find_(std::move(find)),
      connections_({.request = limits.request_timeout,
                    .answer = limits.answer_timeout,
                    .most = limits.connections - limits.free_connections,
                    .most_per_peer = limits.connections_per_peer}) {}

absl::StatusOr<std::unique_ptr<HttpPort>> HttpPort::Listen(const std::string& address,
                                                           const std::vector<std::string>& names,
                                                           Find find, const HttpLimits& limits) {
  const absl::StatusOr<HostAndPort> parsed = ParseAddress(address);
  if (!parsed.ok()) return parsed.status();
  for (const std::string& name : names) {
    if (!name.empty() && name.find_first_of(":/[] ") == std::string::npos) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "'", name, "' is no name that a browser may ask by: wanted a host's, without a port"));
  }
  const absl::StatusOr<ListenAddresses> resolved = ResolveToListen(LocalhostByNumber(address));
  if (!resolved.ok()) return resolved.status();
  std::vector<std::string> own = names;
  own.push_back(parsed->host);
  std::unique_ptr<HttpPort> port(new HttpPort(std::move(own), std::move(find), limits));
  for (const addrinfo* entry = resolved->get(); entry != nullptr && port->daemon_ == nullptr;
       entry = entry->ai_next) {
    unsigned int flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_AUTO;
    if (entry->ai_family == AF_INET6) flags |= MHD_USE_IPv6;
    port->daemon_ = MHD_start_daemon(
        flags, /*port=*/0, /*accept=*/nullptr, nullptr, &Callbacks::Serve, port.get(),
        MHD_OPTION_SOCK_ADDR, entry->ai_addr,                                              //
        MHD_OPTION_NOTIFY_COMPLETED, &Callbacks::Completed, port.get(),                    //
        MHD_OPTION_NOTIFY_CONNECTION, &Callbacks::BeginsOrEnds, port.get(),                //
        MHD_OPTION_CONNECTION_LIMIT, static_cast<unsigned int>(limits.connections),        //
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, static_cast<size_t>(limits.connection_bytes),  //
        MHD_OPTION_END);
  }
  if (port->daemon_ == nullptr) return CannotListenError(address);
  port->slow_ones_ = std::thread([port = port.get()] { port->EndSlowOnes(); });
  return port;
}

// The daemon closes what is shut down.
void HttpPort::EndSlowOnes() {
  while (!stopping_.WaitForNotificationWithTimeout(kLookInterval)) {
    absl::MutexLock lock(&mutex_);
    for (const int fd : connections_.TakeOverdue(SteadyNow())) shutdown(fd, SHUT_RDWR);
  }
}

HttpPort::~HttpPort() {
  stopping_.Notify();
  if (slow_ones_.joinable()) slow_ones_.join();
  if (daemon_ != nullptr) MHD_stop_daemon(daemon_);
}

uint16_t HttpPort::port() const {
  return MHD_get_daemon_info(daemon_, MHD_DAEMON_INFO_BIND_PORT)->port;
}

}  // namespace signpost
