#include "server/test_state.h"

#include <memory>
#include <utility>
#include <vector>

#include "server/test_job.h"

namespace signpost {

JobState TestState(uint64_t epoch, uint64_t open_step) {
  const JoinRequest join = TestJoin(0, /*world_size=*/2);
  const Layout layout = LayoutOf(join);
  JobState state;
  state.id = {"job", epoch};
  state.shard = kShard;
  state.options = join.options();
  state.tensors.assign(join.tensors().begin(), join.tensors().end());
  state.incarnations = {1000, 1001};
  state.left_ranks = {1};
  state.given_up_ranks = {0};
  state.returning_ranks = {0, 1};
  for (uint32_t chunk = 0; chunk < layout.chunks().size(); ++chunk) {
    Frame frame = TestFrame(layout, {0, open_step - 1, chunk}, chunk == 0 ? ONE_BIT : FLOAT32);
    auto answer = std::make_shared<Answer>();
    answer->header.set_step(open_step - 1);
    answer->header.set_chunk(chunk);
    answer->header.set_codec(frame.header.codec());
    answer->header.set_payload_crc32c(frame.header.payload_crc32c());
    answer->payload = std::move(frame.payload);
    ChunkState& to = state.chunks.emplace_back();
    to.chunk = chunk;
    to.open_step = open_step;
    if (chunk == 0) to.error.assign(layout.chunks()[chunk].elements, 0.25f);
    StepRates rates;
    rates.add_groups()->set_learning_rate(0.5);
    to.closed.push_back({std::move(answer), {{ONE_BIT, 1, 3, 4}, {SKIP, 0.5f, 3, 6}}, rates});
  }
  return state;
}

absl::Status Save(StateDir& state_dir, JobState state) {
  const std::vector<ChunkState> chunks = std::exchange(state.chunks, {});
  std::vector<uint32_t> numbers;
  for (const ChunkState& chunk : chunks) numbers.push_back(chunk.chunk);
  return state_dir.Save(state, {numbers, [&](uint32_t chunk, ChunkState& to) {
                                  to = chunks[chunk];
                                  return absl::OkStatus();
                                }});
}

}  // namespace signpost
