#include "server/job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/time.h"
#include "server/test_job.h"

namespace signpost {
namespace {

// Who calls LeaveOut goes through all chunks: at most once for a round, not with each frame.
TEST(Job, SaysWithWhichFrameARoundLacksNobodyButAbsentRanks) {
  JoinRequest join = TestJoin(0, /*world_size=*/4);
  join.mutable_options()->set_round_deadline_us(1'000'000);
  join.mutable_options()->set_min_workers(2);
  Job job({"job", 1}, /*world_size=*/4, LayoutOf(join), ShardId(), /*bell=*/nullptr);
  absl::Time now = absl::FromUnixSeconds(1700000000);
  const auto send = [&](uint32_t rank, uint64_t step) {
    return job.Exchange(TestFrame(job.layout(), {rank, step, 0}, ONE_BIT), now,
                        [](absl::StatusOr<OwnedChunk::Reply>) {});
  };
  for (uint32_t rank : {0, 1, 2}) EXPECT_FALSE(send(rank, 0)) << "nobody is absent";
  now += absl::Seconds(1);
  ASSERT_TRUE(job.LeaveOut(absl::ZeroDuration(), /*gone=*/{}, now));
  job.SetLateRoundsDurable(now);

  EXPECT_FALSE(send(0, 1));
  EXPECT_FALSE(send(1, 1));
  EXPECT_TRUE(send(2, 1)) << "only rank 3 is missing, which is absent";
  ASSERT_TRUE(job.LeaveOut(absl::ZeroDuration(), /*gone=*/{}, now));
  job.SetLateRoundsDurable(now);
  EXPECT_FALSE(send(3, 0)) << "it is back";
  for (uint32_t rank : {0, 1, 2}) EXPECT_FALSE(send(rank, 2));
  job.End(absl::CancelledError());
}

}  // namespace
}  // namespace signpost
