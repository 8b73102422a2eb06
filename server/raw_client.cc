#include "server/raw_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace signpost {

RawClient::RawClient(uint16_t port) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  const timeval patience = {.tv_sec = 10};
  setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
}

RawClient::RawClient(RawClient&& other) : fd_(std::exchange(other.fd_, -1)) {}

RawClient::~RawClient() {
  if (fd_ >= 0) close(fd_);
}

void RawClient::Send(const std::string& bytes) {
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t size = send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (size < 0) return;
    sent += size;
  }
}

void RawClient::SendSome(const std::string& bytes) {
  send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

std::string RawClient::ReadAll() {
  std::string all;
  char buffer[4096];
  while (true) {
    const ssize_t size = recv(fd_, buffer, sizeof buffer, 0);
    if (size == 0 || (size < 0 && errno == ECONNRESET)) return all;
    if (size < 0) return "timeout";
    all.append(buffer, size);
  }
}

std::string HttpGet(uint16_t port, const std::string& path) {
  RawClient client(port);
  client.Send(
      absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"));
  return client.ReadAll();
}

}  // namespace signpost
