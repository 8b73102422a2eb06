#include "server/http_port.h"

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/raw_client.h"

namespace signpost {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::unique_ptr<HttpPort> Listen(const HttpLimits& limits = {}) {
  const auto find = [](absl::string_view path) -> std::optional<HttpPage> {
    if (path == "/page") return HttpPage{"text/plain", "what is there"};
    return std::nullopt;
  };
  absl::StatusOr<std::unique_ptr<HttpPort>> port =
      HttpPort::Listen("127.0.0.1:0", {"metrics.example"}, find, limits);
  EXPECT_TRUE(port.ok()) << port.status();
  return *std::move(port);
}

std::string Ask(const HttpPort& port, const std::string& method, const std::string& path) {
  RawClient client(port.port());
  client.Send(
      absl::StrCat(method, " ", path, " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"));
  return client.ReadAll();
}

TEST(HttpPort, HasThePagesThatItKnows) {
  const auto port = Listen();
  const std::string answer = Ask(*port, "GET", "/page?and=what");
  EXPECT_THAT(
      answer,
      AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr("\r\nContent-Type: text/plain\r\n"),
            HasSubstr("\r\nContent-Security-Policy: default-src 'none'"),
            HasSubstr("\r\nX-Content-Type-Options: nosniff\r\n"),
            HasSubstr("\r\nContent-Length: 13\r\n"), EndsWith("\r\n\r\nwhat is there")));
}

TEST(HttpPort, AnswersHeadWithoutThePage) {
  const auto port = Listen();
  EXPECT_THAT(Ask(*port, "HEAD", "/page"),
              AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr("\r\nContent-Length: 13\r\n"),
                    EndsWith("\r\n\r\n")));
}

TEST(HttpPort, HasNothingElse) {
  const auto port = Listen();
  for (const char* path : {"/", "/page/", "/../page", "/%2e%2e/etc/passwd", "//page"}) {
    EXPECT_THAT(Ask(*port, "GET", path), StartsWith("HTTP/1.1 404 Not Found\r\n")) << path;
  }
}

TEST(HttpPort, TakesNothing) {
  const auto port = Listen();
  for (const char* method : {"POST", "PUT", "DELETE", "OPTIONS", "TRACE", "get"}) {
    EXPECT_THAT(Ask(*port, method, "/page"),
                AllOf(StartsWith("HTTP/1.1 405 "), HasSubstr("\r\nAllow: GET, HEAD\r\n")))
        << method;
  }
  RawClient uploads(port->port());
  uploads.Send(
      "POST /page HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000000\r\n\r\nabc");
  EXPECT_THAT(uploads.ReadAll(), StartsWith("HTTP/1.1 405 "));
}

TEST(HttpPort, RefusesRequestsThatAreTooLong) {
  const auto port = Listen();
  for (const std::string& request :
       {absl::StrCat("GET /", std::string(1 << 20, 'x'), " HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        absl::StrCat("GET /page HTTP/1.1\r\nHost: localhost\r\nX: ", std::string(1 << 20, 'x'),
                     "\r\n\r\n")}) {
    RawClient client(port->port());
    client.Send(request);
    EXPECT_THAT(client.ReadAll(), Not(testing::AnyOf(HasSubstr("200 OK"), StartsWith("timeout"))));
  }
  EXPECT_THAT(Ask(*port, "GET", "/page"), HasSubstr("200 OK"));
}

TEST(HttpPort, RefusesWhatIsNotHttp) {
  const auto port = Listen();
  for (const std::string& request :
       {std::string("\r\n\r\n\r\n"), std::string(100, '\0') + "\n\n",
        std::string("\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"), std::string("GET\r\n\r\n")}) {
    RawClient client(port->port());
    client.Send(request);
  }
  EXPECT_THAT(Ask(*port, "GET", "/page"), HasSubstr("200 OK"));
}

TEST(HttpPort, AnswersOthersWhileSomeDawdle) {
  const auto port = Listen({.connections = 8, .connections_per_peer = 8, .free_connections = 4});
  std::vector<RawClient> slow;
  for (int i = 0; i < 20; ++i) {
    slow.emplace_back(port->port());
    slow.back().Send("GET /pa");
    EXPECT_THAT(Ask(*port, "GET", "/page"), HasSubstr("200 OK")) << i;
  }
}

// A byte now and then does not renew the time that a request has.
TEST(HttpPort, EndsRequestsThatComeByTheByte) {
  const auto port = Listen({.request_timeout = absl::Milliseconds(500)});
  RawClient slow(port->port());
  absl::Notification ended;
  std::thread sender([&] {
    slow.SendSome("GET /");
    while (!ended.WaitForNotificationWithTimeout(absl::Milliseconds(50))) slow.SendSome("x");
  });
  EXPECT_NE(slow.ReadAll(), "timeout");
  ended.Notify();
  sender.join();
}

TEST(HttpPort, AnswersToItsOwnNamesOnly) {
  const auto port = Listen();
  const auto answer_to = [&port](const std::string& host) {
    RawClient client(port->port());
    client.Send(
        absl::StrCat("GET /page HTTP/1.1\r\nHost: ", host, "\r\nConnection: close\r\n\r\n"));
    return client.ReadAll();
  };
  EXPECT_THAT(answer_to("evil.example"),
              AllOf(StartsWith("HTTP/1.1 421 "), HasSubstr("--metrics-host")));
  for (const char* host : {"127.0.0.1:9090", "localhost", "metrics.example"}) {
    EXPECT_THAT(answer_to(host), StartsWith("HTTP/1.1 200 OK\r\n")) << host;
  }
}

TEST(HttpPort, EndsConnectionsThatSayNothing) {
  const auto port = Listen({.request_timeout = absl::Milliseconds(300)});
  RawClient silent(port->port());
  RawClient half(port->port());
  half.Send("GET /page HTTP/1.1\r\n");
  EXPECT_NE(silent.ReadAll(), "timeout");
  EXPECT_NE(half.ReadAll(), "timeout");
}

TEST(HttpPort, EndsAPeersSlowestConnectionForItsNext) {
  const auto port = Listen({.connections = 8, .connections_per_peer = 2, .free_connections = 2});
  RawClient first(port->port());
  RawClient second(port->port());
  RawClient third(port->port());
  EXPECT_EQ(first.ReadAll(), "");
  for (RawClient* client : {&second, &third}) {
    client->Send("GET /page HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    EXPECT_THAT(client->ReadAll(), HasSubstr("200 OK"));
  }
}

TEST(HttpPort, RefusesANameThatIsNone) {
  for (const char* name : {"", "metrics.example:443", "http://metrics.example"}) {
    const auto port =
        HttpPort::Listen("127.0.0.1:0", {name}, [](absl::string_view) { return std::nullopt; });
    EXPECT_EQ(port.status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
}

TEST(HttpPort, SaysSoWhenItsPortIsTaken) {
  const auto port = Listen();
  const std::string address = absl::StrCat("127.0.0.1:", port->port());
  const auto second = HttpPort::Listen(address, {}, [](absl::string_view) { return std::nullopt; });
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(second.status().message(),
              AllOf(HasSubstr(address), HasSubstr("another process may have the port")));
}

}  // namespace
}  // namespace signpost
