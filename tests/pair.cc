#include "tests/pair.h"

#include <cstring>
#include <utility>

#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace signpost::testing {
namespace {

constexpr char kJob[] = "pair";
constexpr uint64_t kElements = 1 << 21;
constexpr uint32_t kChunkElements = 1 << 20;
constexpr size_t kFrameBytes = kChunkElements * sizeof(float);

}  // namespace

absl::Time Later() { return absl::Now() + absl::Seconds(30); }

JoinRequest Pair::RequestOf(uint32_t rank) {
  JoinRequest request;
  request.set_job(kJob);
  request.set_rank(rank);
  request.set_world_size(2);
  request.set_incarnation(rank + 1);
  request.set_shard_count(1);
  request.mutable_options()->set_block_elements(4096);
  request.mutable_options()->set_chunk_elements(kChunkElements);
  request.mutable_options()->set_gamma(1.35f);
  Tensor& tensor = *request.add_tensors();
  tensor.set_name("w");
  tensor.add_shape(kElements);
  return request;
}

void Pair::Join(Channel& first, Channel& second) {
  auto other = std::async(std::launch::async,
                          [&] { return second.Join(RequestOf(1), Later(), Channel::MayWait); });
  auto response = first.Join(RequestOf(0), Later(), Channel::MayWait);
  ASSERT_TRUE(response.ok()) << response.status();
  ASSERT_TRUE(other.get().ok());
  epoch_ = response->epoch();
}

Sent Pair::FrameOf(uint32_t rank, float value, uint64_t step) const {
  auto payload = std::make_shared<Payload>(kFrameBytes);
  for (size_t i = 0; i < payload->size(); i += sizeof value) {
    std::memcpy(payload->data() + i, &value, sizeof value);
  }
  Sent sent;
  sent.header.set_job(kJob);
  sent.header.set_epoch(epoch_);
  sent.header.set_rank(rank);
  sent.header.set_incarnation(RequestOf(rank).incarnation());
  sent.header.set_step(step);
  sent.header.set_codec(FLOAT32);
  sent.header.set_payload_crc32c(Crc32c(payload->span()));
  sent.payload = std::move(payload);
  return sent;
}

std::future<absl::StatusOr<Answer>> Exchange(Channel& channel, const Sent& sent,
                                             absl::Time deadline) {
  auto promise = std::make_shared<std::promise<absl::StatusOr<Answer>>>();
  channel.Exchange(sent.header, sent.payload, deadline, [promise](absl::StatusOr<Answer> answer) {
    promise->set_value(std::move(answer));
  });
  return promise->get_future();
}

void ExpectMean(const absl::StatusOr<Answer>& answer, float value) {
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->header.codec(), FLOAT32);
  ASSERT_EQ(answer->payload.size(), kFrameBytes);
  for (size_t i = 0; i < kFrameBytes; i += sizeof value) {
    ASSERT_EQ(std::memcmp(answer->payload.data() + i, &value, sizeof value), 0) << i;
  }
}

}  // namespace signpost::testing
