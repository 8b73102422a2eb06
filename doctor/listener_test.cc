// What a host answers to others.

#include "doctor/listener.h"

#include <grpcpp/grpcpp.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "doctor/doctor.grpc.pb.h"
#include "gtest/gtest.h"
#include "proto/processors.h"

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

  // Sends a message of each of these sizes, and pauses behind the first.
  Swallowed Swallow(std::initializer_list<size_t> sizes,
                    absl::Duration pause = absl::ZeroDuration()) {
    grpc::ClientContext context;
    Swallowed swallowed;
    const auto writer = stub_->Swallow(&context, &swallowed);
    for (const size_t size : sizes) {
      Mouthful mouthful;
      mouthful.mutable_bytes()->assign(size, 'x');
      EXPECT_TRUE(writer->Write(mouthful));
      absl::SleepFor(std::exchange(pause, absl::ZeroDuration()));
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
  EXPECT_EQ(facts.processors(), ProcessorCount());
}

constexpr size_t kHead = 512 << 10;

// A link's buffers may take the head at once, and no more than it need come in a second.
TEST_F(ListenerTest, HasARateAlsoOfTheHeadAlone) {
  const Swallowed head = Swallow({kHead, 0});
  EXPECT_EQ(head.bytes(), kHead);
  EXPECT_GT(head.bits_per_s(), 0);
  const Swallowed one = Swallow({kHead, 1});
  EXPECT_EQ(one.bytes(), kHead + 1);
  EXPECT_GT(one.bits_per_s(), 0);
}

TEST_F(ListenerTest, HasNoRateOfNothing) {
  EXPECT_EQ(Swallow({}).bits_per_s(), 0);
  EXPECT_EQ(Swallow({0}).bits_per_s(), 0);
}

// As if the process that receives had been kept waiting, and then read all from its buffers.
TEST_F(ListenerTest, IsNotMistakenAboutWhatComesAtOnceAtTheEnd) {
  constexpr absl::Duration kPause = absl::Milliseconds(300);
  const Swallowed burst = Swallow({1, 2 * kHead, kHead}, kPause);
  // Not all of the pause: it may have begun before the one that receives.
  EXPECT_LE(burst.bits_per_s(),
            8. * static_cast<double>(burst.bytes()) / absl::ToDoubleSeconds(kPause / 2));
}

}  // namespace
}  // namespace signpost::doctor
