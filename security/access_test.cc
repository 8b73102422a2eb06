#include "security/access.h"

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "doctor/doctor.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/aggregator.pb.h"

namespace signpost {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Le;
using ::testing::SizeIs;

Identity Of(PeerRole role, std::optional<std::string> job = std::nullopt) {
  return {"signpost", role, std::move(job)};
}

// All methods that there are, and gRPC's own.
std::set<std::string> Methods() {
  std::set<std::string> methods = {
      "/grpc.health.v1.Health/Check",
      "/grpc.health.v1.Health/Watch",
      "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
      "/grpc.channelz.v1.Channelz/GetTopChannels",
      "/signpost.AggregatorService/Shutdown",
      "/signpost.AggregatorService/",
      "",
  };
  for (const char* name : {"signpost.AggregatorService", "signpost.DoctorService"}) {
    const auto* service =
        google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(name);
    EXPECT_NE(service, nullptr) << name;
    for (int i = 0; service != nullptr && i < service->method_count(); ++i) {
      methods.insert(absl::StrCat("/", service->full_name(), "/", service->method(i)->name()));
    }
  }
  return methods;
}

// A new method is in Methods() at once, and denied to all until it is here as well.
TEST(Access, IsGrantedForWhatIsListedAndNothingElse) {
  StatusRequest::descriptor();  // so that the services are known
  DoctorReport::descriptor();
  using enum PeerRole;
  const std::map<std::string, std::set<PeerRole>> granted = {
      {"/signpost.AggregatorService/Join", {kWorker}},
      {"/signpost.AggregatorService/Exchange", {kWorker}},
      {"/signpost.AggregatorService/Leave", {kWorker}},
      {"/signpost.AggregatorService/ReadError", {kWorker}},
      {"/signpost.AggregatorService/Status", {kAggregator, kWorker, kObserver, kAdmin}},
      {"/signpost.DoctorService/Describe", {kAggregator, kWorker, kAdmin}},
      {"/signpost.DoctorService/Try", {kAggregator, kWorker, kAdmin}},
      {"/signpost.DoctorService/Swallow", {kAggregator, kWorker, kAdmin}},
      {"/grpc.health.v1.Health/Check", {kAggregator, kWorker, kObserver, kAdmin}},
  };
  for (const std::string& method : Methods()) {
    const auto found = granted.find(method);
    for (const PeerRole role : kPeerRoles) {
      const bool expected = found != granted.end() && found->second.contains(role);
      const absl::Status status = CheckMethod(method, Of(role));
      EXPECT_EQ(status.ok(), expected) << method << " " << NameOf(role);
      if (!expected) {
        EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
        EXPECT_THAT(status.message(), HasSubstr(absl::StrCat("spiffe://signpost/", NameOf(role))));
        EXPECT_THAT(status.message(), HasSubstr(method));
      }
    }
  }
}

TEST(Access, IsToTheJobOfTheCertificate) {
  for (const PeerRole role : kPeerRoles) {
    EXPECT_TRUE(CheckJob("a", Of(role, "a")).ok());
    EXPECT_TRUE(CheckJob("a/norms", Of(role, "a")).ok());
    EXPECT_TRUE(CheckJob("a", Of(role)).ok());
    EXPECT_TRUE(CheckJob("", Of(role)).ok());
    EXPECT_EQ(CheckJob("b", Of(role, "a")).code(), absl::StatusCode::kPermissionDenied);
    EXPECT_EQ(CheckJob("", Of(role, "a")).code(), absl::StatusCode::kPermissionDenied);
  }
  const std::string odd = "\n\x1b" + std::string(1000, 'x');
  EXPECT_THAT(CheckJob(odd, Of(PeerRole::kWorker, "a")).message(),
              AllOf(HasSubstr("'\\n\\x1bxxx"), SizeIs(Le(400))));
  EXPECT_THAT(CheckMethod(odd, Of(PeerRole::kWorker, "a")).message(), SizeIs(Le(400)));
  EXPECT_THAT(CheckJob("b", Of(PeerRole::kWorker, "a")).message(),
              HasSubstr("spiffe://signpost/worker/a has no part in the job 'b'"));
}

}  // namespace
}  // namespace signpost
