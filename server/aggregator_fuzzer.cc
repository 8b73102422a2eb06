// libFuzzer target: what peers ask of an aggregator, one call after the other.
//
//   input = (kind (uint8) size (uint16, little endian) request)*
//
// A request is the message as it travels; 0 stands for the epoch of the job's last welcome, which
// nobody guesses, and the checksum of a frame is put right.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/internal/raw_logging.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "fuzzing/seeds.h"
#include "google/protobuf/stubs/logging.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"
#include "proto/aggregator.pb.h"
#include "proto/frame.h"
#include "proto/message.h"
#include "proto/payload.h"
#include "server/aggregator.h"

namespace signpost {
namespace {

constexpr AggregatorLimits kLimits = {
    .jobs = 3, .workers = 4, .parameters = 4096, .frames = 256, .payload_bytes = 1 << 14};

enum Kind { kJoin, kExchange, kLeave, kReadError, kStatus, kTime, kLateRounds, kKinds };

bool Parse(absl::string_view bytes, google::protobuf::Message& message) {
  return message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
}

void CheckRefusal(const absl::Status& status) {
  ABSL_RAW_CHECK(!absl::IsInternal(status) && !absl::IsUnknown(status),
                 "a refusal says whose fault it is");
}

// One aggregator and its peers.
class Conversation {
 public:
  ~Conversation() {
    aggregator_.Drain();
    ABSL_RAW_CHECK(answered_ == asked_, "each call is answered once");
  }

  void Ask(int kind, absl::string_view bytes) {
    switch (kind) {
      case kJoin:
        return Join(bytes);
      case kExchange:
        return Exchange(bytes);
      case kLeave:
        return Leave(bytes);
      case kReadError:
        return ReadError(bytes);
      case kStatus:
        return Status(bytes);
      case kTime:
        now_ += absl::Seconds(bytes.size());
        return;
      default:
        aggregator_.CloseLateRounds();
    }
  }

 private:
  void Join(absl::string_view bytes) {
    JoinRequest request;
    if (!Parse(bytes, request)) return;
    ++asked_;
    aggregator_.Join(request, [this, request](absl::StatusOr<JoinResponse> response) {
      ++answered_;
      if (!response.ok()) return CheckRefusal(response.status());
      ABSL_RAW_CHECK(request.world_size() <= kLimits.workers, "a job keeps to the limits");
      epochs_[request.job()] = response->epoch();
    });
  }

  void Exchange(absl::string_view bytes) {
    const grpc::Slice slice(bytes.data(), bytes.size());
    Frame frame;
    if (!ParseRequest(grpc::ByteBuffer(&slice, 1), kLimits.payload_bytes, frame).ok()) return;
    if (frame.header.epoch() == 0) frame.header.set_epoch(epochs_[frame.header.job()]);
    frame.header.set_payload_crc32c(Crc32c(frame.payload.span()));
    ++asked_;
    aggregator_.Exchange(std::move(frame), [this](const absl::StatusOr<OwnedChunk::Reply>& reply) {
      ++answered_;
      CheckRefusal(reply.status());
    });
  }

  void Leave(absl::string_view bytes) {
    LeaveRequest request;
    if (!Parse(bytes, request)) return;
    if (request.epoch() == 0) request.set_epoch(epochs_[request.job()]);
    ++asked_;
    aggregator_.Leave(request, [this](const absl::Status& status) {
      ++answered_;
      CheckRefusal(status);
    });
  }

  void ReadError(absl::string_view bytes) {
    ReadErrorRequest request;
    if (!Parse(bytes, request)) return;
    if (request.epoch() == 0) request.set_epoch(epochs_[request.job()]);
    CheckRefusal(aggregator_.ReadError(request).status());
  }

  void Status(absl::string_view bytes) {
    StatusRequest request;
    if (!Parse(bytes, request)) return;
    const StatusResponse response = aggregator_.Status(request);
    ABSL_RAW_CHECK(response.jobs_size() <= static_cast<int>(kLimits.jobs),
                   "there are no more jobs than the limits allow");
    aggregator_.Metrics();
  }

  absl::Time now_ = absl::UnixEpoch();
  std::map<std::string, uint64_t> epochs_;  // by job
  int asked_ = 0, answered_ = 0;
  Aggregator aggregator_{{.limits = kLimits, .now = [this] { return now_; }}};
};

// As it is in an input.
std::string Call(Kind kind, const std::string& request) {
  std::string call(1, static_cast<char>(kind));
  call.push_back(static_cast<char>(request.size() & 0xff));
  call.push_back(static_cast<char>(request.size() >> 8));
  return call + request;
}

std::string JoinOf(uint32_t rank, uint64_t incarnation, uint32_t min_workers) {
  JoinRequest request;
  request.set_job("a");
  request.set_rank(rank);
  request.set_world_size(2);
  request.set_incarnation(incarnation);
  request.set_shard_count(1);
  JobOptions& options = *request.mutable_options();
  options.set_block_elements(8);
  options.set_chunk_elements(16);
  options.set_gamma(1.35f);
  if (min_workers > 0) {
    options.set_min_workers(min_workers);
    options.set_round_deadline_us(1000);
  }
  Tensor& tensor = *request.add_tensors();
  tensor.set_name("t");
  tensor.add_shape(24);
  return Call(kJoin, request.SerializeAsString());
}

std::string FrameOf(uint32_t rank, uint32_t chunk, uint64_t step) {
  ExchangeRequest request;
  FrameHeader& header = *request.mutable_header();
  header.set_job("a");
  header.set_rank(rank);
  header.set_incarnation(rank + 1);
  header.set_chunk(chunk);
  header.set_step(step);
  header.set_codec(FLOAT32);
  request.set_payload(std::string(chunk == 0 ? 32 : 64, '\0'));
  return Call(kExchange, request.SerializeAsString());
}

std::string LeaveOf(uint32_t rank, uint64_t incarnation) {
  LeaveRequest request;
  request.set_job("a");
  request.set_rank(rank);
  request.set_incarnation(incarnation);
  return Call(kLeave, request.SerializeAsString());
}

std::string ReadErrorOf(uint32_t chunk) {
  ReadErrorRequest request;
  request.set_job("a");
  request.set_chunk(chunk);
  request.set_step(2);
  request.set_incarnation(1);
  return Call(kReadError, request.SerializeAsString());
}

// Two ranks train for two steps; with `min_workers`, the second one also dies and comes back.
std::string TrainingOf(uint32_t min_workers) {
  std::string calls = JoinOf(0, 1, min_workers) + JoinOf(1, 2, min_workers);
  for (uint64_t step = 0; step < 2; ++step) {
    for (uint32_t chunk = 0; chunk < 2; ++chunk) {
      for (uint32_t rank = 0; rank < 2; ++rank) calls += FrameOf(rank, chunk, step);
    }
  }
  calls += ReadErrorOf(0) + Call(kStatus, "");
  if (min_workers > 0) {
    calls += FrameOf(0, 0, 2) + Call(kTime, "12345") + Call(kLateRounds, "") +
             JoinOf(1, 3, min_workers) + FrameOf(0, 1, 2) + Call(kLateRounds, "");
  }
  return calls + LeaveOf(0, 1) + LeaveOf(1, min_workers > 0 ? 3 : 2) + Call(kStatus, "");
}

void TryInput(absl::string_view input) {
  // It has much to say about messages that are cut off.
  [[maybe_unused]] static auto* const handler = google::protobuf::SetLogHandler(nullptr);
  Conversation conversation;
  while (input.size() >= 3) {
    const auto byte = [&](size_t i) { return static_cast<uint8_t>(input[i]); };
    const int kind = byte(0) % kKinds;
    const size_t size = byte(1) | byte(2) << 8;
    conversation.Ask(kind, input.substr(3, size));
    input.remove_prefix(std::min(input.size(), 3 + size));
  }
}

}  // namespace

std::vector<std::string> fuzzing::Seeds() { return {TrainingOf(0), TrainingOf(1)}; }

}  // namespace signpost

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  signpost::TryInput({reinterpret_cast<const char*>(data), size});
  return 0;
}
