#include "doctor/listener.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "doctor/doctor.grpc.pb.h"
#include "doctor/name.h"
#include "doctor/path.h"
#include "doctor/report.h"
#include "doctor/tls.h"
#include "proto/grpc_status.h"
#include "proto/processors.h"
#include "proto/steady_time.h"
#include "proto/version.h"
#include "security/client_security.h"
#include "security/loopback.h"
#include "security/private_umask.h"

namespace signpost::doctor {
namespace {

constexpr int kMostHosts = 1024;
constexpr int kMostThreads = 64;
constexpr int kMostSwallows = 2;  // the last one may not have ended
constexpr absl::Duration kConnected = absl::Seconds(3);
constexpr absl::Duration kSending = absl::Seconds(1);
constexpr absl::Duration kSwallowing = absl::Seconds(10);
constexpr absl::Duration kFlush = absl::Milliseconds(200);
constexpr size_t kMouthfulBytes = 64 << 10;
// What buffers and a shaped link take at once.
constexpr uint64_t kHeadBytes = 512 << 10;

// As fast as it goes for a second.
grpc::Status Feed(DoctorService::Stub& stub, Swallowed& swallowed) {
  grpc::ClientContext context;
  context.set_deadline(ToSystemClock(SteadyNow() + kSwallowing));
  const auto writer = stub.Swallow(&context, &swallowed);
  Mouthful mouthful;
  mouthful.mutable_bytes()->assign(kMouthfulBytes, '\x5a');
  const absl::Time end = SteadyNow() + kSending;
  while (SteadyNow() < end && writer->Write(mouthful)) {
  }
  writer->WritesDone();
  return writer->Finish();
}

// 0 if nothing came, or all within one tick of the clock.
double Rate(uint64_t bytes, absl::Duration in) {
  return bytes > 0 && in > absl::ZeroDuration()
             ? 8. * static_cast<double>(bytes) / absl::ToDoubleSeconds(in)
             : 0;
}

}  // namespace

class Listener::Service final : public DoctorService::Service {
 public:
  explicit Service(const ListenerOptions& options) : options_(options) {}

  grpc::Status Describe(grpc::ServerContext*, const DescribeRequest* request,
                        HostFacts* response) override {
    if (request->hosts_size() > kMostHosts) {
      return {grpc::StatusCode::INVALID_ARGUMENT,
              absl::StrCat(request->hosts_size(), " hosts, at most ", kMostHosts)};
    }
    response->set_version(kVersion);
    response->set_processors(ProcessorCount());
    for (const std::string& host : request->hosts()) *response->add_names() = Resolve(HostOf(host));
    {
      const absl::MutexLock lock(&examining_);
      *response->mutable_report() = options_.examine();
    }
    response->set_clock_us(absl::ToUnixMicros(absl::Now()));
    return grpc::Status::OK;
  }

  grpc::Status Try(grpc::ServerContext*, const TryRequest* request, PathFacts* response) override {
    if (trying_.exchange(true)) {
      return {grpc::StatusCode::RESOURCE_EXHAUSTED, "this host tries another one"};
    }
    const absl::Cleanup done = [this] { trying_ = false; };
    *response = FindPath(request->host(), kConnected);
    DoctorReport findings;
    Reporter to("", findings);
    if (CheckPath(*response, request->host(), "signpost doctor", to)) {
      Measure(request->host(), *response, to);
    }
    *response->mutable_findings() = findings.lines();
    return grpc::Status::OK;
  }

  grpc::Status Swallow(grpc::ServerContext* context, grpc::ServerReader<Mouthful>* reader,
                       Swallowed* response) override {
    const absl::Cleanup done = [this] { --swallows_; };
    if (++swallows_ > kMostSwallows) {
      return {grpc::StatusCode::RESOURCE_EXHAUSTED, "this host swallows for others"};
    }
    const absl::Time begin = SteadyNow();
    absl::Time head = begin, last = begin;
    uint64_t bytes = 0, head_bytes = 0;
    for (Mouthful mouthful; last - begin < kSwallowing && reader->Read(&mouthful);) {
      last = SteadyNow();
      bytes += mouthful.bytes().size();
      if (head_bytes == 0 && bytes >= kHeadBytes) {
        head = last;
        head_bytes = bytes;
      }
    }
    response->set_bytes(bytes);
    // The head may have come at once, and what follows it too, if this thread was kept waiting.
    const double all = Rate(bytes, last - begin);
    response->set_bits_per_s(
        bytes > head_bytes ? std::min(all, Rate(bytes - head_bytes, last - head)) : all);
    return grpc::Status::OK;
  }

 private:
  void Measure(const std::string& host, PathFacts& path, Reporter& to) {
    const auto client = ClientSecurity::Open(options_.security, {host}, [](const std::string&) {});
    if (!client.ok()) {
      to.Fault("certificate", std::string(client.status().message()),
               "--tls-dir DIR (`signpost cert init` makes some)");
      return;
    }
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto stub = DoctorService::NewStub(OpenChannel(
        host, (*client)->CredentialsFor(host, TlsCredentials::To::kMembers), arguments));
    Swallowed swallowed;
    const grpc::Status status = Feed(*stub, swallowed);
    if (status.ok()) {
      path.set_bits_per_s(swallowed.bits_per_s());
    } else if (!ExplainByTls(host, path.address(), status.error_message(), options_.security,
                             Wanted::kMember, to)) {
      to.Fault("reach", absl::StrCat(host, " does not answer: ", status.error_message()),
               absl::StrCat("is it signpost that listens there? ss -ltnp 'sport = :", PortOf(host),
                            "'"));
    }
  }

  const ListenerOptions options_;
  absl::Mutex examining_;
  std::atomic<bool> trying_ = false;
  std::atomic<int> swallows_ = 0;
};

absl::StatusOr<std::unique_ptr<Listener>> Listener::Start(const ListenerOptions& options) {
  auto security =
      ServerSecurity::Open(options.security, options.listen, /*tokens=*/{}, options.on_warning);
  if (!security.ok()) return security.status();
  std::unique_ptr<Listener> listener(new Listener());
  listener->security_ = *std::move(security);
  listener->service_ = std::make_unique<Service>(options);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(LocalhostByNumber(options.listen), listener->security_->credentials(),
                           &port);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetResourceQuota(grpc::ResourceQuota("doctor").SetMaxThreads(kMostThreads));
  builder.RegisterService(listener->service_.get());
  {
    const PrivateUmask for_socket;
    listener->server_ = builder.BuildAndStart();
  }
  if (listener->server_ == nullptr || port == 0) {
    return absl::UnavailableError(absl::StrCat(
        "cannot listen on ", options.listen, ": another process may (ss -ltnp 'sport = :",
        PortOf(options.listen), "'), or the address is not this host's"));
  }
  listener->port_ = static_cast<uint16_t>(port);
  return listener;
}

Listener::~Listener() {
  if (server_ != nullptr) server_->Shutdown(absl::ToChronoTime(absl::Now() + kFlush));
}

}  // namespace signpost::doctor
