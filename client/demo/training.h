// The demo's training job: one worker's part of training a language model through a Session.

#ifndef SIGNPOST_CLIENT_DEMO_TRAINING_H_
#define SIGNPOST_CLIENT_DEMO_TRAINING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/demo/language_model.h"
#include "client/session.h"

namespace signpost::demo {

enum class Optimizer { kAdam, kOneBitAdam };

// Equal on all workers of a job.
struct TrainingOptions {
  std::vector<std::string> text;  // files; none: DefaultTextFiles()
  ModelShape model;
  uint64_t steps = 300;
  uint64_t seed = 1;    // of the initial parameters and of all batches
  uint32_t batch = 64;  // windows per worker and step
  // The highest: see LearningRate(). On the licences plain Adam did best between 2e-3 and 4e-3
  // (docs/measurements.md).
  double learning_rate = 3e-3;
  Optimizer optimizer = Optimizer::kOneBitAdam;
  // kAuto: 1-bit Adam finds its freeze, and its variance follows from then on. Otherwise steps of
  // warm-up in fp32, after which the variance stays as it is.
  uint64_t freeze_step = OptimizerOptions::kAuto;
  // Where this worker writes its WorkerResult (worker_result.h) when it is done; empty: rank 0 says
  // the parameters' checksum instead.
  std::string result_file;
  std::string checkpoint_directory;  // seen by all workers
  uint64_t checkpoint_every = 0;     // steps; 0: never
  bool resume = false;               // from the newest checkpoint in the directory
  bool resume_if_any = false;        // the same, or anew if there is none
};

// INVALID_ARGUMENT that names the option and says what it may be.
absl::Status CheckOptions(const TrainingOptions& options);

// A worker process's whole work: joins the job that the environment names
// (SessionOptions::FromEnvironment), trains, writes the result file, leaves. On rank 0 prints the
// live line to standard output. Errors as LoadText, Session::Join and Session::Step; CANCELLED if
// SIGTERM or SIGINT came meanwhile (client/stop_request.h): it has finished its step then, and
// left.
absl::Status TrainAsWorker(const TrainingOptions& options);

// The learning rate of step `step`, in [0, options.steps): rises linearly over the first 5% of the
// steps to options.learning_rate, then falls along a cosine to a fiftieth of it.
double LearningRate(const TrainingOptions& options, uint64_t step);

// What the workers did since the last live line.
struct Interval {
  uint64_t steps = 0;
  double training_bpb = 0;  // this worker's mean training loss, bits per byte
  absl::Duration duration;  // by the clock, of which:
  absl::Duration in_steps;  // of which:
  absl::Duration wire;
  absl::Duration wait;
  WireBytes bytes;            // of the steps, without those of checkpoints
  uint32_t late_workers = 0;  // most of them in one step
};

// "step 1200  loss 2.31  412 ms (compute 64% wire 18% wait 11% other 7%)  27.9x fewer bytes  4/4
// workers", where compute is what is neither wire nor wait of a step, other is what is no step, and
// the bytes are measured, against 32 bits per parameter each way.
std::string FormatLiveLine(uint64_t steps_done, const Interval& interval, uint64_t parameters,
                           uint32_t world_size);

}  // namespace signpost::demo

#endif  // SIGNPOST_CLIENT_DEMO_TRAINING_H_
