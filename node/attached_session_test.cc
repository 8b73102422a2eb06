// Where there is no node's worker. With one, tests/node_*_test.cc have it.

#include "node/attached_session.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/session_options.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::node {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class AttachedSessionTest : public ::testing::Test {
 protected:
  AttachedSessionTest() {
    options_.worker.job = "job";
    options_.worker.join_timeout = absl::Milliseconds(1200);
    options_.on_connection = [this](const std::string& line) { lines_.push_back(line); };
  }

  absl::Status Join(const std::string& node) {
    options_.node = node;
    return AttachedSession::Join(options_, OptimizerOptions(), {{"x", {3}, absl::MakeSpan(x_)}})
        .status();
  }

  SessionOptions options_;
  std::vector<float> x_ = {1, 2, 3};
  std::vector<std::string> lines_;
};

TEST_F(AttachedSessionTest, SaysWhatItWaitsForAndThenThatNobodyCame) {
  const std::string node = "unix:" + ::testing::TempDir() + "/nobody";
  const absl::Status status = Join(node);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("no worker of this node answers at " + node));
  EXPECT_THAT(lines_, ElementsAre(HasSubstr("waiting for the worker of this node, at " + node)));
}

TEST_F(AttachedSessionTest, DoesNotWaitWhereNoneCanBe) {
  options_.worker.join_timeout = absl::Hours(1);
  const absl::Status status = Join("worker");
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("'worker': wanted unix:PATH"));
  options_.worker.job = "caf\xe9";
  EXPECT_TRUE(absl::IsInvalidArgument(Join("unix:/nobody")));
  EXPECT_THAT(lines_, IsEmpty());
}

}  // namespace
}  // namespace signpost::node
