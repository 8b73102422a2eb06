// mTLS as peers see it: who gets in, who may call what, and certificates that change meanwhile.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "doctor/doctor.pb.h"
#include "doctor/listener.h"
#include "gmock/gmock.h"
#include "grpc/support/log.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/security/tls_certificate_provider.h"
#include "grpcpp/security/tls_certificate_verifier.h"
#include "grpcpp/security/tls_credentials_options.h"
#include "gtest/gtest.h"
#include "proto/aggregator.pb.h"
#include "proto/steady_time.h"
#include "proto/try_again.h"
#include "security/authorizer.h"
#include "security/certificate.h"
#include "security/client_security.h"
#include "security/test_issuer.h"
#include "security/tls_dir.h"
#include "security/token_verifier.h"
#include "server/server.h"
#include "tests/job.h"
#include "worker/grpc_channel.h"

namespace signpost::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

absl::Time Later() { return SteadyNow() + absl::Seconds(30); }

// What was said, by several threads.
class Lines {
 public:
  std::function<void(const std::string&)> Listener() {
    return [this](const std::string& line) {
      absl::MutexLock lock(&mutex_);
      lines_.push_back(line);
    };
  }

  // The first line with that text, once there is one.
  std::string Await(const std::string& text) {
    absl::MutexLock lock(&mutex_);
    const auto find = [&] {
      for (const std::string& line : lines_) {
        if (absl::StrContains(line, text)) return &line;
      }
      return static_cast<const std::string*>(nullptr);
    };
    const auto is_there = [&] { return find() != nullptr; };
    if (!mutex_.AwaitWithTimeout(absl::Condition(&is_there), absl::Seconds(30))) return "";
    return *find();
  }

 private:
  absl::Mutex mutex_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(mutex_);
};

class SecurityTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    gpr_set_log_function([](gpr_log_func_args*) {});  // handshakes are to fail here
  }

  SecurityTest() {
    EXPECT_NE(mkdtemp(directory_), nullptr);
    aggregator_ = Certify("aggregator", "spiffe://signpost/aggregator");
  }
  ~SecurityTest() override {
    server_.reset();
    std::filesystem::remove_all(directory_);
  }

  // Gives a TLS directory, which may be there, a certificate.
  std::string Certify(const std::string& name, const std::string& uri,
                      absl::Duration lifetime = absl::Hours(1)) {
    return Certify(name, *authority_.Issue(*Identity::Parse(uri), lifetime));
  }
  std::string Certify(const std::string& name, const TlsFiles& files) {
    const std::string path = absl::StrCat(directory_, "/", name);
    EXPECT_TRUE(WriteTlsDir(path, files).ok());
    return path;
  }

  void Serve(ServerOptions options = {}) {
    options.security.tls_dir = aggregator_;
    options.on_warning = said_.Listener();
    auto server = Server::Start(options);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    target_ = absl::StrCat("127.0.0.1:", server_->port());
  }

  std::shared_ptr<const ClientSecurity> SecurityOf(const std::string& tls_dir,
                                                   const std::string& token_file = "") {
    auto security = ClientSecurity::Open({.tls_dir = tls_dir, .token_file = token_file}, {target_},
                                         [](const std::string&) {});
    EXPECT_TRUE(security.ok()) << security.status();
    return *security;
  }

  std::unique_ptr<Channel> Connect(const std::string& tls_dir) {
    return ConnectToAggregator(target_, FailureTimeout(), nullptr, SecurityOf(tls_dir));
  }

  absl::Status AskStatus(Channel& channel, const std::string& job = "",
                         absl::Time deadline = Later()) {
    StatusRequest request;
    request.set_job(job);
    return channel.Status(request, deadline).status();
  }

  char directory_[32] = "/tmp/signpost-tls-XXXXXX";
  Authority authority_ = *Authority::Make("Signpost test", absl::Hours(24));
  std::string aggregator_;
  Lines said_;
  std::unique_ptr<Server> server_;
  std::string target_;
};

// Any method, by its name.
class RawClient {
 public:
  RawClient(const std::string& target, std::shared_ptr<grpc::ChannelCredentials> credentials)
      : stub_(grpc::CreateCustomChannel(target, std::move(credentials), Arguments())) {}
  RawClient(const std::string& target, std::shared_ptr<const ClientSecurity> security)
      : security_(std::move(security)),
        stub_(grpc::CreateCustomChannel(target, security_->CredentialsFor(target), Arguments())) {}

  grpc::StatusCode Call(const std::string& method, const std::string& bytes) {
    return Try(method, bytes).error_code();
  }

  grpc::Status Try(const std::string& method, const std::string& bytes,
                   const std::vector<std::string>& authorizations = {}) {
    const grpc::Slice slice(bytes);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer response;
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(30)));
    context.AddMetadata("other", "value");
    for (const std::string& value : authorizations) context.AddMetadata("authorization", value);
    grpc::Status status;
    absl::Notification done;
    stub_.UnaryCall(&context, method, {}, &request, &response, [&](grpc::Status result) {
      status = std::move(result);
      done.Notify();
    });
    done.WaitForNotification();
    return status;
  }

 private:
  static grpc::ChannelArguments Arguments() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return arguments;
  }

  const std::shared_ptr<const ClientSecurity> security_;
  grpc::GenericStub stub_;
};

TEST_F(SecurityTest, EachCallIsForItsRolesAndItsJobOnly) {
  Serve();
  // Requests that concern job a, or, the last ones, none in particular.
  JoinRequest join;
  join.set_job("a");
  ExchangeRequest exchange;
  exchange.mutable_header()->set_job("a");
  LeaveRequest leave;
  leave.set_job("a");
  ReadErrorRequest read_error;
  read_error.set_job("a");
  StatusRequest status;
  status.set_job("a");
  const std::string service = "/signpost.AggregatorService/";
  struct Case {
    std::string method, request;
    std::set<std::string> allowed;  // identities
  };
  const std::set<std::string> workers = {"worker", "worker/a"};
  const std::set<std::string> watchers = {"aggregator", "aggregator/a", "worker", "worker/a",
                                          "observer",   "observer/a",   "admin",  "admin/a"};
  const std::set<std::string> watchers_of_all = {"aggregator", "worker", "observer", "admin"};
  std::set<std::string> all;
  for (const PeerRole role : kPeerRoles) {
    for (const char* of_job : {"", "/a", "/b"}) all.insert(absl::StrCat(NameOf(role), of_job));
  }
  const std::vector<Case> cases = {
      {service + "Join", join.SerializeAsString(), workers},
      {service + "Exchange", exchange.SerializeAsString(), workers},
      {service + "Leave", leave.SerializeAsString(), workers},
      {service + "ReadError", read_error.SerializeAsString(), workers},
      {service + "Status", status.SerializeAsString(), watchers},
      {service + "Status", "", watchers_of_all},
      {service + "Shutdown", "", {}},
      {"/grpc.health.v1.Health/Check", "", all},
      {"/grpc.health.v1.Health/Watch", "", {}},
      {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "", {}},
      {"/grpc.channelz.v1.Channelz/GetTopChannels", "", {}},
  };
  const auto& methods =
      *StatusRequest::descriptor()->file()->FindServiceByName("AggregatorService");
  for (int i = 0; i < methods.method_count(); ++i) {
    const std::string name = service + methods.method(i)->name();
    EXPECT_TRUE(absl::c_any_of(cases, [&](const Case& c) { return c.method == name; })) << name;
  }
  for (const std::string& identity : all) {
    const std::string name = absl::StrCat("peer", std::hash<std::string>()(identity));
    const std::string tls_dir = Certify(name, absl::StrCat("spiffe://signpost/", identity));
    RawClient client(target_, SecurityOf(tls_dir));
    for (const Case& c : cases) {
      const grpc::StatusCode code = client.Call(c.method, c.request);
      EXPECT_EQ(code == grpc::StatusCode::PERMISSION_DENIED, !c.allowed.contains(identity))
          << identity << " calls " << c.method << ": " << code;
      EXPECT_NE(code, grpc::StatusCode::UNAUTHENTICATED);
      EXPECT_NE(code, grpc::StatusCode::UNAVAILABLE);
    }
  }
  EXPECT_THAT(said_.Await("denied: "), HasSubstr("calls so far"));
}

TEST_F(SecurityTest, EachCallOfTheDoctorIsForItsRolesOnly) {
  const auto listener = doctor::Listener::Start({.listen = "127.0.0.1:0",
                                                 .security = {.tls_dir = aggregator_},
                                                 .examine = [] { return DoctorReport(); }});
  ASSERT_TRUE(listener.ok()) << listener.status();
  target_ = absl::StrCat("127.0.0.1:", (*listener)->port());
  const auto& service = *DoctorReport::descriptor()->file()->FindServiceByName("DoctorService");
  ASSERT_GT(service.method_count(), 0);
  for (const PeerRole role : kPeerRoles) {
    const std::string name(NameOf(role));
    RawClient client(target_, SecurityOf(Certify("own-" + name, "spiffe://signpost/" + name)));
    for (int i = 0; i < service.method_count(); ++i) {
      const std::string method =
          absl::StrCat("/signpost.DoctorService/", service.method(i)->name());
      EXPECT_EQ(client.Call(method, ""), role == PeerRole::kObserver
                                             ? grpc::StatusCode::PERMISSION_DENIED
                                             : grpc::StatusCode::OK)
          << name << " calls " << method;
    }
  }
}

TEST_F(SecurityTest, AJobTrainsWithTheBitsOfPlainText) {
  Serve();
  const std::string worker = Certify("worker", "spiffe://signpost/worker/test");
  JobOptionsForTest job;
  const auto connect = [&] {
    std::vector<std::unique_ptr<Channel>> channels;
    channels.push_back(Connect(worker));
    return channels;
  };
  Cluster plain({});
  EXPECT_EQ(Train(connect, job), Train(plain, job));
}

TEST_F(SecurityTest, WhoIsNotVouchedForDoesNotGetIn) {
  Serve();
  const Authority other = *Authority::Make("Other", absl::Hours(1));
  TlsFiles stranger = *other.Issue(*Identity::Parse("spiffe://signpost/worker"), absl::Hours(1));
  const auto deadline = [] { return SteadyNow() + absl::Seconds(1); };
  // Each side refuses the other.
  EXPECT_TRUE(absl::IsUnavailable(AskStatus(*Connect(Certify("other", stranger)), "", deadline())));

  const auto plain = ConnectToAggregator(target_, FailureTimeout());
  const absl::Status status = AskStatus(*plain, "", deadline());
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("Socket closed"), HasSubstr("without mTLS, as this process is?")));

  EXPECT_TRUE(AskStatus(*Connect(Certify("observer", "spiffe://signpost/observer"))).ok());
}

// Of a client that takes any server of the test's authority, so that it is for the server to
// refuse. No certificate: it shows none.
std::shared_ptr<grpc::ChannelCredentials> Credulous(const std::string& roots,
                                                    const TlsFiles* certificate) {
  std::vector<grpc::experimental::IdentityKeyCertPair> pairs;
  if (certificate != nullptr) pairs.push_back({certificate->key, certificate->certificate});
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(
      std::make_shared<grpc::experimental::StaticDataCertificateProvider>(roots, pairs));
  options.watch_root_certs();
  if (certificate != nullptr) options.watch_identity_key_cert_pairs();
  options.set_check_call_host(false);
  options.set_certificate_verifier(std::make_shared<grpc::experimental::NoOpCertificateVerifier>());
  return grpc::experimental::TlsCredentials(options);
}

TEST_F(SecurityTest, TheServerRefusesWhoIsNotVouchedForToo) {
  Serve();
  const auto status_of = [&](const Authority& authority, const char* uri, absl::Duration lifetime) {
    const TlsFiles files = *authority.Issue(*Identity::Parse(uri), lifetime);
    RawClient client(target_, Credulous(authority_.certificate(), &files));
    return client.Call("/signpost.AggregatorService/Status", "");
  };
  const char* const observer = "spiffe://signpost/observer";
  const Authority other = *Authority::Make("Other", absl::Hours(1));
  EXPECT_EQ(status_of(authority_, observer, absl::Hours(1)), grpc::StatusCode::OK);
  EXPECT_EQ(status_of(other, observer, absl::Hours(1)), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(status_of(authority_, observer, -absl::Seconds(1)), grpc::StatusCode::UNAVAILABLE)
      << "it has expired";
  EXPECT_EQ(status_of(authority_, "spiffe://other/observer", absl::Hours(1)),
            grpc::StatusCode::UNAUTHENTICATED);
  RawClient anonymous(target_, Credulous(authority_.certificate(), nullptr));
  EXPECT_EQ(anonymous.Call("/grpc.health.v1.Health/Check", ""), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(SecurityTest, AWorkersCertificateServesNobody) {
  aggregator_ = Certify("worker", "spiffe://signpost/worker");
  const auto server = Server::Start({.security = {.tls_dir = aggregator_}});
  EXPECT_TRUE(absl::IsInvalidArgument(server.status()));
  EXPECT_THAT(server.status().message(), HasSubstr("wanted one of an aggregator"));
}

// A process may join and leave many jobs.
TEST_F(SecurityTest, CredentialsOfTheSameFilesTakeNoMoreDescriptors) {
  const std::string worker = Certify("worker", "spiffe://signpost/worker");
  const auto load = [&] {
    const auto credentials = TlsCredentials::Load(worker, [](const std::string&) {});
    EXPECT_TRUE(credentials.ok()) << credentials.status();
    const std::filesystem::directory_iterator descriptors("/proc/self/fd");
    return std::count_if(begin(descriptors), end(descriptors), [](const auto& descriptor) {
      std::error_code gone;
      return absl::StrContains(read_symlink(descriptor.path(), gone).string(), "signpost-tls");
    });
  };
  constexpr int kRounds = 20;
  const auto first = load();
  for (int round = 1; round < kRounds; ++round) load();
  EXPECT_LT(load(), first + kRounds);  // gRPC may have some open just now, to look for changes
}

// As if a worker's certificate had been stolen, to pose as an aggregator with a server of one's
// own.
TEST_F(SecurityTest, AWorkerThatPosesAsAnAggregatorIsRefused) {
  const std::string worker = Certify("worker", "spiffe://signpost/worker");
  const auto stolen = *TlsCredentials::Load(worker, [](const std::string&) {});
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", stolen->ForServers(), &port);
  grpc::CallbackGenericService anything;
  builder.RegisterCallbackGenericService(&anything);
  const auto impostor = builder.BuildAndStart();
  target_ = absl::StrCat("127.0.0.1:", port);
  const absl::Status status = AskStatus(*Connect(worker), "", SteadyNow() + absl::Seconds(1));
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(status.message(),
              HasSubstr("the server is spiffe://signpost/worker, which is no aggregator"));
}

TEST_F(SecurityTest, APlainServerIsNoAggregatorForWhoHasCertificates) {
  const auto server = *Server::Start({});
  target_ = absl::StrCat("127.0.0.1:", server->port());
  const auto channel = Connect(Certify("worker", "spiffe://signpost/worker"));
  const absl::Status status = AskStatus(*channel, "", SteadyNow() + absl::Seconds(1));
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("with mTLS and a certificate"));
}

// The whole way to another authority: trust both, show the new one's certificates, trust it alone.
// Connections are made all the time, and one is kept.
TEST_F(SecurityTest, CertificatesRotateWithoutAFailedCall) {
  Serve();
  const std::string client = Certify("client", "spiffe://signpost/observer");
  const Authority next = *Authority::Make("Next", absl::Hours(24));
  const std::string both = authority_.certificate() + next.certificate();
  const auto issue = [](const Authority& authority, const char* uri, const std::string& roots) {
    TlsFiles files = *authority.Issue(*Identity::Parse(uri), absl::Hours(2));
    files.roots = roots;
    return files;
  };
  const auto security = SecurityOf(client);
  RawClient kept(target_, security);
  int calls = 0, failed = 0;
  // Without waiting for a connection: one that fails is a call that fails.
  const auto call = [&] {
    RawClient fresh(target_, security);
    for (RawClient* client : {&fresh, &kept}) {
      const grpc::StatusCode code = client->Call("/signpost.AggregatorService/Status", "");
      EXPECT_EQ(code, grpc::StatusCode::OK);
      ++calls;
      failed += code != grpc::StatusCode::OK;
    }
  };
  // Calls go on until a change has been taken, which shows in who else can connect. There are five
  // changes.
  const auto call_until = [&](const std::function<bool()>& taken) {
    const int wanted = calls + 200;
    while (calls < wanted || !taken()) call();
  };
  const auto can_connect = [&](const TlsFiles& files) {
    RawClient client(target_, SecurityOf(Certify("probe", files)));
    const grpc::StatusCode code = client.Call("/signpost.AggregatorService/Status", "");
    EXPECT_THAT(code, AnyOf(grpc::StatusCode::OK, grpc::StatusCode::UNAVAILABLE));
    return code == grpc::StatusCode::OK;
  };
  const char* const observer = "spiffe://signpost/observer";
  const char* const server = "spiffe://signpost/aggregator";

  Certify("aggregator", issue(authority_, server, both));
  Certify("client", issue(authority_, observer, both));
  // A client of the next authority, that trusts both, gets in.
  call_until([&] { return can_connect(issue(next, observer, both)); });
  // The client's own roots have followed when it can connect to a server of the next authority.
  ServerOptions options;
  options.security.tls_dir = Certify("next", issue(next, server, both));
  const auto next_server = *Server::Start(options);
  const std::string next_target = absl::StrCat("127.0.0.1:", next_server->port());
  call_until([&] {
    return RawClient(next_target, security).Call("/signpost.AggregatorService/Status", "") ==
           grpc::StatusCode::OK;
  });

  Certify("aggregator", issue(next, server, both));
  // One that only trusts the next authority takes the server for an aggregator.
  call_until([&] { return can_connect(issue(next, observer, next.certificate())); });
  Certify("client", issue(next, observer, next.certificate()));
  // It shows its new certificate when it can connect to who trusts the next authority alone.
  options.security.tls_dir = Certify("strict", issue(next, server, next.certificate()));
  const auto strict_server = *Server::Start(options);
  const std::string strict_target = absl::StrCat("127.0.0.1:", strict_server->port());
  call_until([&] {
    return RawClient(strict_target, security).Call("/signpost.AggregatorService/Status", "") ==
           grpc::StatusCode::OK;
  });
  Certify("aggregator", issue(next, server, next.certificate()));
  call_until([&] { return !can_connect(issue(authority_, observer, both)); });
  EXPECT_GE(calls, 1000);
  EXPECT_EQ(failed, 0);
}

TEST_F(SecurityTest, HalfWrittenFilesChangeNothingUntilTheyAreWhole) {
  Serve();
  const std::string client = Certify("client", "spiffe://signpost/observer");
  const TlsFiles whole =
      *authority_.Issue(*Identity::Parse("spiffe://signpost/aggregator"), absl::Hours(9));
  TlsFiles half = whole;
  half.key.resize(half.key.size() / 2);
  Certify("aggregator", half);
  EXPECT_THAT(said_.Await("no key in PEM"), HasSubstr("the certificate from before stays in use"));
  EXPECT_TRUE(AskStatus(*Connect(client)).ok());

  TlsFiles other_identity =
      *authority_.Issue(*Identity::Parse("spiffe://signpost/worker"), absl::Hours(1));
  Certify("aggregator", other_identity);
  EXPECT_THAT(said_.Await("is now of spiffe://signpost/worker"), HasSubstr("stays in use"));
  EXPECT_TRUE(AskStatus(*Connect(client)).ok());

  Certify("aggregator", "spiffe://signpost/aggregator", -absl::Seconds(1));
  EXPECT_THAT(said_.Await("was valid until"), HasSubstr("stays in use"));

  std::filesystem::remove(aggregator_ + "/tls.crt");
  EXPECT_THAT(said_.Await("No such file"), HasSubstr("stays in use"));
  EXPECT_TRUE(AskStatus(*Connect(client)).ok());
}

TEST_F(SecurityTest, AnExpiringCertificateIsWarnedOf) {
  aggregator_ = Certify("aggregator", "spiffe://signpost/aggregator", absl::Seconds(30));
  Serve();
  EXPECT_THAT(said_.Await("is valid for another"), HasSubstr("used without a restart"));
}

TEST_F(SecurityTest, AnExpiredCertificateKeepsItsConnectionAndMakesNoNewOne) {
  Serve();
  const absl::Duration lifetime = absl::Seconds(5);
  const absl::Time issued = absl::Now();
  const auto security = SecurityOf(Certify("short", "spiffe://signpost/observer", lifetime));
  RawClient kept(target_, security);
  EXPECT_EQ(kept.Call("/signpost.AggregatorService/Status", ""), grpc::StatusCode::OK);
  absl::SleepFor(issued + lifetime + absl::Seconds(1) - absl::Now());
  EXPECT_EQ(kept.Call("/signpost.AggregatorService/Status", ""), grpc::StatusCode::OK);
  RawClient fresh(target_, security);
  EXPECT_EQ(fresh.Call("/signpost.AggregatorService/Status", ""), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(SecurityTest, AnExpiredCertificateIsRefusedAtTheStart) {
  aggregator_ = Certify("aggregator", "spiffe://signpost/aggregator", -absl::Seconds(1));
  const auto server = Server::Start({.security = {.tls_dir = aggregator_}});
  EXPECT_TRUE(absl::IsFailedPrecondition(server.status())) << server.status();
  EXPECT_TRUE(IsTryAgain(server.status()));  // when it is renewed
  EXPECT_THAT(server.status().message(),
              AllOf(HasSubstr(aggregator_), HasSubstr("was valid until")));
}

// There would be no identities, and nobody would say so.
TEST_F(SecurityTest, AUnixSocketRefusesATlsDirectoryOnBothSides) {
  ServerOptions options;
  options.listen = absl::StrCat("unix:", directory_, "/socket");
  options.security.tls_dir = aggregator_;
  EXPECT_TRUE(absl::IsInvalidArgument(Server::Start(options).status()));
  const std::string worker = Certify("worker", "spiffe://signpost/worker");
  EXPECT_TRUE(absl::IsInvalidArgument(
      ClientSecurity::Open({.tls_dir = worker}, {options.listen}, [](const std::string&) {
      }).status()));
}

TEST_F(SecurityTest, PlainTextBeyondLoopbackIsWarnedOfAtOnce) {
  ServerOptions options;
  options.listen = "0.0.0.0:0";
  options.security.insecure = true;
  options.on_warning = said_.Listener();
  const auto server = Server::Start(options);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_THAT(said_.Await("plain text at 0.0.0.0:0"), HasSubstr("--tls-dir"));
}

TEST_F(SecurityTest, ATlsDirectoryThatIsNotThereIsNamed) {
  const auto server = Server::Start({.security = {.tls_dir = "/nowhere"}});
  EXPECT_TRUE(absl::IsNotFound(server.status())) << server.status();
  EXPECT_THAT(server.status().message(), HasSubstr("/nowhere/ca.crt: No such file"));
}

constexpr char kStatusMethod[] = "/signpost.AggregatorService/Status";

// An aggregator that wants a service account's token besides the certificate.
class TokenTest : public SecurityTest {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "tokens are JSON objects: see .bazelrc";
#endif
  }

  TokenTest() {
    WriteText("jwks", JwksOf({issuer_.jwk()}));
    WriteText("token", issuer_.Issue(Claims()));
  }

  void ServeWithTokens() {
    ServerOptions options;
    options.tokens = Tokens();
    Serve(options);
  }

  TokenOptions Tokens() const {
    return {PathOf("jwks"), {"iss", "signpost", {"system:serviceaccount:training:worker"}}};
  }

  static std::string Claims(const std::string& subject = "system:serviceaccount:training:worker") {
    return absl::StrCat(R"({"iss":"iss","aud":["signpost"],"sub":")", subject, R"(","exp":)",
                        absl::ToUnixSeconds(absl::Now() + absl::Hours(1)), "}");
  }

  std::string PathOf(const std::string& name) const { return absl::StrCat(directory_, "/", name); }
  std::string WriteText(const std::string& name, const std::string& text) {
    std::ofstream(PathOf(name + ".new")) << text;
    std::filesystem::rename(PathOf(name + ".new"), PathOf(name));
    return PathOf(name);
  }

  const TestIssuer issuer_{"first", "ES256"};
};

TEST_F(TokenTest, EachCallButHealthNeedsATokenToo) {
  ServeWithTokens();
  const std::string observer = Certify("observer", "spiffe://signpost/observer");
  RawClient client(target_, SecurityOf(observer));
  const std::string good = issuer_.Issue(Claims());
  const TestIssuer stranger("first", "ES256");
  struct Case {
    std::vector<std::string> authorizations;
    std::string why;
  };
  const std::vector<Case> cases = {
      {{}, "spiffe://signpost/observer: the call has 0 tokens, wanted one"},
      {{"Bearer " + good, "Bearer " + good}, "the call has 2 tokens"},
      {{"Bearer "}, "it is no JSON Web Token"},
      {{good}, "none of a bearer"},
      {{"Basic " + good}, "none of a bearer"},
      {{"Bearer " + good.substr(0, good.size() - 4)}, "its signature is not"},
      {{"Bearer " + stranger.Issue(Claims())}, "its signature is not its key's"},
      {{"Bearer " + issuer_.Issue(Claims("system:serviceaccount:training:other"))},
       "its subject is 'system:serviceaccount:training:other'"},
  };
  for (const Case& c : cases) {
    const grpc::Status status = client.Try(kStatusMethod, "", c.authorizations);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << c.why;
    EXPECT_THAT(status.error_message(), HasSubstr(c.why));
    EXPECT_THAT(status.error_message(), Not(HasSubstr(good)));
  }
  EXPECT_TRUE(client.Try(kStatusMethod, "", {"Bearer " + good}).ok());
  EXPECT_TRUE(client.Try("/grpc.health.v1.Health/Check", "").ok());
  // A token is no role.
  EXPECT_EQ(client.Try("/signpost.AggregatorService/Leave", "", {"Bearer " + good}).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
}

TEST_F(TokenTest, AJobTrainsWithTheBitsOfPlainText) {
  ServeWithTokens();
  const auto security =
      SecurityOf(Certify("worker", "spiffe://signpost/worker/test"), PathOf("token"));
  JobOptionsForTest job;
  const auto connect = [&] {
    std::vector<std::unique_ptr<Channel>> channels;
    channels.push_back(ConnectToAggregator(target_, FailureTimeout(), nullptr, security));
    return channels;
  };
  Cluster plain({});
  EXPECT_EQ(Train(connect, job), Train(plain, job));
}

// The whole way to another key: publish both, sign with the new one, publish it alone.
TEST_F(TokenTest, TokensAndKeysRotateWithoutAFailedCall) {
  ServeWithTokens();
  const std::string observer = Certify("observer", "spiffe://signpost/observer");
  const auto kept = ConnectToAggregator(target_, FailureTimeout(), nullptr,
                                        SecurityOf(observer, PathOf("token")));
  RawClient other(target_, SecurityOf(observer));
  const auto call_until = [&](const std::function<bool()>& taken) {
    do {
      ASSERT_TRUE(AskStatus(*kept).ok());
    } while (!taken());
  };
  const auto is_good = [&](const std::string& token) {
    return other.Try(kStatusMethod, "", {"Bearer " + token}).ok();
  };
  const TestIssuer next("second", "RS256");
  const std::string first = issuer_.Issue(Claims()), second = next.Issue(Claims());
  call_until([] { return true; });
  WriteText("jwks", JwksOf({issuer_.jwk(), next.jwk()}));
  call_until([&] { return is_good(second); });
  WriteText("token", second);
  const absl::Time shown = absl::Now() + absl::Seconds(1);  // the file is read again by then
  call_until([&] { return absl::Now() > shown; });
  WriteText("jwks", JwksOf({next.jwk()}));
  call_until([&] { return !is_good(first); });
  call_until([] { return true; });
}

TEST_F(TokenTest, HandlersDoNotSeeTokens) {
  class Listener final : public grpc::CallbackGenericService {
   public:
    grpc::ServerGenericBidiReactor* CreateReactor(
        grpc::GenericCallbackServerContext* context) override {
      tokens += static_cast<int>(context->client_metadata().count("authorization"));
      others += static_cast<int>(context->client_metadata().count("other"));
      return grpc::CallbackGenericService::CreateReactor(context);
    }
    std::atomic<int> tokens = 0, others = 0;
  };
  const auto tls = *TlsCredentials::Load(aggregator_, [](const std::string&) {});
  const auto ignore = [](const std::string&) {};
  for (const bool wanted : {true, false}) {
    auto verifier = wanted ? *TokenVerifier::Open(Tokens(), ignore) : nullptr;
    const auto credentials = tls->ForServers();
    credentials->SetAuthMetadataProcessor(
        std::make_shared<Authorizer>(tls->identity(), std::move(verifier), ignore));
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", credentials, &port);
    Listener listener;
    builder.RegisterCallbackGenericService(&listener);
    const auto server = builder.BuildAndStart();
    target_ = absl::StrCat("127.0.0.1:", port);
    RawClient client(target_, SecurityOf(Certify("observer", "spiffe://signpost/observer")));
    const auto status = client.Try(kStatusMethod, "", {"Bearer " + issuer_.Issue(Claims())});
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << status.error_message();
    EXPECT_EQ(listener.tokens, 0);
    EXPECT_EQ(listener.others, 1);
  }
}

TEST_F(TokenTest, AreWantedWithMtlsOnly) {
  EXPECT_TRUE(absl::IsFailedPrecondition(Server::Start({.tokens = Tokens()}).status()));
  ServerOptions options;
  options.security.tls_dir = aggregator_;
  options.tokens.rules = Tokens().rules;
  EXPECT_THAT(Server::Start(options).status().message(), HasSubstr("no JWKS file"));
  options.tokens = Tokens();
  options.security.tls_dir.clear();
  options.listen = absl::StrCat("unix:", directory_, "/socket");
  EXPECT_TRUE(absl::IsFailedPrecondition(Server::Start(options).status()));
}

TEST_F(TokenTest, ATokenFileThatIsNotThereIsNamed) {
  const std::string worker = Certify("worker", "spiffe://signpost/worker");
  const auto security = ClientSecurity::Open({.tls_dir = worker, .token_file = "/nowhere"},
                                             {"127.0.0.1:1"}, [](const std::string&) {});
  EXPECT_TRUE(absl::IsNotFound(security.status())) << security.status();
  EXPECT_THAT(security.status().message(), HasSubstr("/nowhere"));
}

}  // namespace
}  // namespace signpost::testing
