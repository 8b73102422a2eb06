#include "server/connection_table.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace signpost {
namespace {

constexpr absl::Time kStart = absl::UnixEpoch();

int OpenSocket() { return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); }

sockaddr_storage AddressAt(const char* text) {
  sockaddr_storage address = {};
  if (std::string(text).find(':') == std::string::npos) {
    address.ss_family = AF_INET;
    inet_pton(AF_INET, text, &reinterpret_cast<sockaddr_in&>(address).sin_addr);
  } else {
    address.ss_family = AF_INET6;
    inet_pton(AF_INET6, text, &reinterpret_cast<sockaddr_in6&>(address).sin6_addr);
  }
  return address;
}

std::string PeerAt(const char* text) { return PeerOf(AddressAt(text)); }

TEST(ConnectionTable, CountsAllPeersTogetherAndEachAlone) {
  ConnectionTable table({.connections = 3, .connections_per_peer = 2});
  std::vector<int> sockets;
  const auto add = [&](const char* host) {
    const bool may = table.MayAdd(PeerAt(host), kStart);
    if (may) table.Add(sockets.emplace_back(OpenSocket()), AddressAt(host));
    return may;
  };
  EXPECT_TRUE(add("10.0.0.1"));
  EXPECT_TRUE(add("10.0.0.1"));
  EXPECT_FALSE(add("10.0.0.1"));
  EXPECT_TRUE(add("10.0.0.2"));
  EXPECT_FALSE(add("10.0.0.3"));
  for (const int fd : sockets) close(fd);
}

// Both ends of a connection.
struct Connected {
  int here = -1, there = -1;

  Connected() {
    const int listener = OpenSocket();
    sockaddr_storage address = AddressAt("127.0.0.1");
    socklen_t size = sizeof(sockaddr_in);
    auto* const name = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(listener, name, size), 0);
    EXPECT_EQ(listen(listener, 1), 0);
    EXPECT_EQ(getsockname(listener, name, &size), 0);
    there = OpenSocket();
    EXPECT_EQ(connect(there, name, size), 0);
    here = accept(listener, nullptr, nullptr);
    EXPECT_GE(here, 0);
    close(listener);
  }
};

// Until the kernel knows that the other end is closed.
void AwaitEnd(int socket) {
  pollfd end = {.fd = socket, .events = POLLRDHUP, .revents = 0};
  EXPECT_EQ(poll(&end, 1, /*timeout=*/30000), 1);
}

TEST(ConnectionTable, HasWhatIsThereUntilEitherEndClosesIt) {
  ConnectionTable table({});
  const Connected first, second, third;
  table.Add(first.here, AddressAt("10.0.0.1"));
  table.Add(second.here, AddressAt("2001:db8::1"));
  table.Add(third.here, AddressAt("10.0.0.3"));
  EXPECT_TRUE(table.Has("ipv4:10.0.0.1:0"));
  EXPECT_FALSE(table.Has("ipv4:10.0.0.2:0"));
  close(first.here);
  EXPECT_FALSE(table.Has("ipv4:10.0.0.1:0"));
  EXPECT_TRUE(table.Has("ipv6:%5B2001:db8::1%5D:0"));
  close(second.there);
  AwaitEnd(second.here);
  EXPECT_FALSE(table.Has("ipv6:%5B2001:db8::1%5D:0"));
  // A process that is killed, with something that it has not read, resets it.
  ASSERT_EQ(write(third.here, "x", 1), 1);
  EXPECT_TRUE(table.Has("ipv4:10.0.0.3:0"));
  close(third.there);
  AwaitEnd(third.here);
  EXPECT_FALSE(table.Has("ipv4:10.0.0.3:0"));
  for (const int fd : {first.there, second.here, third.here}) close(fd);
}

TEST(ConnectionTable, ForgetsWhatWasClosed) {
  ConnectionTable table({.connections = 2, .connections_per_peer = 2});
  const int first = OpenSocket(), second = OpenSocket();
  table.Add(first, AddressAt("10.0.0.1"));
  table.Add(second, AddressAt("10.0.0.1"));
  EXPECT_FALSE(table.MayAdd(PeerAt("10.0.0.1"), kStart));
  close(first);
  EXPECT_FALSE(table.MayAdd(PeerAt("10.0.0.1"), kStart)) << "it has just looked";
  EXPECT_TRUE(table.MayAdd(PeerAt("10.0.0.1"), kStart + absl::Seconds(1)));
  EXPECT_EQ(table.size(), 1);
  close(second);
}

TEST(ConnectionTable, TellsAnotherSocketWithTheSameDescriptor) {
  ConnectionTable table({.connections = 1, .connections_per_peer = 1});
  const int first = OpenSocket();
  table.Add(first, AddressAt("10.0.0.1"));
  close(first);
  const int again = OpenSocket();
  ASSERT_EQ(again, first);
  EXPECT_TRUE(table.MayAdd(PeerAt("10.0.0.1"), kStart));
  close(again);
}

TEST(ConnectionTable, DoesNotGrowWithConnectionsThatAreClosed) {
  ConnectionTable table({});
  for (int i = 0; i < 10'000; ++i) {
    ASSERT_TRUE(table.MayAdd(PeerAt("10.0.0.1"), kStart + i * absl::Seconds(1)));
    const int fd = OpenSocket();
    table.Add(fd, AddressAt("10.0.0.1"));
    close(fd);
  }
  EXPECT_LE(table.size(), 64);
}

TEST(ConnectionTable, KnowsHostsByTheirAddresses) {
  EXPECT_EQ(PeerAt("10.0.0.1"), PeerAt("::ffff:10.0.0.1"));
  EXPECT_NE(PeerAt("10.0.0.1"), PeerAt("10.0.0.2"));
  EXPECT_EQ(PeerAt("2001:db8::1"), PeerAt("2001:db8::ffff:1"));
  EXPECT_NE(PeerAt("2001:db8::1"), PeerAt("2001:db8:0:1::1"));
}

TEST(ConnectionTable, SpellsNamesAsGrpcDoes) {
  sockaddr_storage address = AddressAt("10.0.0.1");
  reinterpret_cast<sockaddr_in&>(address).sin_port = htons(4711);
  EXPECT_EQ(NameOf(address), "ipv4:10.0.0.1:4711");
  for (const auto& [host, name] : {std::pair{"::ffff:10.0.0.1", "ipv4:10.0.0.1:4711"},
                                   {"2001:db8::1", "ipv6:%5B2001:db8::1%5D:4711"}}) {
    address = AddressAt(host);
    reinterpret_cast<sockaddr_in6&>(address).sin6_port = htons(4711);
    EXPECT_EQ(NameOf(address), name);
  }
  address = AddressAt("fe80::1");
  reinterpret_cast<sockaddr_in6&>(address).sin6_port = htons(4711);
  reinterpret_cast<sockaddr_in6&>(address).sin6_scope_id = 2;
  EXPECT_EQ(NameOf(address), "ipv6:%5Bfe80::1%252%5D:4711");
}

// Both ends of a connection on this machine.
struct Ends {
  int client = OpenSocket();
  int server = -1;
  sockaddr_storage address = {};  // the client's, to the server

  Ends() {
    socklen_t size = sizeof address;
    const int listener = OpenSocket();
    EXPECT_EQ(listen(listener, 1), 0);
    EXPECT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
    EXPECT_EQ(connect(client, reinterpret_cast<const sockaddr*>(&address), size), 0);
    server = accept(listener, reinterpret_cast<sockaddr*>(&address), &size);
    close(listener);
  }
  ~Ends() {
    close(client);
    close(server);
  }
};

TEST(ConnectionTable, EndsAConnectionByItsName) {
  const Ends ends;
  ConnectionTable table({});
  table.Add(ends.server, ends.address);
  ASSERT_EQ(write(ends.client, "unread", 6), 6);
  EXPECT_FALSE(table.Abort("ipv4:127.0.0.1:1"));
  EXPECT_TRUE(table.Abort(NameOf(ends.address)));
  char bytes[8];
  EXPECT_EQ(read(ends.server, bytes, sizeof bytes), -1);
  EXPECT_EQ(read(ends.client, bytes, sizeof bytes), -1);
  EXPECT_EQ(errno, ECONNRESET);
}

TEST(ConnectionTable, EndsAllOfOneName) {
  const Ends before, now;
  ConnectionTable table({});
  table.Add(before.server, now.address);
  table.Add(now.server, now.address);
  EXPECT_TRUE(table.Abort(NameOf(now.address)));
  char bytes[8];
  EXPECT_EQ(read(now.client, bytes, sizeof bytes), -1);
}

TEST(ConnectionTable, DoesNotEndAConnectionThatHasAnothersDescriptor) {
  auto gone = std::make_unique<Ends>();
  ConnectionTable table({});
  table.Add(gone->server, gone->address);
  Ends other;
  ASSERT_EQ(dup2(other.server, gone->server), gone->server);
  EXPECT_FALSE(table.Abort(NameOf(gone->address)));
  ASSERT_EQ(write(other.client, "word", 4), 4);
  char bytes[8];
  EXPECT_EQ(read(gone->server, bytes, sizeof bytes), 4);
  gone.reset();
  EXPECT_FALSE(table.Abort("ipv4:127.0.0.1:1"));
}

}  // namespace
}  // namespace signpost
