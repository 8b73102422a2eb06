#include "worker/wire_bytes.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

namespace signpost {
namespace {

// Two ends of a TCP connection over loopback.
class Connection {
 public:
  Connection() {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address));
    listen(listener, 1);
    socklen_t size = sizeof(address);
    getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    client_ = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT_EQ(connect(client_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    server_ = accept(listener, nullptr, nullptr);
    close(listener);
  }
  ~Connection() {
    CloseClient();
    close(server_);
  }

  void CloseClient() {
    if (client_ >= 0) close(client_);
    client_ = -1;
  }
  uint16_t port() const { return port_; }
  void ClientSends(size_t bytes) { Transfer(client_, server_, bytes); }
  void ServerSends(size_t bytes) { Transfer(server_, client_, bytes); }

 private:
  static void Transfer(int from, int to, size_t bytes) {
    std::string data(bytes, 'x');
    EXPECT_EQ(write(from, data.data(), bytes), static_cast<ssize_t>(bytes));
    EXPECT_EQ(recv(to, data.data(), bytes, MSG_WAITALL), static_cast<ssize_t>(bytes));
  }

  int client_ = -1, server_ = -1;
  uint16_t port_ = 0;
};

TEST(WireByteCounter, CountsWhatTheSocketSentAndReceived) {
  Connection connection;
  WireByteCounter counter({connection.port()});
  connection.ClientSends(1000);
  connection.ServerSends(300);
  const WireBytes bytes = counter.Read();
  EXPECT_EQ(bytes.sent, 1000);
  EXPECT_EQ(bytes.received, 300);
}

TEST(WireByteCounter, IgnoresConnectionsToOtherPorts) {
  Connection wanted, other;
  WireByteCounter counter({wanted.port()});
  other.ClientSends(1000);
  wanted.ClientSends(7);
  EXPECT_EQ(counter.Read().sent, 7);
}

TEST(WireByteCounter, RemembersAClosedConnection) {
  Connection first, second;
  WireByteCounter counter({first.port(), second.port()});
  first.ClientSends(1000);
  EXPECT_EQ(counter.Read().sent, 1000);
  first.CloseClient();
  second.ClientSends(30);
  EXPECT_EQ(counter.Read().sent, 1030);
}

}  // namespace
}  // namespace signpost
