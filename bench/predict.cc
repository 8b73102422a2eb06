#include "bench/predict.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/codec.h"

namespace signpost::bench {
namespace {

// Less than that of a step is not worth what one-bit asks for: a warm-up, and more memory.
constexpr double kWorthwhileShare = 0.05;

constexpr char kRing[] = "a ring all-reduce in fp32";

// How the chunks are dealt out.
struct Deal {
  double chunks;
  double workers;
  double chunks_of_shard;  // of one that has most
  double chunks_of_host;   // whose shards are on the host that has most of them
};

Deal DealOut(const Cluster& cluster, uint64_t chunks) {
  const double shards = static_cast<double>(std::min<uint64_t>(cluster.shards, chunks));
  Deal deal;
  deal.chunks = static_cast<double>(chunks);
  deal.workers = cluster.workers;
  deal.chunks_of_shard = std::ceil(deal.chunks / shards);
  const double shards_of_host = cluster.colocated ? std::ceil(shards / deal.workers) : 1;
  deal.chunks_of_host = std::min(deal.chunks, shards_of_host * deal.chunks_of_shard);
  return deal;
}

// One frame's way from one process into another.
double PassageSeconds(const Cluster& cluster, const ChunkTimes& chunk) {
  const bool over_a_link = !cluster.colocated || cluster.workers > 1;
  return 2 * chunk.transport_s + (over_a_link ? chunk.link_s : 0);
}

// All workers' frames of one round on their way to its shard, or its answer's to all workers. At
// the workers' ends they leave or arrive together, at the shard's one after the other.
double BroadcastSeconds(const Cluster& cluster, const ChunkTimes& chunk) {
  const double behind_another = std::max(0., cluster.workers - (cluster.colocated ? 2. : 1.));
  return PassageSeconds(cluster, chunk) +
         behind_another * std::max(chunk.link_s, chunk.transport_s);
}

double RoundSeconds(const Cluster& cluster, const ChunkTimes& chunk, double latency_s) {
  return chunk.compress_s + 2 * BroadcastSeconds(cluster, chunk) + latency_s + chunk.aggregate_s +
         chunk.apply_s;
}

// A worker's wait for an answer once rounds follow one another. Its frame is the last where its
// answer is the first: one of the two broadcasts does not delay it.
double WaitSeconds(const Cluster& cluster, const ChunkTimes& chunk, double latency_s) {
  return RoundSeconds(cluster, chunk, latency_s) - BroadcastSeconds(cluster, chunk) +
         PassageSeconds(cluster, chunk);
}

// If a worker's thread is the busiest: when the last chunk is compressed, a window's answers are
// not applied yet. They are while its round goes on, or it is waited for.
double ThreadSeconds(const Cluster& cluster, const Deal& deal, const ChunkTimes& chunk,
                     double round_s) {
  const double window = std::min<double>(cluster.window(), deal.chunks);
  const double wait_s = round_s - chunk.compress_s - chunk.apply_s;
  return deal.chunks * chunk.compress_s + (deal.chunks - window) * chunk.apply_s +
         std::max((window - 1) * chunk.apply_s, wait_s) + chunk.apply_s;
}

// What the busiest link does, in either direction, for all chunks but the one whose round is there
// already.
double OtherLinkSeconds(const Cluster& cluster, const Deal& deal, const ChunkTimes& chunk) {
  if (!cluster.colocated) {
    return chunk.link_s * std::max(deal.chunks - 1, (deal.chunks_of_shard - 1) * deal.workers);
  }
  const double frames = deal.chunks - deal.chunks_of_host;
  const double answers = (deal.chunks_of_host - 1) * (deal.workers - 1);
  return chunk.link_s * (frames + answers);
}

// The same of whatever is busiest but for the worker's thread.
double OtherSeconds(const Cluster& cluster, const Deal& deal, const ChunkTimes& chunk,
                    double latency_s) {
  const double wait_s = WaitSeconds(cluster, chunk, latency_s) / cluster.window();
  return std::max({
      OtherLinkSeconds(cluster, deal, chunk),
      (deal.chunks - 1) * wait_s,
      (deal.chunks_of_shard - 1) * deal.workers * chunk.transport_s,
      (deal.chunks - 1) * chunk.transport_s,
      (deal.chunks_of_shard - 1) * chunk.aggregate_s,
  });
}

// Of one core, all that the busiest host does.
double HostSeconds(const Cluster& cluster, const Deal& deal, const ChunkTimes& chunk) {
  const double as_worker = deal.chunks * (chunk.kernels_s + 2 * chunk.transport_s);
  const double as_shard =
      deal.chunks_of_host * (chunk.aggregate_s + 2 * deal.workers * chunk.transport_s);
  return cluster.colocated ? as_worker + as_shard : std::max(as_worker, as_shard);
}

StepTimes StepTimesOf(const Cluster& cluster, const Training& training, const CodecCosts& codec,
                      const TransportCosts& transport) {
  const ExchangeTimes times = PredictExchange(cluster, training.parameters, codec, transport);
  const ChunkTimes chunk = ChunkTimesOf(cluster, training.parameters, codec, transport);
  const double chunks = static_cast<double>(chunk.chunks);
  const double backward_s = training.backward_share * training.compute_s;
  // Either the backward pass takes longer, with the compressing of all: then the others' answers
  // are applied while the last chunk goes round. Or the exchange does, which begins with the first.
  const double wait_s = times.round_s - chunk.compress_s - chunk.apply_s;
  const double computing_s = backward_s + chunks * chunk.compress_s +
                             std::max((chunks - 1) * chunk.apply_s, wait_s) + chunk.apply_s;
  const double exchanging_s = backward_s / chunks + times.exchange_s;
  return {.exchange_s = times.exchange_s,
          .step_s = training.compute_s + times.exchange_s,
          .overlapped_s = training.compute_s - backward_s + std::max(computing_s, exchanging_s)};
}

StepTimes RingTimesOf(const Cluster& cluster, const Training& training, double bytes,
                      double apply_s) {
  const double parameters = static_cast<double>(training.parameters);
  const double workers = cluster.workers;
  const double ring_s =
      2 * (workers - 1) / workers * 8 * bytes * parameters / cluster.link_bits_per_s;
  const double adam_s = parameters * apply_s / ThreadSpeedup(cluster.threads());
  const double backward_s = training.backward_share * training.compute_s;
  return {.exchange_s = ring_s,
          .step_s = training.compute_s + ring_s + adam_s,
          .overlapped_s = training.compute_s - backward_s + std::max(backward_s, ring_s) + adam_s};
}

std::string FormatSeconds(double seconds) {
  if (seconds >= 1) return absl::StrFormat("%.2f s", seconds);
  if (seconds >= 0.01) return absl::StrFormat("%.0f ms", 1e3 * seconds);
  return absl::StrFormat("%.2g ms", 1e3 * seconds);
}

std::string VerdictOn(const Prediction& prediction, double run_s) {
  std::pair<double, const char*> best = {prediction.fp32.overlapped_s, "in fp32"};
  for (const auto& [step_s, name] : {
           std::pair{prediction.bf16.overlapped_s, "in bf16"},
           {prediction.ring.overlapped_s, "with a ring all-reduce in fp32"},
           {prediction.ring16.overlapped_s, "with a ring all-reduce in 16 bits"},
       }) {
    if (step_s < best.first) best = {step_s, name};
  }
  const double best_s = best.first, one_bit_s = prediction.one_bit.overlapped_s;
  const double saved_s = best_s - one_bit_s;
  const std::string step = absl::StrFormat("%s step %s", FormatSeconds(best_s), best.second);
  if (saved_s <= 0) {
    return absl::StrFormat("one-bit would add %s to a %s: it does not pay here",
                           FormatSeconds(-saved_s), step);
  }
  if (saved_s < kWorthwhileShare * best_s) {
    return absl::StrFormat("one-bit would save %s of a %s: it does not pay here",
                           FormatSeconds(saved_s), step);
  }
  const std::string saves =
      absl::StrFormat("one-bit saves %s of a %s", FormatSeconds(saved_s), step);
  if (best_s - run_s < kWorthwhileShare * best_s) {
    return absl::StrFormat(
        "%s, but its warm-up in %s takes that back: a whole run does %.2f times as many steps, so "
        "it does not pay here",
        saves, CodecName(prediction.warm_up_codec), best_s / run_s);
  }
  return absl::StrFormat(
      "%s: after the warm-up %.2f times as many steps, over a whole run %.2f times", saves,
      best_s / one_bit_s, best_s / run_s);
}

}  // namespace

ExchangeTimes PredictExchange(const Cluster& cluster, uint64_t parameters, const CodecCosts& codec,
                              const TransportCosts& transport) {
  const ChunkTimes chunk = ChunkTimesOf(cluster, parameters, codec, transport);
  const Deal deal = DealOut(cluster, chunk.chunks);
  const double round_s = RoundSeconds(cluster, chunk, transport.latency_s);
  const double others_s = OtherSeconds(cluster, deal, chunk, transport.latency_s);
  const double cores_s = HostSeconds(cluster, deal, chunk) / cluster.cores_per_host;
  return {.round_s = round_s,
          .exchange_s = std::max(
              {round_s + others_s, ThreadSeconds(cluster, deal, chunk, round_s), cores_s})};
}

Prediction Predict(const Cluster& cluster, const Training& training, const Costs& costs) {
  const CodecCosts& warm_up = costs.Of(training.warm_up_codec);
  Prediction prediction = {
      .fp32 = StepTimesOf(cluster, training, costs.fp32, costs.transport),
      .bf16 = StepTimesOf(cluster, training, costs.bf16, costs.transport),
      .one_bit = StepTimesOf(cluster, training, costs.one_bit, costs.transport),
      .warm_up = StepTimesOf(cluster, training, warm_up, costs.transport),
      .warm_up_codec = training.warm_up_codec,
      .ring = RingTimesOf(cluster, training, /*bytes=*/4, costs.fp32.apply_s),
      .ring16 = RingTimesOf(cluster, training, /*bytes=*/2, costs.fp32.apply_s),
  };
  const double run_s = training.warm_up_share * prediction.warm_up.overlapped_s +
                       (1 - training.warm_up_share) * prediction.one_bit.overlapped_s;
  prediction.run_speedup_over_fp32 = prediction.fp32.overlapped_s / run_s;
  prediction.run_speedup_over_ring = prediction.ring.overlapped_s / run_s;
  prediction.run_speedup_over_ring16 = prediction.ring16.overlapped_s / run_s;
  prediction.run_volume_ratio =
      costs.fp32.bytes / warm_up.bytes *
      VolumeRatio(training.warm_up_share, warm_up.bytes / costs.one_bit.bytes);
  prediction.verdict = VerdictOn(prediction, run_s);
  return prediction;
}

double VolumeRatio(double warm_up_share, double times_fewer) {
  return 1 / (warm_up_share + (1 - warm_up_share) / times_fewer);
}

std::vector<std::pair<std::string, StepTimes>> TimesByCodec(const Prediction& prediction) {
  std::vector<std::pair<std::string, StepTimes>> times = {{CodecName(FLOAT32), prediction.fp32},
                                                          {CodecName(BFLOAT16), prediction.bf16}};
  const Codec warm_up = prediction.warm_up_codec;
  if (warm_up != FLOAT32 && warm_up != BFLOAT16 && warm_up != ONE_BIT) {
    times.emplace_back(CodecName(warm_up), prediction.warm_up);
  }
  times.emplace_back(CodecName(ONE_BIT), prediction.one_bit);
  return times;
}

Figures FiguresOf(const Prediction& prediction) {
  Figures figures;
  std::vector<std::pair<std::string, StepTimes>> ways = TimesByCodec(prediction);
  ways.emplace_back(kRing, prediction.ring);
  ways.emplace_back("a ring all-reduce in 16 bits", prediction.ring16);
  const std::pair<const char*, double StepTimes::*> kinds[] = {
      {"exchange", &StepTimes::exchange_s},
      {"step", &StepTimes::step_s},
      {"step with overlap", &StepTimes::overlapped_s}};
  for (const auto& [kind, seconds] : kinds) {
    for (const auto& [name, times] : ways) {
      Figure& figure = *figures.add_figures() =
          MakeFigure(absl::StrCat(kind, ", ", name), "s", {times.*seconds});
      if (name == kRing) continue;
      SetPeer(kRing, {times.*seconds}, {prediction.ring.*seconds}, Better::kLess, figure);
    }
  }
  const std::pair<const char*, double> of_run[] = {
      {"whole run with overlap, over fp32", prediction.run_speedup_over_fp32},
      {"whole run with overlap, over a ring", prediction.run_speedup_over_ring},
      {"whole run with overlap, over a ring in 16 bits", prediction.run_speedup_over_ring16},
      {"whole run, fewer bytes than fp32", prediction.run_volume_ratio}};
  for (const auto& [name, times] : of_run) {
    *figures.add_figures() = MakeFigure(name, "times", {times});
  }
  figures.set_verdict(prediction.verdict);
  return figures;
}

}  // namespace signpost::bench
