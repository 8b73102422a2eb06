#include "bench/rank.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "bench/plain_memory.h"
#include "bench/plain_tcp.h"
#include "client/reduction_session.h"
#include "client/session.h"
#include "kernels/onebit.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "proto/payload.h"
#include "proto/steady_time.h"
#include "proto/window.h"
#include "worker/chunk_queue.h"
#include "worker/inbox.h"

namespace signpost::bench {
namespace {

template <class T>
std::string NameIn(const std::map<std::string, T>& names, T value) {
  for (const auto& [name, named] : names) {
    if (named == value) return name;
  }
  return "";
}

// A model has many tensors, and none of a round size.
constexpr uint64_t kTensors = 24;

std::vector<uint64_t> TensorSizes(uint64_t parameters) {
  const uint64_t tensors = std::min(kTensors, parameters);
  std::vector<uint64_t> sizes(tensors, parameters / tensors);
  sizes.back() += parameters % tensors;
  return sizes;
}

// Numbers of a gradient's kind: normal ones, of another rank others.
void FillWithGradient(uint32_t rank, absl::Span<float> gradient) {
  constexpr size_t kPeriod = 99991;  // they need not all be different
  std::mt19937 engine(rank);
  std::normal_distribution<float> normal(0, 1e-3f);
  for (size_t i = 0; i < gradient.size(); ++i) {
    gradient[i] = i < kPeriod ? normal(engine) : gradient[i - kPeriod];
  }
}

std::vector<float> GradientOf(uint32_t rank, uint64_t elements) {
  std::vector<float> gradient(elements);
  FillWithGradient(rank, absl::MakeSpan(gradient));
  return gradient;
}

// The tensors of a model that lie one behind the other.
template <typename T>
std::vector<absl::Span<T>> Cut(std::vector<T>& values) {
  std::vector<absl::Span<T>> tensors;
  size_t begin = 0;
  for (const uint64_t size : TensorSizes(values.size())) {
    tensors.push_back(absl::MakeSpan(values).subspan(begin, size));
    begin += size;
  }
  return tensors;
}

std::vector<Parameter> ParametersOf(std::vector<float>& values) {
  std::vector<Parameter> parameters;
  for (const absl::Span<float> tensor : Cut(values)) {
    const std::string name = absl::StrCat("tensor ", parameters.size());
    parameters.push_back({.name = name, .shape = {tensor.size()}, .values = tensor});
  }
  return parameters;
}

// Frames that were packed before.
using Answers = Inbox<absl::StatusOr<Answer>>;

class FramesRank final : public Rank {
 public:
  FramesRank(const SessionOptions& session, const RankOptions& options, Layout layout,
             std::vector<std::unique_ptr<Channel>> channels)
      : worker_(session.worker),
        codec_(options.codec),
        layout_(std::move(layout)),
        shard_of_chunk_(layout_.ShardOfChunk(channels.size())),
        window_(WindowOf(session.aggregators.size())),
        shard_count_(channels.size()),
        channels_(std::move(channels)) {
    channels_.resize(layout_.OwningShards(shard_count_));
  }

  absl::Status Join() {
    JoinRequest request;
    request.set_job(worker_.job);
    request.set_rank(worker_.rank);
    request.set_world_size(worker_.world_size);
    request.set_incarnation(worker_.rank + 1);
    request.set_shard_count(shard_count_);
    *request.mutable_options() = layout_.options();
    request.mutable_tensors()->Add(layout_.tensors().begin(), layout_.tensors().end());
    for (uint32_t shard = 0; shard < channels_.size(); ++shard) {
      request.set_shard(shard);
      const auto response =
          channels_[shard]->Join(request, SteadyNow() + worker_.join_timeout, Channel::MayWait);
      if (!response.ok()) return response.status();
      epochs_.push_back(response->epoch());
    }
    for (uint32_t chunk = 0; chunk < layout_.chunks().size(); ++chunk) Pack(chunk);
    return absl::OkStatus();
  }

  absl::Status Exchange() override {
    ChunkQueue queue(headers_.size(), window_);
    for (uint32_t chunk = 0; chunk < headers_.size(); ++chunk) queue.SetReady(chunk);
    while (!queue.all_answered()) {
      if (const std::optional<uint32_t> chunk = queue.TakeNext()) {
        Send(*chunk, SteadyNow() + worker_.exchange_timeout);
        continue;
      }
      std::optional<Answers::Item> item = inbox_.Take(*worker_.clock, worker_.exchange_timeout);
      if (!item) return absl::DeadlineExceededError("an exchange got no answer");
      if (!item->what.ok()) return item->what.status();
      const Answer& answer = *item->what;
      const absl::Status status =
          CheckAnswer(answer.header, answer.payload.span(), headers_[item->chunk], layout_);
      if (!status.ok()) return status;
      queue.SetAnswered(item->chunk);
    }
    ++step_;
    return absl::OkStatus();
  }

  absl::Status Leave() override {
    LeaveRequest request;
    request.set_job(worker_.job);
    request.set_rank(worker_.rank);
    request.set_steps(step_);
    request.set_incarnation(worker_.rank + 1);
    absl::Status first_error;
    for (uint32_t shard = 0; shard < channels_.size(); ++shard) {
      request.set_epoch(epochs_[shard]);
      first_error.Update(channels_[shard]->Leave(request, SteadyNow() + worker_.exchange_timeout));
    }
    return first_error;
  }

 private:
  struct Packed {
    std::shared_ptr<Payload> payload;
    uint32_t crc32c = 0;
  };

  // A payload and its negative, which follow one another: their mean is zero, so no error grows.
  void Pack(uint32_t chunk) {
    std::vector<float> values = GradientOf(worker_.rank, layout_.chunks()[chunk].elements);
    for (int sign = 0; sign < 2; ++sign) {
      auto payload = std::make_shared<Payload>(layout_.PayloadBytes(codec_, chunk));
      if (codec_ == ONE_BIT) {
        PackOneBit(layout_.chunks()[chunk], values, payload->data());
      } else {
        std::memcpy(payload->data(), values.data(), payload->size());
      }
      packed_.push_back({payload, Crc32c(payload->span())});
      for (float& value : values) value = -value;
    }
    FrameHeader& header = headers_.emplace_back();
    header.set_job(worker_.job);
    header.set_epoch(epochs_[shard_of_chunk_[chunk]]);
    header.set_rank(worker_.rank);
    header.set_chunk(chunk);
    header.set_codec(codec_);
    header.set_incarnation(worker_.rank + 1);
  }

  void PackOneBit(const Chunk& chunk, absl::Span<const float> values, uint8_t* payload) const {
    const kernels::BlockRule rule = {.block_elements = worker_.block_elements,
                                     .gamma = worker_.gamma};
    for (const Segment& segment : chunk.segments) {
      std::vector<float> no_error(segment.elements);
      kernels::CompressOneBit(rule, values.subspan(segment.chunk_offset, segment.elements),
                              absl::MakeSpan(no_error), OneBitPart(chunk, segment, payload));
    }
  }

  void Send(uint32_t chunk, absl::Time deadline) {
    const Packed& packed = packed_[2 * chunk + step_ % 2];
    FrameHeader& header = headers_[chunk];
    header.set_step(step_);
    header.set_answered_steps(step_);
    header.set_payload_crc32c(packed.crc32c);
    channels_[shard_of_chunk_[chunk]]->Exchange(
        header, packed.payload, deadline,
        [this, chunk](absl::StatusOr<Answer> answer) { inbox_.Put(chunk, std::move(answer)); });
  }

  const WorkerOptions worker_;
  const Codec codec_;
  const Layout layout_;
  const std::vector<uint32_t> shard_of_chunk_;
  const uint32_t window_;
  std::vector<uint64_t> epochs_;      // by shard
  std::vector<FrameHeader> headers_;  // by chunk
  std::vector<Packed> packed_;        // two for each chunk
  uint64_t step_ = 0;
  Answers inbox_;
  const uint32_t shard_count_;                      // also those that own no chunk
  std::vector<std::unique_ptr<Channel>> channels_;  // by shard; destroyed first
};

class MeanRank final : public Rank {
 public:
  MeanRank(std::unique_ptr<ReductionSession> session, uint32_t rank, std::vector<float> gradient)
      : session_(std::move(session)), rank_(rank), values_(std::move(gradient)) {}

  // A mean of means would grow for ever, since scales do. Seldom: other ranks' exchanges wait for
  // it.
  absl::Status Prepare() override {
    constexpr uint32_t kMeansOfMeans = 32;
    if (exchanges_++ % kMeansOfMeans == 0) FillWithGradient(rank_, absl::MakeSpan(values_));
    return absl::OkStatus();
  }
  absl::Status Exchange() override { return session_->Reduce(Cut(values_)).status(); }
  absl::Status Leave() override { return session_->Leave(); }

 private:
  const std::unique_ptr<ReductionSession> session_;
  const uint32_t rank_;
  std::vector<float> values_;
  uint32_t exchanges_ = 0;
};

// The gradients of a model's tensors. Those of a large model share memory, as where each goes
// before the next is made: there is room for a part of them only, which is more than caches hold.
class Gradients {
 public:
  Gradients(uint32_t rank, const std::vector<uint64_t>& sizes) {
    uint64_t all = 0;
    for (const uint64_t size : sizes) all += size;
    const uint64_t room = std::max(kMostElements, *absl::c_max_element(sizes));
    memory_ = GradientOf(rank, std::min(all, room));
    size_t begin = 0;
    for (const uint64_t size : sizes) {
      if (begin + size > memory_.size()) begin = 0;
      tensors_.push_back(absl::MakeConstSpan(memory_).subspan(begin, size));
      begin += size;
    }
  }
  absl::Span<const Gradient> tensors() const { return tensors_; }

 private:
  static constexpr uint64_t kMostElements = uint64_t{24} << 20;

  std::vector<float> memory_;
  std::vector<Gradient> tensors_;
};

class StepRank final : public Rank {
 public:
  StepRank(std::unique_ptr<Session> session, std::vector<float> parameters, uint32_t rank,
           uint32_t steps)
      : parameters_(std::move(parameters)),
        gradients_(rank, TensorSizes(parameters_.size())),
        session_(std::move(session)),
        steps_(steps) {}

  // Until all that follow are alike: behind the freeze, and the first step of the one-bit stage,
  // which takes a buffer, and, with 0/1 Adam, with as many steps between synchronisations.
  absl::Status WarmUp() {
    uint64_t synchronised = 0;  // after so many steps
    while (true) {
      if (absl::Status status = Step(); !status.ok()) return status;
      if (!session_->is_synchronised()) continue;
      const uint64_t interval = session_->steps() - synchronised;
      synchronised = session_->steps();
      if (synchronised >= 2 && interval == steps_) return absl::OkStatus();
    }
  }

  absl::Status Exchange() override {
    for (uint32_t step = 0; step < steps_; ++step) {
      if (absl::Status status = Step(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }
  absl::Status Leave() override { return session_->Leave(); }

 private:
  absl::Status Step() { return session_->Step(gradients_.tensors(), {GroupRates()}).status(); }

  std::vector<float> parameters_;
  const Gradients gradients_;
  const std::unique_ptr<Session> session_;
  const uint32_t steps_;  // in an exchange
};

absl::StatusOr<std::unique_ptr<Rank>> JoinFrames(const SessionOptions& session,
                                                 const RankOptions& options) {
  std::vector<Tensor> tensors;
  for (const uint64_t size : TensorSizes(options.parameters)) {
    Tensor& tensor = tensors.emplace_back();
    tensor.set_name(absl::StrCat("tensor ", tensors.size()));
    tensor.add_shape(size);
  }
  JobOptions job;
  job.set_block_elements(session.worker.block_elements);
  job.set_chunk_elements(
      session.worker.chunk_elements != 0
          ? session.worker.chunk_elements
          : SuitableChunkElements(options.parameters, session.worker.block_elements,
                                  session.worker.world_size));
  job.set_gamma(session.worker.gamma);
  job.set_optimizer("none: frames that were packed before");
  absl::StatusOr<Layout> layout = Layout::Create(tensors, job);
  if (!layout.ok()) return layout.status();
  absl::StatusOr<std::vector<std::unique_ptr<Channel>>> channels = ConnectTo(session);
  if (!channels.ok()) return channels.status();
  auto rank =
      std::make_unique<FramesRank>(session, options, *std::move(layout), *std::move(channels));
  if (absl::Status status = rank->Join(); !status.ok()) return status;
  return rank;
}

absl::StatusOr<std::unique_ptr<Rank>> JoinMean(const SessionOptions& session,
                                               const RankOptions& options) {
  std::vector<float> gradient = GradientOf(session.worker.rank, options.parameters);
  absl::StatusOr<std::unique_ptr<ReductionSession>> joined =
      ReductionSession::Join(session, "mean", {.codec = options.codec}, ParametersOf(gradient));
  if (!joined.ok()) return joined.status();
  return std::make_unique<MeanRank>(*std::move(joined), session.worker.rank, std::move(gradient));
}

absl::StatusOr<std::unique_ptr<Rank>> JoinStep(const SessionOptions& session,
                                               const RankOptions& options) {
  const bool is_zero_one = options.optimizer == StepOptimizer::kZeroOneAdam;
  const bool freezes = options.codec == ONE_BIT || is_zero_one;
  OptimizerOptions optimizer = {
      .freeze_step = freezes ? 1 : OptimizerOptions::kNever,
      .warm_up_codec = freezes ? FLOAT32 : options.codec,
  };
  if (is_zero_one) {
    optimizer.codec = options.codec;
    optimizer.zero_one = ZeroOneOptions();
  } else if (options.optimizer == StepOptimizer::kLamb) {
    optimizer.lamb = LambOptions();
  }
  std::vector<float> parameters(options.parameters, 0.5f);
  absl::StatusOr<std::unique_ptr<Session>> joined =
      Session::Join(session, optimizer, ParametersOf(parameters));
  if (!joined.ok()) return joined.status();
  auto rank = std::make_unique<StepRank>(*std::move(joined), std::move(parameters),
                                         session.worker.rank, StepsPerExchange(options));
  if (absl::Status status = rank->WarmUp(); !status.ok()) return status;
  return rank;
}

}  // namespace

const std::map<std::string, Codec>& Codecs() {
  static const auto* const codecs =
      new std::map<std::string, Codec>{{"onebit", ONE_BIT}, {"int4", INT4},    {"int8", INT8},
                                       {"bf16", BFLOAT16},  {"fp16", FLOAT16}, {"fp32", FLOAT32}};
  return *codecs;
}

std::string NameOfCodec(Codec codec) { return NameIn(Codecs(), codec); }

const std::map<std::string, StepOptimizer>& StepOptimizers() {
  static const auto* const optimizers =
      new std::map<std::string, StepOptimizer>{{"OneBitAdam", StepOptimizer::kAdam},
                                               {"OneBitLamb", StepOptimizer::kLamb},
                                               {"ZeroOneAdam", StepOptimizer::kZeroOneAdam}};
  return *optimizers;
}

std::string NameOfOptimizer(StepOptimizer optimizer) { return NameIn(StepOptimizers(), optimizer); }

uint32_t StepsPerExchange(const RankOptions& options) {
  const bool has_local_steps =
      options.mode == "step" && options.optimizer == StepOptimizer::kZeroOneAdam;
  return has_local_steps ? ZeroOneOptions().local_step_clipper : 1;
}

bool CanPackFrames(Codec codec) { return codec == ONE_BIT || codec == FLOAT32; }

double BitsPerParameter(Codec codec) {
  if (const auto type = DenseTypeOf(codec)) return 8.0 * kernels::DenseBytes(*type, 1);
  const auto type = IntegerTypeOf(codec);
  return (type ? kernels::BitsOf(*type) : 1) + 32.0 / WorkerOptions().block_elements;
}

absl::StatusOr<std::unique_ptr<Rank>> JoinAsRank(SessionOptions session,
                                                 const RankOptions& options) {
  if (options.parameters == 0) return absl::InvalidArgumentError("there are no parameters");
  session.worker.chunk_elements = options.chunk_elements;
  if (options.mode == "frames" && CanPackFrames(options.codec)) return JoinFrames(session, options);
  if (options.mode == "mean") return JoinMean(session, options);
  if (options.mode == "step") return JoinStep(session, options);
  if (options.mode == "tcp") {
    const double bytes = options.parameters * BitsPerParameter(options.codec) / 8;
    return PlainTcp::Connect(session.worker.world_size, session.aggregators.size(),
                             static_cast<uint64_t>(bytes));
  }
  if (options.mode == "memory") {
    RankOptions step = options;
    step.mode = "step";
    const std::optional<double> bytes = StepBytes(step, session.worker.world_size);
    if (bytes) return std::make_unique<PlainMemory>(*bytes, std::thread::hardware_concurrency());
  }
  return absl::InvalidArgumentError(
      absl::StrCat("there are no exchanges of ", options.mode, " as ", CodecName(options.codec)));
}

absl::Status ServeLines(Rank& rank) {
  std::puts("ready");
  std::fflush(stdout);
  std::string line;
  while (std::getline(std::cin, line)) {
    uint32_t exchanges;
    if (!absl::SimpleAtoi(line, &exchanges)) {
      return absl::InvalidArgumentError(absl::StrCat("'", line, "' is no number of exchanges"));
    }
    std::string times;
    for (; exchanges > 0; --exchanges) {
      if (absl::Status status = rank.Prepare(); !status.ok()) return status;
      const absl::Time start = SteadyNow();
      if (absl::Status status = rank.Exchange(); !status.ok()) return status;
      absl::StrAppend(&times, times.empty() ? "" : " ", absl::ToDoubleSeconds(SteadyNow() - start));
    }
    std::puts(times.c_str());
    std::fflush(stdout);
  }
  return rank.Leave();
}

}  // namespace signpost::bench
