#include "server/connection_table.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace signpost {
namespace {

constexpr absl::Time kStart = absl::UnixEpoch();

int OpenSocket() { return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); }

std::string PeerAt(const char* text) {
  sockaddr_storage address = {};
  if (std::string(text).find(':') == std::string::npos) {
    address.ss_family = AF_INET;
    inet_pton(AF_INET, text, &reinterpret_cast<sockaddr_in&>(address).sin_addr);
  } else {
    address.ss_family = AF_INET6;
    inet_pton(AF_INET6, text, &reinterpret_cast<sockaddr_in6&>(address).sin6_addr);
  }
  return PeerOf(address);
}

TEST(ConnectionTable, CountsAllPeersTogetherAndEachAlone) {
  ConnectionTable table({.connections = 3, .connections_per_peer = 2});
  std::vector<int> sockets;
  const auto add = [&](const std::string& peer) {
    const bool may = table.MayAdd(peer, kStart);
    if (may) table.Add(sockets.emplace_back(OpenSocket()), peer);
    return may;
  };
  EXPECT_TRUE(add("a"));
  EXPECT_TRUE(add("a"));
  EXPECT_FALSE(add("a"));
  EXPECT_TRUE(add("b"));
  EXPECT_FALSE(add("c"));
  for (const int fd : sockets) close(fd);
}

TEST(ConnectionTable, ForgetsWhatWasClosed) {
  ConnectionTable table({.connections = 2, .connections_per_peer = 2});
  const int first = OpenSocket(), second = OpenSocket();
  table.Add(first, "a");
  table.Add(second, "a");
  EXPECT_FALSE(table.MayAdd("a", kStart));
  close(first);
  EXPECT_FALSE(table.MayAdd("a", kStart)) << "it has just looked";
  EXPECT_TRUE(table.MayAdd("a", kStart + absl::Seconds(1)));
  EXPECT_EQ(table.size(), 1);
  close(second);
}

TEST(ConnectionTable, TellsAnotherSocketWithTheSameDescriptor) {
  ConnectionTable table({.connections = 1, .connections_per_peer = 1});
  const int first = OpenSocket();
  table.Add(first, "a");
  close(first);
  const int again = OpenSocket();
  ASSERT_EQ(again, first);
  EXPECT_TRUE(table.MayAdd("a", kStart));
  close(again);
}

TEST(ConnectionTable, DoesNotGrowWithConnectionsThatAreClosed) {
  ConnectionTable table({});
  for (int i = 0; i < 10'000; ++i) {
    ASSERT_TRUE(table.MayAdd("a", kStart + i * absl::Seconds(1)));
    const int fd = OpenSocket();
    table.Add(fd, "a");
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

}  // namespace
}  // namespace signpost
