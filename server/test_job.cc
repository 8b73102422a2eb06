#include "server/test_job.h"

#include <cmath>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/codec.h"

namespace signpost {
namespace {

void AddTensor(JoinRequest& request, const std::string& name, std::vector<uint64_t> shape) {
  Tensor& tensor = *request.add_tensors();
  tensor.set_name(name);
  tensor.mutable_shape()->Add(shape.begin(), shape.end());
}

// In (-2^10, 2^10), rarely near the ends.
float RandomFloat(std::mt19937& random) {
  const float mantissa = std::uniform_real_distribution<float>(-1, 1)(random);
  return std::ldexp(mantissa, std::uniform_int_distribution<int>(-10, 10)(random));
}

void FillDense(Codec codec, std::mt19937& random, Payload& payload) {
  const size_t bytes = codec == BFLOAT16 ? 2 : 4;
  for (size_t at = 0; at < payload.size(); at += bytes) {
    const float value = RandomFloat(random);
    // Little-endian: bf16 is the upper half.
    std::memcpy(payload.data() + at, reinterpret_cast<const char*>(&value) + 4 - bytes, bytes);
  }
}

void FillOneBit(const Chunk& chunk, std::mt19937& random, Payload& payload) {
  std::memset(payload.data(), 0, payload.size());
  auto* scales = reinterpret_cast<float*>(payload.data());
  for (uint32_t block = 0; block < chunk.blocks; ++block) {
    scales[block] = std::fabs(RandomFloat(random));
  }
  for (const Segment& segment : chunk.segments) {
    uint8_t* bits = OneBitPart(chunk, segment, payload.data()).bits;
    for (uint32_t i = 0; i < segment.elements; ++i) bits[i / 8] |= (random() & 1) << (i % 8);
  }
}

}  // namespace

JoinRequest TestJoin(uint32_t rank, uint32_t world_size, const std::string& job) {
  JoinRequest request;
  request.set_job(job);
  request.set_rank(rank);
  request.set_world_size(world_size);
  request.set_incarnation(1000 + rank);
  request.set_shard_count(1);
  request.mutable_options()->set_block_elements(8);
  request.mutable_options()->set_chunk_elements(32);
  request.mutable_options()->set_gamma(1.35f);
  AddTensor(request, "weight", {5, 9});
  AddTensor(request, "bias", {11});
  AddTensor(request, "scale", {});
  return request;
}

Layout LayoutOf(const JoinRequest& request) {
  const std::vector<Tensor> tensors(request.tensors().begin(), request.tensors().end());
  return *Layout::Create(tensors, request.options());
}

Frame TestFrame(const Layout& layout, const FrameKey& key, Codec codec, uint32_t seed) {
  std::seed_seq seeds = {seed, key.rank, static_cast<uint32_t>(key.step), key.chunk,
                         static_cast<uint32_t>(codec)};
  std::mt19937 random(seeds);
  const Chunk& chunk = layout.chunks()[key.chunk];
  Frame frame;
  frame.header.set_rank(key.rank);
  frame.header.set_step(key.step);
  frame.header.set_chunk(key.chunk);
  frame.header.set_codec(codec);
  if (codec == SKIP) {
    frame.payload = SkipPayload(key.rank % chunk.blocks);
  } else {
    frame.payload = Payload(layout.PayloadBytes(codec, key.chunk));
    if (codec == ONE_BIT) {
      FillOneBit(chunk, random, frame.payload);
    } else {
      FillDense(codec, random, frame.payload);
    }
  }
  frame.header.set_payload_crc32c(Crc32c(frame.payload.span()));
  return frame;
}

Frame Addressed(Frame frame, const std::string& job, uint64_t epoch) {
  frame.header.set_job(job);
  frame.header.set_epoch(epoch);
  frame.header.set_incarnation(1000 + frame.header.rank());
  return frame;
}

Frame CopyOf(const Frame& frame) {
  Frame copy = {frame.header, Payload(frame.payload.size())};
  std::memcpy(copy.payload.data(), frame.payload.data(), frame.payload.size());
  return copy;
}

std::string BytesOf(const Answer& answer) {
  return absl::StrCat(answer.header.ShortDebugString(), "\n",
                      absl::string_view(reinterpret_cast<const char*>(answer.payload.data()),
                                        answer.payload.size()));
}

}  // namespace signpost
