#include "worker/helper_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/crew_threads.h"

namespace signpost {
namespace {

TEST(HelperThreads, WorkAtTheSameTimeAsWhoeverAsks) {
  const std::shared_ptr<HelperThreads> helpers = HelperThreads::AtLeast(2);
  for (int round = 0; round < 3; ++round) {
    absl::Mutex mutex;
    std::set<std::thread::id> threads;
    // Nobody goes on until three are there.
    helpers->Share(4, [&](size_t) {
      absl::MutexLock lock(&mutex);
      threads.insert(std::this_thread::get_id());
      const auto all_came = [&] { return threads.size() == 3; };
      EXPECT_TRUE(mutex.AwaitWithTimeout(absl::Condition(&all_came), absl::Seconds(60)));
    });
    EXPECT_EQ(threads.size(), 3);
    EXPECT_TRUE(threads.contains(std::this_thread::get_id()));
  }
}

TEST(HelperThreads, BelongToTheProcessAndEndWithTheirLastUser) {
  EXPECT_EQ(CrewThreads(), 0);
  std::shared_ptr<HelperThreads> two = HelperThreads::AtLeast(2);
  std::shared_ptr<HelperThreads> three = HelperThreads::AtLeast(3);
  EXPECT_EQ(HelperThreads::AtLeast(1), two);
  EXPECT_EQ(three, two);
  EXPECT_EQ(CrewThreads(), 3);
  two.reset();
  EXPECT_EQ(CrewThreads(), 3);
  three.reset();
  EXPECT_EQ(CrewThreads(), 0);
  two = HelperThreads::AtLeast(2);
  EXPECT_EQ(CrewThreads(), 2);
}

// Helpers that come late find nothing left, or the next task.
TEST(HelperThreads, AllIsDoneOnceWhenShareReturns) {
  const std::shared_ptr<HelperThreads> helpers = HelperThreads::AtLeast(3);
  for (size_t round = 0; round < 3000; ++round) {
    std::vector<std::atomic<int>> visits(round % 9);
    helpers->Share(visits.size(), [&](size_t i) { ++visits[i]; });
    for (const std::atomic<int>& times : visits) ASSERT_EQ(times, 1);
  }
}

TEST(HelperThreads, AnExceptionComesOutOfShareWhenAllIsDone) {
  const std::shared_ptr<HelperThreads> helpers = HelperThreads::AtLeast(2);
  for (size_t failing = 0; failing < 30; ++failing) {
    std::vector<std::atomic<int>> visits(30);
    const auto visit = [&](size_t i) {
      ++visits[i];
      if (i == failing || i == 29) throw std::runtime_error("failed");
    };
    EXPECT_THROW(helpers->Share(visits.size(), visit), std::runtime_error);
    for (const std::atomic<int>& times : visits) ASSERT_EQ(times, 1);
  }
}

TEST(HelperThreads, SeveralMayAskAtOnce) {
  const std::shared_ptr<HelperThreads> helpers = HelperThreads::AtLeast(2);
  std::vector<std::thread> askers;
  for (int asker = 0; asker < 4; ++asker) {
    askers.emplace_back([&] {
      for (int round = 0; round < 500; ++round) {
        std::vector<std::atomic<int>> visits(7);
        helpers->Share(visits.size(), [&](size_t i) { ++visits[i]; });
        for (const std::atomic<int>& times : visits) ASSERT_EQ(times, 1);
      }
    });
  }
  for (std::thread& asker : askers) asker.join();
}

}  // namespace
}  // namespace signpost
