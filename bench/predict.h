// How long a step should take, computed from a network, a model and what an exchange costs.
//
// Arithmetic in closed form; scale.h plays the same exchange frame by frame. Framing (gRPC's,
// TCP's, Ethernet's) is left out everywhere: it makes all of these ways a few percent slower.

#ifndef SIGNPOST_BENCH_PREDICT_H_
#define SIGNPOST_BENCH_PREDICT_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bench/costs.h"
#include "bench/figures.h"
#include "proto/aggregator.pb.h"

namespace signpost::bench {

struct ExchangeTimes {
  double round_s;  // of one chunk alone, from compressing it to having applied it on all workers
  double exchange_s;
};
// Chunks go through processors and links as jobs go through a line of machines: it takes one
// chunk's round and, of whatever is busiest, its work for all the others. No less than the work of
// the busiest host divided by its cores.
ExchangeTimes PredictExchange(const Cluster& cluster, uint64_t parameters, const CodecCosts& codec,
                              const TransportCosts& transport);

struct Training {
  uint64_t parameters;             // 1 or more
  double compute_s;                // of a step: forward and backward pass, nothing else
  double backward_share = 2. / 3;  // of that, in (0, 1]
  double warm_up_share = 0.15;     // of all steps
  Codec warm_up_codec = FLOAT32;   // in which gradients travel in these; of those in Costs
};

// In seconds.
struct StepTimes {
  double exchange_s;
  double step_s;        // computing, then exchanging
  double overlapped_s;  // exchanging during the backward pass
};

struct Prediction {
  StepTimes fp32, bf16, one_bit;  // through Signpost
  StepTimes warm_up;              // likewise, in its codec
  Codec warm_up_codec;
  // With a ring all-reduce in fp32, or in 16 bits, that costs nothing but what no all-reduce can do
  // without, 2 (W - 1) / W numbers per parameter through each link; Adam's step, which is not in
  // its exchange_s, comes after it.
  StepTimes ring, ring16;
  // With overlap: all steps of a training in fp32, or through a ring, to the warm-up in its codec
  // and all others in one bit.
  double run_speedup_over_fp32;
  double run_speedup_over_ring;
  double run_speedup_over_ring16;
  double run_volume_ratio;  // how many times fewer bytes than in fp32 that sends
  // Whether one-bit pays, in a step and in the whole run, against the best of the others, in a
  // sentence.
  std::string verdict;
};

// With overlap, chunks become ready evenly during the backward pass and are compressed by its
// thread, as in Worker::GradientReady; parameters change behind it.
Prediction Predict(const Cluster& cluster, const Training& training, const Costs& costs = {});

// How many times fewer bytes all steps together send if all but `warm_up_share` of them send
// `times_fewer`: 1 / (w + (1 - w) / times_fewer). With 16 that is the 1-bit Adam paper's
// (arXiv:2102.02888), against training in 16 bits; against fp32 it is 32.
double VolumeRatio(double warm_up_share, double times_fewer);

// Its times through Signpost, by the codec's name: those of the warm-up's once, whichever it is.
std::vector<std::pair<std::string, StepTimes>> TimesByCodec(const Prediction& prediction);

// A row for each of these times, compared with the fp32 ring's, and for the rings', one for each
// number of the whole run, and the verdict.
Figures FiguresOf(const Prediction& prediction);

}  // namespace signpost::bench

#endif  // SIGNPOST_BENCH_PREDICT_H_
