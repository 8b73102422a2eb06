#include "server/call_limit.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"

namespace signpost {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;

auto IsOf(const std::string& peer, int calls) {
  return AllOf(Field(&ExcessCalls::peer, MatchesRegex(peer)), Field(&ExcessCalls::calls, calls));
}

// Answers each call, and ends it when it is cancelled.
class Service : public grpc::CallbackGenericService {
 public:
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    struct Reactor : grpc::ServerGenericBidiReactor {
      Reactor() { StartSendInitialMetadata(); }
      void OnCancel() override { Finish(grpc::Status::CANCELLED); }
      void OnDone() override { delete this; }
    };
    return new Reactor;
  }
};

// Goes on, once answered, until it is destroyed.
class Call : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit Call(const std::shared_ptr<grpc::Channel>& channel) : stub_(channel) {
    stub_.PrepareBidiStreamingCall(&context_, "/test/Call", {}, this);
    StartCall();
    answered_.WaitForNotification();
  }
  ~Call() override {
    context_.TryCancel();
    done_.WaitForNotification();
  }

  void OnReadInitialMetadataDone(bool) override { answered_.Notify(); }
  void OnDone(const grpc::Status&) override { done_.Notify(); }

 private:
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  absl::Notification answered_, done_;
};

class CallLimitTest : public ::testing::Test {
 protected:
  // Null where the address is not to be had.
  std::shared_ptr<grpc::Channel> ServeOn(const std::string& host,
                                         const CallLimits& limits = {2, 1000}) {
    grpc::ServerBuilder builder;
    builder.RegisterCallbackGenericService(&service_);
    int port = 0;
    builder.AddListeningPort(host + ":0", grpc::InsecureServerCredentials(), &port);
    LimitCalls(
        limits,
        [this](const ExcessCalls& excess) {
          absl::MutexLock lock(&mutex_);
          told_.push_back(excess);
        },
        builder);
    server_ = builder.BuildAndStart();
    if (port == 0) return nullptr;
    target_ = absl::StrCat(host, ":", port);
    return grpc::CreateChannel(target_, grpc::InsecureChannelCredentials());
  }

  // A connection of its own.
  std::shared_ptr<grpc::Channel> ConnectAgain() const {
    grpc::ChannelArguments own;
    own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(target_, grpc::InsecureChannelCredentials(), own);
  }

  std::vector<ExcessCalls> told() {
    absl::MutexLock lock(&mutex_);
    return told_;
  }

  absl::Mutex mutex_;
  std::vector<ExcessCalls> told_ ABSL_GUARDED_BY(mutex_);
  Service service_;
  std::unique_ptr<grpc::Server> server_;
  std::string target_;
};

TEST_F(CallLimitTest, TellsOfAConnectionEachTimeThatItHasTooMany) {
  const auto channel = ServeOn("127.0.0.1");
  const Call first(channel);
  {
    const Call second(channel);
    EXPECT_THAT(told(), IsEmpty());
    const Call third(channel), fourth(channel);
    EXPECT_THAT(told(), ElementsAre(IsOf("ipv4:127\\.0\\.0\\.1:[0-9]+", 3)));
  }
  // The server may free calls when the client has long had their end.
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (told().size() < 2 && absl::Now() < deadline) {
    const Call second(channel), third(channel);
  }
  EXPECT_GE(told().size(), 2);
}

TEST_F(CallLimitTest, CountsEachConnectionByItself) {
  const auto channel = ServeOn("127.0.0.1");
  const Call first(channel), second(channel);
  const auto other = ConnectAgain();
  const Call third(other), fourth(other);
  EXPECT_THAT(told(), IsEmpty());
}

// Who has missed it the first time is told again.
TEST_F(CallLimitTest, TellsAgainWhileTheyBecomeMore) {
  const auto channel = ServeOn("127.0.0.1");
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < 2 + kCallsBetween; ++i) calls.push_back(std::make_unique<Call>(channel));
  EXPECT_EQ(told().size(), 1);
  calls.push_back(std::make_unique<Call>(channel));
  EXPECT_THAT(told(), ElementsAre(IsOf("ipv4:.*", 3), IsOf("ipv4:.*", 3 + kCallsBetween)));
}

TEST_F(CallLimitTest, TellsOfTheConnectionWithTheMostWhenAllTogetherAreTooMany) {
  const auto channel = ServeOn("127.0.0.1", {.of_connection = 1000, .in_all = 4});
  const Call first(channel);
  const auto other = ConnectAgain();
  const Call second(other), third(other);
  EXPECT_THAT(told(), IsEmpty());
  const Call fourth(channel);
  const Call fifth(other);
  EXPECT_THAT(told(), ElementsAre(IsOf("ipv4:.*", 3)));
}

TEST_F(CallLimitTest, TellsTheNameOfAnIpv6Connection) {
  const auto channel = ServeOn("[::1]");
  if (channel == nullptr) GTEST_SKIP() << "there is no ::1 here";
  const Call first(channel), second(channel), third(channel);
  EXPECT_THAT(told(), ElementsAre(IsOf("ipv6:%5B::1%5D:[0-9]+", 3)));
}

}  // namespace
}  // namespace signpost
