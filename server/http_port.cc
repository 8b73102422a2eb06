#include "server/http_port.h"

#include <microhttpd.h>
#include <sys/socket.h>

#include <utility>

#include "absl/strings/str_cat.h"
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

// Has libmicrohttpd's signature. Answers as soon as the headers are there, so no body is read.
MHD_Result Serve(void* find, MHD_Connection* connection, const char* url, const char* method,
                 const char* version, const char* upload, size_t* upload_size, void** state) {
  const absl::string_view asked = method;
  if (asked != MHD_HTTP_METHOD_GET && asked != MHD_HTTP_METHOD_HEAD) {
    return AnswerError(connection, MHD_HTTP_METHOD_NOT_ALLOWED);
  }
  const std::optional<HttpPage> page = (*static_cast<const HttpPort::Find*>(find))(url);
  if (!page) return AnswerError(connection, MHD_HTTP_NOT_FOUND);
  return Answer(connection, MHD_HTTP_OK, *page);
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpPort>> HttpPort::Listen(const std::string& address, Find find,
                                                           const HttpLimits& limits) {
  const absl::StatusOr<ListenAddresses> resolved = ResolveToListen(address);
  if (!resolved.ok()) return resolved.status();
  std::unique_ptr<HttpPort> port(new HttpPort(std::move(find)));
  unsigned int flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_AUTO;
  if ((*resolved)->ai_family == AF_INET6) flags |= MHD_USE_IPv6;
  port->daemon_ = MHD_start_daemon(
      flags, /*port=*/0, /*accept=*/nullptr, nullptr, &Serve, const_cast<Find*>(&port->find_),
      MHD_OPTION_SOCK_ADDR, (*resolved)->ai_addr,                                  //
      MHD_OPTION_CONNECTION_LIMIT, static_cast<unsigned int>(limits.connections),  //
      MHD_OPTION_PER_IP_CONNECTION_LIMIT, static_cast<unsigned int>(limits.connections_per_peer),
      MHD_OPTION_CONNECTION_TIMEOUT,
      static_cast<unsigned int>(absl::ToInt64Seconds(limits.idle_timeout)),              //
      MHD_OPTION_CONNECTION_MEMORY_LIMIT, static_cast<size_t>(limits.connection_bytes),  //
      MHD_OPTION_END);
  if (port->daemon_ != nullptr) return port;
  return CannotListenError(address);
}

HttpPort::~HttpPort() {
  if (daemon_ != nullptr) MHD_stop_daemon(daemon_);
}

uint16_t HttpPort::port() const {
  return MHD_get_daemon_info(daemon_, MHD_DAEMON_INFO_BIND_PORT)->port;
}

}  // namespace signpost
