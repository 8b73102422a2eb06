// A host's DoctorService, for as long as its doctor runs.

#ifndef SIGNPOST_DOCTOR_LISTENER_H_
#define SIGNPOST_DOCTOR_LISTENER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "doctor/doctor.pb.h"
#include "security/server_security.h"
#include "security/transport_security.h"

namespace grpc {
class Server;
}  // namespace grpc

namespace signpost::doctor {

struct ListenerOptions {
  std::string listen;  // HOST:PORT; port 0 lets the kernel choose
  TransportSecurity security;
  // What this host finds about itself; called for each Describe, one at a time.
  std::function<DoctorReport()> examine;
  // Gets a line for a person, from any thread.
  std::function<void(const std::string& line)> on_warning = [](const std::string&) {};
};

// Thread-safe. With mTLS, only members of the trust domain are heard, and only those whose role may
// (security/access.cc).
class Listener {
 public:
  // UNAVAILABLE when the address cannot be bound; errors of the security as
  // ServerSecurity::Open's.
  static absl::StatusOr<std::unique_ptr<Listener>> Start(const ListenerOptions& options);
  ~Listener();  // at once

  uint16_t port() const { return port_; }

 private:
  class Service;

  Listener() = default;

  std::unique_ptr<ServerSecurity> security_;
  std::unique_ptr<Service> service_;
  std::unique_ptr<grpc::Server> server_;
  uint16_t port_ = 0;
};

}  // namespace signpost::doctor

#endif  // SIGNPOST_DOCTOR_LISTENER_H_
