// Peers that mean harm, while a job trains over mTLS: it must go on with the bits of a quiet run,
// and the aggregator's memory must stay within bounds.

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpc/support/log.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "proto/aggregator.grpc.pb.h"
#include "proto/aggregator.pb.h"
#include "proto/payload.h"
#include "proto/steady_time.h"
#include "security/certificate.h"
#include "security/client_security.h"
#include "security/tls_dir.h"
#include "tests/chaos/supervised.h"
#include "tests/cluster.h"
#include "tests/job.h"
#include "worker/grpc_channel.h"

namespace signpost::testing {
namespace {

// What the aggregator's memory may grow by under an attack: --max-receive-bytes is 32 MiB here, and
// what gRPC has for calls that begin and end is not in it.
constexpr size_t kMemoryBudget = size_t{256} << 20;

// What gRPC keeps of headers that do not end was up to 246 MiB.
constexpr size_t kLargeMemoryBudget = size_t{512} << 20;

// The machine's.
constexpr size_t kAnyMemory = size_t{1} << 40;

constexpr absl::Duration kHandshakeTimeout = absl::Seconds(2);

JobOptionsForTest Job() {
  JobOptionsForTest job;
  job.workers = 2;
  job.steps = 30;
  return job;
}

class AttackTest : public ::testing::Test {
 protected:
  AttackTest() {
    gpr_set_log_function([](gpr_log_func_args*) {});
    signal(SIGPIPE, SIG_IGN);  // OpenSSL writes to what may be closed
    EXPECT_NE(mkdtemp(directory_), nullptr);
    Certify("aggregator", "spiffe://signpost/aggregator");
    Certify("worker", "spiffe://signpost/worker/test");
    Certify("attacker", "spiffe://signpost/worker/other");
    SupervisedOptions options;
    options.flags = {"--tls-dir=" + TlsDir("aggregator"),
                     absl::StrCat("--handshake-timeout=", absl::FormatDuration(kHandshakeTimeout)),
                     "--max-connections=64",
                     "--max-connections-per-peer=32",
                     "--max-message-bytes=1048576",
                     "--max-receive-bytes=33554432",
                     "--max-held-bytes=33554432"};
    aggregator_ = std::make_unique<Supervised>(options);
    absl::SimpleAtoi(aggregator_->target().substr(aggregator_->target().rfind(':') + 1), &port_);
  }

  ~AttackTest() override {
    aggregator_.reset();
    std::filesystem::remove_all(directory_);
  }

  std::string TlsDir(const std::string& name) const { return absl::StrCat(directory_, "/", name); }
  void Certify(const std::string& name, const std::string& uri) {
    const auto files = authority_.Issue(*Identity::Parse(uri), absl::Hours(1));
    EXPECT_TRUE(WriteTlsDir(TlsDir(name), *files).ok());
  }

  std::shared_ptr<const ClientSecurity> SecurityOf(const std::string& name) {
    return *ClientSecurity::Open({.tls_dir = TlsDir(name)}, {aggregator_->target()},
                                 [](const std::string&) {});
  }

  std::vector<std::unique_ptr<Channel>> Connect() {
    std::vector<std::unique_ptr<Channel>> channels;
    channels.push_back(ConnectToAggregator(aggregator_->target(), FailureTimeout(), nullptr,
                                           SecurityOf("worker")));
    return channels;
  }

  // Trains once the attack is under way, which then goes on until the job is done, and expects the
  // bits of a quiet run and no growth of memory. `attack` is called again and again.
  void TrainUnder(const std::function<void()>& attack, size_t budget = kMemoryBudget) {
    Cluster quiet({});
    const auto expected = Train(quiet, Job());
    EXPECT_EQ(Train([&] { return Connect(); }, Job()), expected);  // what a job takes by itself
    const size_t before = MemoryBytes();
    ResetPeakMemory();
    std::atomic<bool> over = false;
    absl::Notification begun;
    std::thread attacker([&] {
      attack();
      begun.Notify();
      while (!over) attack();
    });
    begun.WaitForNotification();
    EXPECT_EQ(Train([&] { return Connect(); }, Job()), expected);
    over = true;
    attacker.join();
    EXPECT_THAT(aggregator_->ends(), ::testing::IsEmpty());
    EXPECT_LT(PeakMemoryBytes(), before + budget);
    RecordProperty("grown_kib", static_cast<int>((PeakMemoryBytes() - before) / 1024));
  }

  size_t MemoryBytes() const {
    size_t all = 0, resident = 0;
    std::ifstream(absl::StrCat("/proc/", aggregator_->pid(), "/statm")) >> all >> resident;
    return resident * sysconf(_SC_PAGESIZE);
  }

  // Since the last reset (proc(5), clear_refs).
  size_t PeakMemoryBytes() const {
    std::ifstream status(absl::StrCat("/proc/", aggregator_->pid(), "/status"));
    for (std::string line; std::getline(status, line);) {
      size_t kib = 0;
      if (sscanf(line.c_str(), "VmHWM: %zu kB", &kib) == 1) return kib * 1024;
    }
    ADD_FAILURE() << "no VmHWM";
    return 0;
  }
  void ResetPeakMemory() const {
    std::ofstream(absl::StrCat("/proc/", aggregator_->pid(), "/clear_refs")) << "5";
  }

  // A TCP connection from another loopback address than the workers', so from another peer. -1: it
  // was refused.
  int ConnectFrom(const char* source) const {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    inet_pton(AF_INET, source, &address.sin_addr);
    EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    address.sin_port = htons(static_cast<uint16_t>(port_));
    if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return fd;
    close(fd);
    return -1;
  }

  char directory_[40] = "/tmp/signpost-attack-XXXXXX";
  Authority authority_ = *Authority::Make("Signpost test", absl::Hours(24));
  std::unique_ptr<Supervised> aggregator_;
  uint32_t port_ = 0;
};

// Blocks until the other side closes the connection, whatever it sends before.
bool AwaitClosed(int fd) {
  char bytes[4096];
  while (true) {
    pollfd readable = {fd, POLLIN, 0};
    if (poll(&readable, 1, /*timeout_ms=*/30'000) != 1) return false;
    const ssize_t got = read(fd, bytes, sizeof bytes);
    if (got == 0 || (got < 0 && errno != EINTR)) return true;
  }
}

TEST_F(AttackTest, ConnectionsThatSayNothingAreClosed) {
  TrainUnder([&] {
    const int fd = ConnectFrom("127.0.0.2");
    const int slow = ConnectFrom("127.0.0.2");
    EXPECT_EQ(write(slow, "\x16\x03", 2), 2);  // how a TLS handshake begins
    for (const int connection : {fd, slow}) {
      EXPECT_TRUE(AwaitClosed(connection));
      close(connection);
    }
  });
}

TEST_F(AttackTest, OnePeerCannotTakeAllConnections) {
  TrainUnder([&] {
    std::vector<pollfd> held;
    for (int i = 0; i < 100; ++i) {
      const int fd = ConnectFrom("127.0.0.2");
      if (fd >= 0) held.push_back({fd, POLLIN | POLLRDHUP, 0});
    }
    // Those beyond its limit are closed at once, the others when they have said nothing for long.
    const absl::Time start = absl::Now();
    size_t closed = 0;
    while (closed + 32 < held.size() && absl::Now() < start + absl::Seconds(30)) {
      poll(held.data(), held.size(), /*timeout_ms=*/10);
      closed =
          std::count_if(held.begin(), held.end(), [](const pollfd& p) { return p.revents != 0; });
    }
    if (held.size() == 100) {
      EXPECT_LT(absl::Now() - start, kHandshakeTimeout) << closed;
    }
    for (const pollfd& connection : held) close(connection.fd);
  });
}

// Of the attacker's own job.
JoinRequest OtherJoin(uint32_t rank, uint32_t world_size, uint32_t chunks,
                      uint32_t chunk_elements) {
  JoinRequest request;
  request.set_job("other");
  request.set_rank(rank);
  request.set_incarnation(rank + 1);
  request.set_world_size(world_size);
  request.set_shard_count(1);
  request.mutable_options()->set_block_elements(4096);
  request.mutable_options()->set_chunk_elements(chunk_elements);
  request.mutable_options()->set_gamma(1.35f);
  Tensor& tensor = *request.add_tensors();
  tensor.set_name("all");
  tensor.add_shape(uint64_t{chunks} * chunk_elements);
  return request;
}

// 160 MiB of a job of the attacker's own, all of whose rounds wait for a rank that sends nothing.
TEST_F(AttackTest, AJobThatSendsMoreThanThereIsMemoryForIsTheOneThatWaits) {
  constexpr uint32_t kWorkers = 161, kChunks = 16, kChunkElements = 1 << 14;
  const auto channel =
      ConnectToAggregator(aggregator_->target(), FailureTimeout(), nullptr, SecurityOf("attacker"));
  uint64_t epoch = 0;
  OnEachRank(kWorkers, [&](uint32_t rank) {
    const auto welcome = channel->Join(OtherJoin(rank, kWorkers, kChunks, kChunkElements),
                                       SteadyNow() + absl::Seconds(60), Channel::MayWait);
    ASSERT_TRUE(welcome.ok()) << welcome.status();
    if (rank == 0) epoch = welcome->epoch();
  });

  const auto payload = std::make_shared<Payload>(4 * kChunkElements);
  std::memset(payload->data(), 0, payload->size());
  absl::Mutex mutex;
  int waiting = 0, refused = 0;  // under the mutex
  const auto await_at_most = [&](int most) {
    const auto reached = [&] { return waiting <= most; };
    const absl::MutexLock lock(&mutex, absl::Condition(&reached));
  };
  const auto send = [&](uint32_t rank, uint32_t chunk) {
    FrameHeader header;
    header.set_job("other");
    header.set_epoch(epoch);
    header.set_rank(rank);
    header.set_incarnation(rank + 1);
    header.set_chunk(chunk);
    header.set_codec(FLOAT32);
    header.set_payload_crc32c(Crc32c(payload->span()));
    {
      const absl::MutexLock lock(&mutex);
      ++waiting;
    }
    channel->Exchange(header, payload, SteadyNow() + absl::Milliseconds(500),
                      [&](absl::StatusOr<Answer> answer) {
                        EXPECT_FALSE(answer.ok());
                        const absl::MutexLock lock(&mutex);
                        if (absl::IsResourceExhausted(answer.status())) ++refused;
                        --waiting;
                      });
    await_at_most(256);
  };
  TrainUnder([&] {
    for (uint32_t rank = 1; rank < kWorkers; ++rank) {
      for (uint32_t chunk = 0; chunk < kChunks; ++chunk) send(rank, chunk);
    }
  });
  await_at_most(0);
  EXPECT_GT(refused, 0);
}

// A gigabyte of them, whichever chunk is furthest behind.
TEST_F(AttackTest, AJobWhoseRanksHaveMoreFramesThanThereIsMemoryForDoesNotBegin) {
  const auto channel =
      ConnectToAggregator(aggregator_->target(), FailureTimeout(), nullptr, SecurityOf("attacker"));
  const auto welcome =
      channel->Join(OtherJoin(0, /*world_size=*/1023, 1, /*chunk_elements=*/1 << 18),
                    SteadyNow() + absl::Seconds(60), Channel::MayWait);
  EXPECT_TRUE(absl::IsResourceExhausted(welcome.status())) << welcome.status();
  EXPECT_THAT(std::string(welcome.status().message()), ::testing::HasSubstr("--max-held-bytes"));
}

TEST_F(AttackTest, OversizeMessagesAreRefusedBeforeMemoryIsTaken) {
  const auto security = SecurityOf("attacker");
  grpc::ChannelArguments arguments;
  arguments.SetMaxSendMessageSize(-1);
  grpc::GenericStub stub(grpc::CreateCustomChannel(
      aggregator_->target(), security->CredentialsFor(aggregator_->target()), arguments));
  const grpc::Slice slice(std::string(size_t{640} << 20, 'x'));
  TrainUnder([&] {
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer response;
    grpc::ClientContext context;
    grpc::Status status;
    absl::Notification done;
    stub.UnaryCall(&context, "/signpost.AggregatorService/Exchange", {}, &request, &response,
                   [&](grpc::Status result) {
                     status = std::move(result);
                     done.Notify();
                   });
    done.WaitForNotification();
    // Or its connection was closed, because the bytes of one that is on its way are many already.
    EXPECT_THAT(status.error_code(), ::testing::AnyOf(grpc::StatusCode::RESOURCE_EXHAUSTED,
                                                      grpc::StatusCode::UNAVAILABLE))
        << status.error_message();
  });
}

// TLS as somebody who has a certificate, and bytes of one's own behind it.
class TlsConnection {
 public:
  TlsConnection(int fd, const std::string& tls_dir) : fd_(fd), context_(SSL_CTX_new(TLS_method())) {
    SSL_CTX_use_certificate_chain_file(context_, (tls_dir + "/tls.crt").c_str());
    SSL_CTX_use_PrivateKey_file(context_, (tls_dir + "/tls.key").c_str(), SSL_FILETYPE_PEM);
    const unsigned char kProtocols[] = "\x02h2";
    SSL_CTX_set_alpn_protos(context_, kProtocols, 3);
    ssl_ = SSL_new(context_);
    SSL_set_fd(ssl_, fd_);
    is_open_ = SSL_connect(ssl_) == 1;
    // The other side may stop reading.
    const timeval timeout = {.tv_sec = 1, .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
  }
  ~TlsConnection() {
    SSL_free(ssl_);
    SSL_CTX_free(context_);
    close(fd_);
  }

  bool is_open() const { return is_open_; }
  // Until it is closed, or silent for a second.
  void ReadAll() {
    char bytes[4096];
    while (SSL_read(ssl_, bytes, sizeof bytes) > 0) {
    }
  }
  // False: it was closed, or nobody reads.
  bool Write(const std::string& bytes) {
    return SSL_write(ssl_, bytes.data(), static_cast<int>(bytes.size())) > 0;
  }

 private:
  const int fd_;
  SSL_CTX* const context_;
  SSL* ssl_ = nullptr;
  bool is_open_ = false;
};

// HTTP/2, RFC 9113, section 4.1.
std::string FrameOf(uint8_t type, uint8_t flags, uint32_t stream, const std::string& payload) {
  std::string frame;
  for (const int shift : {16, 8, 0}) frame.push_back(static_cast<char>(payload.size() >> shift));
  frame.push_back(static_cast<char>(type));
  frame.push_back(static_cast<char>(flags));
  for (const int shift : {24, 16, 8, 0}) frame.push_back(static_cast<char>(stream >> shift));
  return frame + payload;
}

constexpr uint8_t kData = 0, kHeaders = 1, kReset = 3, kSettings = 4, kPing = 6, kContinuation = 9;
constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

std::string Greeting() { return kPreface + FrameOf(kSettings, 0, 0, ""); }

// RFC 7541, section 5.1, with a prefix of 7 bits.
std::string IntegerOf(size_t value) {
  if (value < 127) return std::string(1, static_cast<char>(value));
  std::string bytes(1, 127);
  for (value -= 127; value >= 128; value /= 128) {
    bytes.push_back(static_cast<char>(value % 128 + 128));
  }
  bytes.push_back(static_cast<char>(value));
  return bytes;
}

// A field that HPACK neither indexes nor compresses (RFC 7541, section 6.2.2).
std::string FieldOf(const std::string& name, const std::string& value) {
  return absl::StrCat(std::string(1, '\0'), IntegerOf(name.size()), name, IntegerOf(value.size()),
                      value);
}

// How a call of the method begins.
std::string CallFields(const std::string& method) {
  return FieldOf(":method", "POST") + FieldOf(":scheme", "https") +
         FieldOf(":path", "/signpost.AggregatorService/" + method) + FieldOf(":authority", "a") +
         FieldOf("te", "trailers") + FieldOf("content-type", "application/grpc");
}

// What a TLS client says first.
std::string ClientHello() {
  SSL_CTX* const context = SSL_CTX_new(TLS_method());
  SSL* const ssl = SSL_new(context);
  BIO* const out = BIO_new(BIO_s_mem());
  SSL_set_bio(ssl, BIO_new(BIO_s_mem()), out);
  SSL_connect(ssl);
  char* bytes = nullptr;
  const long size = BIO_get_mem_data(out, &bytes);
  std::string hello(bytes, size);
  SSL_free(ssl);
  SSL_CTX_free(context);
  return hello;
}

// Slowloris: what is slow is not silent.
TEST_F(AttackTest, HandshakesOfAByteAtATimeAreClosedInTheirTime) {
  const std::string hello = ClientHello();
  ASSERT_GT(hello.size(), 200);
  TrainUnder([&] {
    std::vector<pollfd> slow;
    for (int i = 0; i < 24; ++i) {
      const int fd = ConnectFrom("127.0.0.2");
      if (fd >= 0) slow.push_back({fd, POLLIN | POLLRDHUP, 0});
    }
    const absl::Time start = absl::Now();
    size_t sent = 0, closed = 0;
    while (closed < slow.size() && sent + 1 < hello.size()) {
      for (const pollfd& connection : slow) send(connection.fd, &hello[sent], 1, MSG_NOSIGNAL);
      ++sent;
      poll(nullptr, 0, /*timeout_ms=*/25);  // the attack's own pace
      poll(slow.data(), slow.size(), /*timeout_ms=*/0);
      closed = absl::c_count_if(slow, [](const pollfd& p) { return p.revents != 0; });
    }
    EXPECT_EQ(closed, slow.size()) << "after " << absl::Now() - start;
    for (const pollfd& connection : slow) close(connection.fd);
  });
}

// Calls without a deadline, whose frames never end: a byte now and then shows that they are alive.
TEST_F(AttackTest, CallsThatAreNeverFinishedTakeSomeKilobytesEach) {
  constexpr uint32_t kStreams = 1000;
  std::string calls = Greeting();
  for (uint32_t stream = 1; stream < 2 * kStreams; stream += 2) {
    // Of a message of a mebibyte.
    calls += FrameOf(kHeaders, /*END_HEADERS=*/4, stream, CallFields("Exchange")) +
             FrameOf(kData, 0, stream, std::string("\0\0\x10\0\0", 5) + std::string(100, 'x'));
  }
  const std::string headers =
      FrameOf(kHeaders, /*END_HEADERS=*/4, 2 * kStreams + 1, CallFields("Exchange"));
  std::vector<std::unique_ptr<TlsConnection>> slow(16);
  size_t step = 0;
  int opened = 0;
  TrainUnder([&] {
    for (auto& connection : slow) {
      if (connection == nullptr || !connection->is_open()) {
        connection = std::make_unique<TlsConnection>(ConnectFrom("127.0.0.2"), TlsDir("attacker"));
        if (!connection->is_open() || !connection->Write(calls)) continue;
        opened += kStreams;
      }
      // The headers of one more call, and then its data.
      const bool is_alive = connection->Write(
          step < headers.size() ? headers.substr(step, 1)
                                : FrameOf(kData, 0, 2 * (step % kStreams) + 1, "x"));
      if (!is_alive) connection.reset();
    }
    ++step;
    poll(nullptr, 0, /*timeout_ms=*/5);  // the attack's own pace
  });
  EXPECT_GT(opened, 0);
  RecordProperty("opened", opened);
}

// CVE-2023-33953: a field whose length says that it goes on for a gigabyte, in as many frames as it
// takes. They use up what the transport may hold, and jobs wait for as long as they are there.
TEST_F(AttackTest, FieldsThatDoNotEndHoldJobsUpAndTakeNoMoreThanTheirShare) {
  const std::string field = std::string(1, '\0') + IntegerOf(1) + "x" + IntegerOf(1 << 30);
  std::string rest;
  while (rest.size() < size_t{1} << 20) {
    rest += FrameOf(kContinuation, 0, 1, std::string(16384, 'x'));
  }
  Cluster quiet({});
  const auto expected = Train(quiet, Job());
  EXPECT_EQ(Train([&] { return Connect(); }, Job()), expected);
  const size_t before = MemoryBytes();
  ResetPeakMemory();
  size_t sent = 0;
  {
    std::vector<std::unique_ptr<TlsConnection>> bombs;
    for (int i = 0; i < 4; ++i) {
      bombs.push_back(
          std::make_unique<TlsConnection>(ConnectFrom("127.0.0.2"), TlsDir("attacker")));
      ASSERT_TRUE(bombs.back()->is_open());
      ASSERT_TRUE(bombs.back()->Write(Greeting() + FrameOf(kHeaders, 0, 1, field)));
    }
    const absl::Time end = absl::Now() + absl::Seconds(5);
    for (const auto& bomb : bombs) {
      for (int i = 0; i < 128 && absl::Now() < end && bomb->Write(rest); ++i) sent += rest.size();
    }
  }
  EXPECT_LT(sent, size_t{512} << 20) << "nobody stops reading";
  EXPECT_EQ(Train([&] { return Connect(); }, Job()), expected);
  EXPECT_THAT(aggregator_->ends(), ::testing::IsEmpty());
  EXPECT_LT(PeakMemoryBytes(), before + kLargeMemoryBudget);
  RecordProperty("grown_kib", static_cast<int>((PeakMemoryBytes() - before) / 1024));
  RecordProperty("sent_mib", static_cast<int>(sent >> 20));
}

TEST_F(AttackTest, PingsWhoseAnswersNobodyReadsTakeNoMemory) {
  std::string pings;
  while (pings.size() < size_t{1} << 20) pings += FrameOf(kPing, 0, 0, "12345678");
  int connections = 0;
  TrainUnder([&] {
    TlsConnection connection(ConnectFrom("127.0.0.2"), TlsDir("attacker"));
    // It may have as many connections as it is allowed, still being closed.
    if (!connection.is_open() || !connection.Write(Greeting())) return;
    ++connections;
    for (int i = 0; i < 64 && connection.Write(pings); ++i) {
    }
  });
  EXPECT_GT(connections, 0);
}

// CVE-2023-44487. What it takes is not bounded (SECURITY.md), but by the connection's end.
TEST_F(AttackTest, CallsThatAreResetAtOnceEndTheirConnection) {
  constexpr uint32_t kCalls = 200'000;
  const std::string fields = CallFields("Status");
  int connections = 0;
  TrainUnder(
      [&] {
        TlsConnection connection(ConnectFrom("127.0.0.2"), TlsDir("attacker"));
        // It may have as many connections as it is allowed, still being closed.
        if (!connection.is_open() || !connection.Write(Greeting())) return;
        ++connections;
        uint32_t call = 0;  // and it does not read
        for (bool sent = true; sent && call < kCalls; ++call) {
          const uint32_t stream = 2 * call + 1;
          sent = connection.Write(FrameOf(kHeaders, /*END_HEADERS=*/4, stream, fields) +
                                  FrameOf(kReset, 0, stream, std::string("\0\0\0\x8", 4)));
        }
        EXPECT_LT(call, kCalls);
      },
      kAnyMemory);
  EXPECT_GT(connections, 0);
}

// CVE-2023-1428: gRPC before 1.53 may abort on these, when the fields have more than its limit
// together.
TEST_F(AttackTest, FieldsThatGrpcCannotPrintDoNotEndTheAggregator) {
  int connections = 0;
  TrainUnder([&] {
    for (const auto& [name, value] :
         {std::pair{"te", "x"}, {":scheme", "x"}, {"grpclb_client_stats", "x"}}) {
      TlsConnection connection(ConnectFrom("127.0.0.2"), TlsDir("attacker"));
      if (!connection.is_open() || !connection.Write(Greeting())) return;
      ++connections;
      connection.Write(FrameOf(kHeaders, /*END_HEADERS=*/4, 1,
                               FieldOf(name, value) + FieldOf("padding", std::string(15000, 'x'))));
      connection.ReadAll();
    }
  });
  EXPECT_GT(connections, 0);
}

// The jobs never begin, since their other rank never comes. The certificate covers all their names.
TEST_F(AttackTest, ThousandsOfJoinsUnderOneCertificateAreHeldToTheLimitOfJobs) {
  constexpr int kAtOnce = 500;
  const auto security = SecurityOf("attacker");
  AggregatorService::Stub stub(
      OpenChannel(aggregator_->target(), security->CredentialsFor(aggregator_->target()), {}));
  JoinRequest request;
  request.set_world_size(2);
  request.mutable_options()->set_block_elements(4096);
  request.mutable_options()->set_chunk_elements(4096);
  request.mutable_options()->set_gamma(1.35f);
  request.set_shard_count(1);
  for (int i = 0; i < 500; ++i) {  // 64 KiB of names
    Tensor& tensor = *request.add_tensors();
    tensor.set_name(absl::StrCat(std::string(120, 'x'), i));
    tensor.add_shape(1);
  }
  uint64_t joins = 0, refused = 0;
  const auto join = [&] {
    struct Call {
      grpc::ClientContext context;
      JoinResponse response;
      grpc::Status status;
    };
    std::vector<Call> calls(kAtOnce);
    absl::BlockingCounter ended(kAtOnce);
    for (Call& call : calls) {
      request.set_job(absl::StrCat("other/", joins));
      request.set_incarnation(++joins);
      call.context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(1)));
      stub.async()->Join(&call.context, &request, &call.response, [&](grpc::Status status) {
        call.status = std::move(status);
        ended.DecrementCount();
      });
    }
    ended.Wait();
    refused += absl::c_count_if(calls, [](const Call& call) {
      return absl::StrContains(call.status.error_message(), "--max-jobs");
    });
  };
  const auto attack = [&] {
    do {
      join();
    } while (joins < 3000);
  };
  TrainUnder(attack, kLargeMemoryBudget);
  EXPECT_GT(refused, 0);
  RecordProperty("joins", static_cast<int>(joins));
}

// What a worker has said over the wire means nothing on another connection.
TEST_F(AttackTest, BytesThatAreSentAgainSayNothing) {
  std::string recorded;
  {
    // Somebody in between, who sees all bytes of a worker.
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    ASSERT_EQ(listen(listener, 1), 0);
    socklen_t size = sizeof address;
    getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
    std::thread between([&] {
      pollfd fds[2] = {{accept(listener, nullptr, nullptr), POLLIN, 0},
                       {ConnectFrom("127.0.0.1"), POLLIN, 0}};
      char bytes[4096];
      while (poll(fds, 2, /*timeout_ms=*/30'000) > 0) {
        for (int from : {0, 1}) {
          if (fds[from].revents == 0) continue;
          const ssize_t got = read(fds[from].fd, bytes, sizeof bytes);
          if (got <= 0) {
            close(fds[0].fd);
            close(fds[1].fd);
            return;
          }
          if (from == 0) recorded.append(bytes, got);
          EXPECT_EQ(write(fds[1 - from].fd, bytes, got), got);
        }
      }
    });
    auto channel = ConnectToAggregator(absl::StrCat("127.0.0.1:", ntohs(address.sin_port)),
                                       FailureTimeout(), nullptr, SecurityOf("worker"));
    JobOptionsForTest job = Job();
    job.workers = 1;
    Train(
        [&] {
          std::vector<std::unique_ptr<Channel>> channels;
          channels.push_back(std::move(channel));
          return channels;
        },
        job);
    between.join();
    close(listener);
  }
  ASSERT_GT(recorded.size(), 1000);
  TrainUnder([&] {
    const int fd = ConnectFrom("127.0.0.2");
    // The aggregator may close it before the end.
    send(fd, recorded.data(), recorded.size(), MSG_NOSIGNAL);
    EXPECT_TRUE(AwaitClosed(fd));
    close(fd);
  });
  StatusRequest request;
  request.set_job("test");
  const auto status = Connect()[0]->Status(request, SteadyNow() + absl::Seconds(30));
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(status->jobs_size(), 0) << "a job that nobody has joined";
}

}  // namespace
}  // namespace signpost::testing
