// What a host answers to others.

#include "doctor/listener.h"

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "doctor/doctor.grpc.pb.h"
#include "doctor/limits.h"
#include "gtest/gtest.h"

namespace signpost::doctor {
namespace {

class ListenerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto listener =
        Listener::Start({.listen = "127.0.0.1:0", .examine = [] { return DoctorReport(); }});
    ASSERT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    stub_ = DoctorService::NewStub(
        grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", listener_->port()),
                                  grpc::InsecureChannelCredentials(), arguments));
  }

  std::unique_ptr<Listener> listener_;
  std::unique_ptr<DoctorService::Stub> stub_;
};

TEST_F(ListenerTest, TellsItsProcessors) {
  grpc::ClientContext context;
  HostFacts facts;
  const grpc::Status status = stub_->Describe(&context, DescribeRequest(), &facts);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_GT(facts.processors(), 0);
  EXPECT_EQ(facts.processors(), FindProcessors());
}

}  // namespace
}  // namespace signpost::doctor
