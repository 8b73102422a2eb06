// What a host answers to others.

#include "doctor/listener.h"

#include <grpcpp/grpcpp.h>

#include <initializer_list>
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

  // Sends a message of each of these sizes.
  Swallowed Swallow(std::initializer_list<size_t> sizes) {
    grpc::ClientContext context;
    Swallowed swallowed;
    const auto writer = stub_->Swallow(&context, &swallowed);
    for (const size_t size : sizes) {
      Mouthful mouthful;
      mouthful.mutable_bytes()->assign(size, 'x');
      EXPECT_TRUE(writer->Write(mouthful));
    }
    writer->WritesDone();
    const grpc::Status status = writer->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    return swallowed;
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

TEST_F(ListenerTest, DoesNotCountTheFirstBytesIntoTheRate) {
  constexpr size_t kHead = 512 << 10;
  // Behind them nothing comes, or one byte.
  const Swallowed nothing = Swallow({kHead, 0});
  EXPECT_EQ(nothing.bytes(), kHead);
  EXPECT_EQ(nothing.bits_per_s(), 0);
  const Swallowed one = Swallow({kHead, 1});
  EXPECT_EQ(one.bytes(), kHead + 1);
  EXPECT_GT(one.bits_per_s(), 0);
}

}  // namespace
}  // namespace signpost::doctor
