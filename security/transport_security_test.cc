#include "security/transport_security.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "security/loopback.h"
#include "security/plain_text_warning.h"

namespace signpost {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(TransportSecurity, PlainTextOnLoopbackIsAllowed) {
  for (const char* address :
       {"127.0.0.1:0", "127.9.8.7:4000", "localhost:0", "[::1]:65535", "unix:/tmp/signpost.sock"}) {
    EXPECT_TRUE(CheckTransport(address, {}).ok()) << address;
  }
}

TEST(TransportSecurity, PlainTextBeyondLoopbackIsRefusedWithTheReason) {
  for (const char* address : {"0.0.0.0:0", "[::]:0", "10.1.2.3:4000", "128.0.0.1:0",
                              "[::ffff:8.8.8.8]:0", "[fe80::1]:0", "host.invalid:4000"}) {
    const absl::Status status = CheckTransport(address, {});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(status.message(), AllOf(HasSubstr(address), HasSubstr("--tls-dir"),
                                        HasSubstr("--insecure-i-understand")));
    EXPECT_TRUE(CheckTransport(address, {.insecure = true}).ok()) << address;
    EXPECT_TRUE(CheckTransport(address, {.tls_dir = "certificates"}).ok()) << address;
  }
}

TEST(TransportSecurity, IsOneOfTheTwo) {
  const absl::Status status =
      CheckTransport("127.0.0.1:0", {.tls_dir = "certificates", .insecure = true});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("take one of them back"));
}

TEST(TransportSecurity, ATokenTravelsWithTlsOnly) {
  for (const char* address : {"127.0.0.1:0", "10.1.2.3:4000", "unix:/tmp/signpost.sock"}) {
    const absl::Status status = CheckTransport(address, {.token_file = "token"});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(status.message(), AllOf(HasSubstr("the token in token would travel in plain text"),
                                        HasSubstr("--tls-dir")));
    EXPECT_FALSE(CheckTransport(address, {.insecure = true, .token_file = "token"}).ok());
  }
  for (const char* address : {"127.0.0.1:0", "10.1.2.3:4000"}) {
    EXPECT_TRUE(CheckTransport(address, {.tls_dir = "tls", .token_file = "token"}).ok());
  }
}

// Its peers would have no identities, and nobody would say so.
TEST(TransportSecurity, TlsIsNotAtASocketInTheFileSystem) {
  const absl::Status status = CheckTransport("unix:/tmp/signpost.sock", {.tls_dir = "tls"});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("without TLS and identities"));
}

// Whatever a hosts file, or a name server, says of localhost.
TEST(TransportSecurity, LoopbackIsConnectedToByNumber) {
  EXPECT_EQ(GrpcTarget("localhost:5"), "ipv6:[::ffff:127.0.0.1]:5,[::1]:5");
  EXPECT_EQ(GrpcTarget("127.1:5"), "ipv4:127.0.0.1:5");
  EXPECT_EQ(GrpcTarget("127.9.8.7:4000"), "ipv4:127.9.8.7:4000");
  EXPECT_EQ(GrpcTarget("[0:0::1]:5"), "ipv6:[::1]:5");
  for (const char* address : {"host:5", "10.1.2.3:5", "[fe80::1]:5", "unix:/path", "localhost"}) {
    EXPECT_EQ(GrpcTarget(address), address);
  }
  EXPECT_EQ(LocalhostByNumber("localhost:0"), "127.0.0.1:0");
  EXPECT_EQ(LocalhostByNumber("host:5"), "host:5");
}

TEST(TransportSecurity, RefusesMalformedAddresses) {
  for (const char* address : {"",
                              "4000",
                              ":4000",
                              "127.0.0.1",
                              "127.0.0.1:",
                              "127.0.0.1:x",
                              "127.0.0.1:65536",
                              "127.0.0.1:-1",
                              "::1",
                              "::1:4000",
                              "[::1]",
                              "[::1:4000",
                              "[127.0.0.1]:0",
                              "[localhost:0",
                              "localhost]:0",
                              "localhost: 5",
                              "localhost:+5",
                              "local host:5",
                              "[::1]]:5",
                              "::1]:5",
                              "localhost:5,10.1.2.3:5"}) {
    EXPECT_EQ(CheckTransport(address, {.insecure = true}).code(),
              absl::StatusCode::kInvalidArgument)
        << address;
  }
}

TEST(PlainTextWarning, ComesAtOnceAndAgainUntilItIsGone) {
  absl::BlockingCounter three(3);
  std::vector<std::string> lines;
  {
    const PlainTextWarning warning(
        "10.0.0.1:4000",
        [&](const std::string& line) {
          if (lines.size() == 3) return;
          lines.push_back(line);
          three.DecrementCount();
        },
        absl::Milliseconds(1));
    three.Wait();
  }
  EXPECT_THAT(lines, testing::Each(HasSubstr("plain text at 10.0.0.1:4000")));
}

}  // namespace
}  // namespace signpost
