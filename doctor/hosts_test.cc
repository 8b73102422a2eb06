// What is told of hosts that do not do what they are asked.

#include "doctor/hosts.h"

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "doctor/comparison.h"
#include "doctor/doctor.grpc.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/version.h"

namespace signpost::doctor {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Property;

// Says what it is, and tries nothing.
class UnwillingHost final : public DoctorService::Service {
 public:
  UnwillingHost() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }

  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

  grpc::Status Describe(grpc::ServerContext*, const DescribeRequest* request,
                        HostFacts* response) override {
    response->set_version(kVersion);
    for (const std::string& host : request->hosts()) response->add_names()->set_host(host);
    return grpc::Status::OK;
  }

  grpc::Status Try(grpc::ServerContext*, const TryRequest*, PathFacts*) override {
    return {grpc::StatusCode::RESOURCE_EXHAUSTED, "this host tries another one"};
  }

 private:
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

TEST(HostsTest, TellsOfPathsThatWereNotTried) {
  const UnwillingHost a, b;
  const absl::StatusOr<Hosts> hosts = AskHosts({a.address(), b.address()}, {});
  ASSERT_TRUE(hosts.ok()) << hosts.status();
  const DoctorReport report = CheckHosts(*hosts);
  for (const std::string& path : {absl::StrCat(a.address(), " -> ", b.address()),
                                  absl::StrCat(b.address(), " -> ", a.address())}) {
    EXPECT_THAT(report.lines(),
                Contains(AllOf(Property(&DoctorLine::where, path),
                               Property(&DoctorLine::verdict, UNCHECKED),
                               Property(&DoctorLine::text, HasSubstr("tries another one")))));
  }
}

}  // namespace
}  // namespace signpost::doctor
