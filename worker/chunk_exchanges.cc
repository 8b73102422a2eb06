#include "worker/chunk_exchanges.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "failpoint/failpoint.h"
#include "log/log.h"
#include "proto/codec.h"
#include "proto/try_again.h"
#include "trace/recorder.h"
#include "trace/span.h"

namespace signpost {
namespace {

// At the exchange's end.
void RecordFailure(trace::Event exchange) {
  exchange.kind = trace::Kind::kFailed;
  exchange.begin = exchange.end;
  exchange.bytes = exchange.codec = 0;
  trace::Record(exchange);
}

}  // namespace

ChunkExchanges::ChunkExchanges(Shards& shards, const Layout& layout, Deliver deliver)
    : shards_(shards),
      layout_(layout),
      deliver_(std::move(deliver)),
      generations_(shards.size()),
      exchanges_(layout.chunks().size()) {}

void ChunkExchanges::Send(uint32_t chunk, SentFrame frame) {
  const uint64_t step = frame.header.step();
  ChunkExchange& exchange = exchanges_[chunk];
  exchange.kept.Add(std::move(frame));
  // Otherwise it follows the one that is under way.
  if (!exchange.step_under_way) Exchange(chunk, step);
}

void ChunkExchanges::Exchange(uint32_t chunk, uint64_t step) {
  ChunkExchange& exchange = exchanges_[chunk];
  exchange.step_under_way.reset();
  exchange.offers_again = false;
  SentFrame* frame = exchange.kept.Find(step);
  if (frame == nullptr) return;
  exchange.step_under_way = step;
  exchange.deadline = deadline_;
  frame->header.set_generation(generations_[shards_.ShardOf(chunk)]);
  frame->header.set_answered_steps(exchange.kept.answered_steps());
  Reach(Failpoint::kWorkerSending);
  trace::Event sent = shards_.EventOf(trace::Kind::kExchange, step, chunk);
  if (trace::IsOn()) {
    sent.begin = trace::Now();
    sent.bytes = frame->payload->size();
    sent.codec = trace::LabelOf(CodecName(frame->header.codec()));
  }
  shards_.ChannelOf(chunk).Exchange(
      frame->header, frame->payload, deadline_,
      [deliver = deliver_, chunk, sent](absl::StatusOr<Answer> answer) mutable {
        if (trace::IsOn()) sent.end = trace::Now();
        trace::Record(sent);
        if (!answer.ok()) RecordFailure(sent);
        deliver(chunk, std::move(answer));
      });
}

absl::StatusOr<std::optional<Answer>> ChunkExchanges::Receive(uint32_t chunk,
                                                              absl::StatusOr<Answer> answer,
                                                              StepReport& report) {
  // Whatever comes of it, nothing is under way any more.
  const uint64_t step = *std::exchange(exchanges_[chunk].step_under_way, std::nullopt);
  const bool may_pass =
      absl::IsDeadlineExceeded(answer.status()) || absl::IsUnavailable(answer.status());
  if (may_pass && exchanges_[chunk].deadline < deadline_) {
    Exchange(chunk, step);
    return std::nullopt;
  }
  absl::StatusOr<std::optional<Answer>> taken = Take(chunk, step, std::move(answer), report);
  if (!taken.ok()) {
    log::WriteEvent(log::Level::kWarning,
                    absl::StrCat("an exchange has failed: ", taken.status().message()),
                    shards_.AboutOf(chunk, step));
  }
  return taken;
}

absl::StatusOr<std::optional<Answer>> ChunkExchanges::Take(uint32_t chunk, uint64_t step,
                                                           absl::StatusOr<Answer> answer,
                                                           StepReport& report) {
  const uint32_t shard = shards_.ShardOf(chunk);
  ChunkExchange& exchange = exchanges_[chunk];
  SentFrame& frame = *exchange.kept.Find(step);
  if (!answer.ok() && frame.answered) {
    // Who waits at another shard hears by an offer that the job has begun anew at this one. But a
    // frame may also be too old, or other ranks have left.
    if (IsTryAgain(answer.status()) && IsAnyAwaited()) {
      const absl::Status stands = shards_.CheckEpochStands(shard);
      if (!stands.ok()) return stands;
    }
    // Nobody needs the answer. If the frame was needed, a later one will be answered with REPLAY;
    // the newest may be needed, too, when an answer that was lost on its way is no longer kept.
    const SentFrame& newest = exchange.kept.newest();
    if (!newest.answered || newest.header.step() != step) Exchange(chunk, newest.header.step());
    return std::nullopt;
  }
  if (!answer.ok()) {
    return shards_.Explain(
        answer.status(), shard,
        absl::StrFormat("step %d, chunk %d of job '%s'", step, chunk, frame.header.job()));
  }
  const AnswerHeader& header = answer->header;
  absl::Status status = CheckAnswer(header, answer->payload.span(), frame.header, layout_);
  if (!status.ok()) {
    return absl::Status(status.code(),
                        absl::StrFormat("answer from aggregator %s: %s",
                                        shards_.channel(shard).target(), status.message()));
  }
  if (header.codec() == FETCH) {
    frame.header.set_next_fetch(frame.header.next_fetch() + 1);
    return *std::move(answer);
  }
  if (header.codec() == REPLAY) {
    if (status = Replay(chunk, step, header, report); !status.ok()) return status;
    return std::nullopt;
  }
  if (frame.answered && header.payload_crc32c() != frame.answer_crc32c) {
    return absl::DataLossError(absl::StrFormat(
        "%s was started again and comes to another result than before for step %d, chunk %d: "
        "CRC-32C %08x, it was %08x. Its error is not what it was; start the job again from a "
        "checkpoint",
        shards_.Describe(shard), step, chunk, header.payload_crc32c(), frame.answer_crc32c));
  }
  // CheckAnswer compares it with the frame's, which may be SKIP.
  if (frame.header.codec() == SKIP && header.codec() != SKIP &&
      header.codec() != frame.round_codec) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "aggregator %s answers step %d, chunk %d as %s, wanted %s", shards_.channel(shard).target(),
        step, chunk, CodecName(header.codec()), CodecName(frame.round_codec)));
  }
  const bool knows_of_restarts = frame.header.generation() == generations_[shard];
  const bool is_news = !frame.answered;
  if (is_news) {
    frame.answered = true;
    frame.answer_crc32c = header.payload_crc32c();
    *frame.header.mutable_late_ranks() = header.late_ranks();
    Reach(Failpoint::kWorkerAnswered);
  }
  Exchange(chunk, step + 1);
  // A late worker's older answers may be durable before it has them.
  const uint64_t durable_step = header.durable_step();
  exchange.kept.Forget(std::min(durable_step, exchange.step_under_way.value_or(durable_step)));
  // It was on its way when another chunk's answer told that the aggregator was started again, so
  // this one has not been offered to the process that is there now.
  if (!knows_of_restarts) Offer(chunk);
  if (!is_news) return std::nullopt;
  return *std::move(answer);
}

absl::Status ChunkExchanges::Replay(uint32_t chunk, uint64_t step, const AnswerHeader& wanted,
                                    StepReport& report) {
  const uint32_t shard = shards_.ShardOf(chunk);
  ChunkExchange& exchange = exchanges_[chunk];
  KeptFrames& kept = exchange.kept;
  trace::RecordMoment(shards_.EventOf(trace::Kind::kReplay, step, chunk));
  const bool knew_of_it = kept.Find(step)->header.generation() == wanted.generation();
  const bool is_news = wanted.generation() > generations_[shard];
  if (is_news) generations_[shard] = wanted.generation();
  if (kept.Find(wanted.step()) != nullptr) {
    report.replayed_frames += kept.newest().header.step() - wanted.step();
    Exchange(chunk, wanted.step());
  } else if (wanted.step() >= first_step_) {
    return absl::DataLossError(absl::StrFormat(
        "%s was started again from an older state than it had promised to keep: it asks for step "
        "%d of chunk %d, and frames are kept from step %d on. Start the job again from a "
        "checkpoint",
        shards_.Describe(shard), wanted.step(), chunk, kept.oldest_step()));
  } else if (knew_of_it) {
    // Those rounds closed without this rank, and will again.
    exchange.offers_again = true;
  } else {
    // But of what closed with it, it must be told at once.
    Exchange(chunk, kept.oldest_step());
  }
  if (!is_news) return absl::OkStatus();
  ++report.restarted_aggregators;
  log::WriteEvent(log::Level::kWarning,
                  "the aggregator was started again, and asks for frames from this step on",
                  shards_.AboutOf(chunk, wanted.step()));
  OfferAll(shard);
  return absl::OkStatus();
}

void ChunkExchanges::Offer(uint32_t chunk) {
  const ChunkExchange& exchange = exchanges_[chunk];
  if (exchange.step_under_way || exchange.kept.empty()) return;
  Exchange(chunk, exchange.kept.newest().header.step());
}

void ChunkExchanges::OfferAll(uint32_t shard) {
  for (uint32_t chunk = 0; chunk < exchanges_.size(); ++chunk) {
    if (shards_.ShardOf(chunk) == shard) Offer(chunk);
  }
}

void ChunkExchanges::OfferToIdleShards() {
  for (uint32_t chunk = 0; chunk < exchanges_.size(); ++chunk) {
    if (exchanges_[chunk].offers_again) Exchange(chunk, exchanges_[chunk].kept.oldest_step());
  }
  std::vector<bool> is_idle(shards_.size(), true);
  for (uint32_t chunk = 0; chunk < exchanges_.size(); ++chunk) {
    if (exchanges_[chunk].step_under_way) is_idle[shards_.ShardOf(chunk)] = false;
  }
  for (uint32_t chunk = 0; chunk < exchanges_.size(); ++chunk) {
    if (!is_idle[shards_.ShardOf(chunk)] || exchanges_[chunk].kept.empty()) continue;
    Offer(chunk);
    is_idle[shards_.ShardOf(chunk)] = false;
  }
}

bool ChunkExchanges::IsAnyAwaited() const {
  return absl::c_any_of(exchanges_, [](const ChunkExchange& exchange) {
    return !exchange.kept.empty() && !exchange.kept.newest().answered;
  });
}

bool ChunkExchanges::is_any_under_way() const {
  return absl::c_any_of(exchanges_, [](const ChunkExchange& exchange) {
    return exchange.step_under_way.has_value() || exchange.offers_again;
  });
}

uint64_t ChunkExchanges::kept_bytes() const {
  uint64_t bytes = 0;
  for (const ChunkExchange& exchange : exchanges_) bytes += exchange.kept.payload_bytes();
  return bytes;
}

}  // namespace signpost
