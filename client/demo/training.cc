#include "client/demo/training.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numbers>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/demo/text.h"
#include "client/demo/windows.h"
#include "client/demo/worker_result.h"
#include "client/stop_request.h"

namespace signpost::demo {
namespace {

constexpr double kWarmUpFraction = 0.05;    // of the steps: the learning rate rises
constexpr double kLastLearningRate = 0.02;  // of the highest
constexpr uint64_t kIntervals = 20;         // points of the loss curve, lines on the screen
constexpr uint32_t kValidationBatch = 256;  // windows at a time
constexpr uint32_t kCurveWindows = 2048;    // validation along the way
constexpr uint32_t kFinalWindows = 16384;   // validation at the end

double BitsPerByte(double nats) { return nats / std::numbers::ln2; }

absl::Status CheckRange(absl::string_view option, uint64_t value, uint64_t lowest,
                        uint64_t highest) {
  if (lowest <= value && value <= highest) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("option %s is %d, wanted %d to %d", option, value, lowest, highest));
}

absl::StatusOr<Text> LoadTextOf(const TrainingOptions& options) {
  if (!options.text.empty()) return LoadText(options.text);
  const absl::StatusOr<std::vector<std::string>> files = DefaultTextFiles();
  if (!files.ok()) return files.status();
  return LoadText(*files);
}

OptimizerOptions OptimizerOf(const TrainingOptions& options) {
  if (options.optimizer == Optimizer::kAdam) return {};
  if (options.freeze_step != OptimizerOptions::kAuto) return {.freeze_step = options.freeze_step};
  return {.freeze_step = OptimizerOptions::kAuto,
          .warm_up_codec = INT8,
          .variance_codec = INT8,
          .variance_refresh_interval = OptimizerOptions::kAuto};
}

std::vector<Parameter> ParametersOf(LanguageModel<float>& model) {
  std::vector<Parameter> parameters;
  for (const ModelTensor& tensor : model.tensors()) {
    parameters.push_back({.name = tensor.name,
                          .shape = tensor.shape,
                          .values = model.parameters().subspan(tensor.offset, tensor.elements)});
  }
  return parameters;
}

// By tensor, as Session::Step wants them.
std::vector<Gradient> GradientsOf(const LanguageModel<float>& model) {
  std::vector<Gradient> gradients;
  for (const ModelTensor& tensor : model.tensors()) {
    gradients.push_back(model.gradients().subspan(tensor.offset, tensor.elements));
  }
  return gradients;
}

// The mean over `windows` evenly spread windows of the text, in bits per byte.
double BitsPerByteOn(absl::Span<const uint8_t> text, uint32_t windows,
                     LanguageModel<float>& model) {
  const Batch all = SpreadWindows(text, model.window_bytes(), windows);
  double nats = 0;
  for (size_t first = 0; first < all.size(); first += kValidationBatch) {
    const size_t end = std::min(all.size(), first + kValidationBatch);
    const Batch batch(all.begin() + first, all.begin() + end);
    nats += model.Loss(batch) * static_cast<double>(batch.size());
  }
  return BitsPerByte(nats / static_cast<double>(all.size()));
}

// At once, also into a pipe.
void PrintLine(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

void PrintSkippedRounds(const StepReport& report) {
  for (const SkippedRound& round : report.skipped) {
    PrintLine(absl::StrCat("step ", report.step, "  skipped a round: not finite on rank ",
                           round.rank, " in ", round.block));
  }
}

void PrintResumed(const Session& session) {
  for (const std::string& warning : session.resumed().warnings) {
    PrintLine(absl::StrCat("passed over a checkpoint: ", warning));
  }
  PrintLine(
      absl::StrCat("step ", session.steps(), "  going on from ", session.resumed().checkpoint));
}

// One worker's training. Borrows everything.
class Training {
 public:
  Training(const TrainingOptions& options, const WorkerOptions& worker, const Text& text,
           LanguageModel<float>& model, Session& session, const StopRequest& stop)
      : options_(options),
        worker_(worker),
        text_(text),
        model_(model),
        session_(session),
        stop_(stop) {}

  // All steps, or those until it is asked to stop: CANCELLED then, and it has left. The final
  // validation is left to the caller: the other workers need not wait for it.
  absl::StatusOr<WorkerResult> Run() {
    result_.rank = worker_.rank;
    result_.world_size = worker_.world_size;
    result_.parameters = session_.elements();
    result_.steps = options_.steps;

    const absl::Time start = absl::Now();
    const WireBytes wire_start = session_.wire_bytes();
    BeginInterval();
    while (session_.steps() < options_.steps) {
      const uint64_t step = session_.steps();
      if (stop_.made()) return StopAfter(step);
      if (absl::Status status = Step(step); !status.ok()) return status;
      // More than one step further if this worker was late.
      const uint64_t done = session_.steps();
      if (absl::Status status = CheckpointIfDue(done); !status.ok()) return status;
      if (worker_.rank == 0 && IsIntervalEnd(done)) EndInterval(done);
    }
    result_.seconds = absl::ToDoubleSeconds(absl::Now() - start);
    result_.wire = session_.wire_bytes() - wire_start;
    result_.parameters_crc32c = session_.ParametersCrc32c();
    return std::move(result_);
  }

 private:
  absl::Status Step(uint64_t step) {
    const absl::Time start = absl::Now();
    const Batch batch = RandomWindows(text_.training, model_.window_bytes(), options_.batch,
                                      {options_.seed, worker_.rank, step});
    const double loss = model_.LossAndGradients(batch);
    const WireBytes wire_start = session_.wire_bytes();
    const absl::StatusOr<StepReport> report =
        session_.Step(GradientsOf(model_), {{.learning_rate = LearningRate(options_, step)}});
    if (!report.ok()) return stop_.Excuse(report.status());
    if (report->codec == ONE_BIT) {
      ++result_.one_bit_steps;
      result_.one_bit_wire = result_.one_bit_wire + (session_.wire_bytes() - wire_start);
    }

    if (worker_.rank == 0) PrintSkippedRounds(*report);
    interval_.training_bpb += BitsPerByte(loss);
    interval_.in_steps += absl::Now() - start;
    interval_.wire += report->wire;
    interval_.wait += report->wait;
    const uint32_t late_workers = report->late_ranks.size();
    interval_.late_workers = std::max(interval_.late_workers, late_workers);
    ++interval_.steps;
    return absl::OkStatus();
  }

  absl::Status CheckpointIfDue(uint64_t steps_done) {
    const uint64_t every = options_.checkpoint_every;
    if (every == 0 || steps_done % every != 0) return absl::OkStatus();
    const WireBytes start = session_.wire_bytes();
    const absl::Status status = Checkpoint(steps_done);
    checkpoint_wire_ = checkpoint_wire_ + (session_.wire_bytes() - start);
    return status;
  }

  absl::Status Checkpoint(uint64_t steps_done) {
    const absl::Status status = session_.Checkpoint(options_.checkpoint_directory);
    if (absl::IsAborted(status) && worker_.min_workers > 0) {
      PrintLine(absl::StrCat("step ", steps_done, "  not saved: ", status.message()));
      return absl::OkStatus();
    }
    if (!status.ok()) return stop_.Excuse(status);
    if (worker_.rank == 0) {
      PrintLine(absl::StrCat("step ", steps_done, "  saved in ", options_.checkpoint_directory));
    }
    return absl::OkStatus();
  }

  // The others need not find out by their deadlines.
  absl::Status StopAfter(uint64_t steps_done) {
    if (absl::Status status = session_.Leave(); !status.ok()) return stop_.Excuse(status);
    return absl::CancelledError(absl::StrCat("asked to stop; left the job after ", steps_done,
                                             " of ", options_.steps, " steps"));
  }

  bool IsIntervalEnd(uint64_t steps_done) const {
    return steps_done * kIntervals / options_.steps !=
           (steps_done - 1) * kIntervals / options_.steps;
  }

  void BeginInterval() {
    interval_ = {};
    interval_start_ = absl::Now();
    interval_start_wire_ = session_.wire_bytes();
    checkpoint_wire_ = {};
  }

  // A line on the screen and a point of the curve, whose validation is in the line's time.
  void EndInterval(uint64_t steps_done) {
    interval_.training_bpb /= static_cast<double>(interval_.steps);
    result_.curve.push_back({steps_done, interval_.training_bpb,
                             BitsPerByteOn(text_.validation, kCurveWindows, model_)});
    interval_.bytes = session_.wire_bytes() - interval_start_wire_ - checkpoint_wire_;
    interval_.duration = absl::Now() - interval_start_;
    PrintLine(FormatLiveLine(steps_done, interval_, session_.elements(), worker_.world_size));
    BeginInterval();
  }

  const TrainingOptions& options_;
  const WorkerOptions& worker_;
  const Text& text_;
  LanguageModel<float>& model_;
  Session& session_;
  const StopRequest& stop_;
  WorkerResult result_;
  Interval interval_;
  absl::Time interval_start_;
  WireBytes interval_start_wire_;
  WireBytes checkpoint_wire_;  // since then, of checkpoints
};

}  // namespace

absl::Status CheckOptions(const TrainingOptions& options) {
  absl::Status status;
  status.Update(CheckRange("--context", options.model.context, 1, 64));
  status.Update(CheckRange("--embedding", options.model.embedding, 1, 1024));
  status.Update(CheckRange("--hidden", options.model.hidden, 1, 8192));
  status.Update(CheckRange("--layers", options.model.layers, 1, 16));
  status.Update(CheckRange("--steps", options.steps, 2, 1'000'000'000));
  status.Update(CheckRange("--batch", options.batch, 1, 65536));
  if (options.freeze_step != OptimizerOptions::kAuto) {
    status.Update(CheckRange("--freeze-step", options.freeze_step, 1, options.steps - 1));
  }
  if (!(options.learning_rate > 0 && options.learning_rate <= 1)) {
    status.Update(
        absl::InvalidArgumentError(absl::StrCat("option --learning-rate is ", options.learning_rate,
                                                ", wanted more than 0 and at most 1")));
  }
  if ((options.checkpoint_every > 0 || options.resume || options.resume_if_any) &&
      options.checkpoint_directory.empty()) {
    status.Update(absl::InvalidArgumentError(
        "options --checkpoint-every, --resume and --resume-if-any need --checkpoint-dir, which all "
        "workers see"));
  }
  return status;
}

double LearningRate(const TrainingOptions& options, uint64_t step) {
  const double steps = static_cast<double>(options.steps);
  const double warm_up = std::max(1.0, kWarmUpFraction * steps);
  const double now = static_cast<double>(step);
  if (now < warm_up) return options.learning_rate * std::min(1.0, (now + 1) / warm_up);
  const double progress = (now - warm_up) / (steps - warm_up);
  const double cosine = 0.5 * (1 + std::cos(std::numbers::pi * progress));
  return options.learning_rate * (kLastLearningRate + (1 - kLastLearningRate) * cosine);
}

std::string FormatLiveLine(uint64_t steps_done, const Interval& interval, uint64_t parameters,
                           uint32_t world_size) {
  const double compute =
      absl::FDivDuration(interval.in_steps - interval.wire - interval.wait, interval.duration);
  const double wire = absl::FDivDuration(interval.wire, interval.duration);
  const double wait = absl::FDivDuration(interval.wait, interval.duration);
  const double other = absl::FDivDuration(interval.duration - interval.in_steps, interval.duration);
  const double fp32_bytes = 8.0 * static_cast<double>(parameters * interval.steps);
  const double bytes = static_cast<double>(interval.bytes.sent + interval.bytes.received);
  return absl::StrFormat(
      "step %d  loss %.2f  %.0f ms (compute %.0f%% wire %.0f%% wait %.0f%% other %.0f%%)  "
      "%.1fx fewer bytes  %d/%d workers",
      steps_done, interval.training_bpb,
      absl::ToDoubleMilliseconds(interval.duration) / static_cast<double>(interval.steps),
      100 * compute, 100 * wire, 100 * wait, 100 * other, fp32_bytes / bytes,
      world_size - interval.late_workers, world_size);
}

absl::Status TrainAsWorker(const TrainingOptions& options) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  const absl::StatusOr<Text> text = LoadTextOf(options);
  if (!text.ok()) return text.status();
  absl::StatusOr<SessionOptions> session_options = SessionOptions::FromEnvironment();
  if (!session_options.ok()) return session_options.status();
  if (options.resume || options.resume_if_any) {
    session_options->resume = options.checkpoint_directory;
  }

  LanguageModel<float> model(options.model, options.seed);
  const OptimizerOptions optimizer = OptimizerOf(options);
  absl::StatusOr<std::unique_ptr<Session>> session =
      Session::Join(*session_options, optimizer, ParametersOf(model));
  if (absl::IsNotFound(session.status()) && options.resume_if_any) {
    session_options->resume.clear();
    session = Session::Join(*session_options, optimizer, ParametersOf(model));
  }
  if (!session.ok()) return session.status();
  if (!session_options->resume.empty() && session_options->worker.rank == 0) {
    PrintResumed(**session);
  }

  const StopRequest stop;
  absl::StatusOr<WorkerResult> result =
      Training(options, session_options->worker, *text, model, **session, stop).Run();
  if (!result.ok()) return result.status();
  if (absl::Status status = (*session)->Leave(); !status.ok()) return stop.Excuse(status);
  if (result->rank == 0 && !options.result_file.empty()) {
    result->validation = BitsPerByteOn(text->validation, kFinalWindows, model);
  }
  if (!options.result_file.empty()) return WriteResult(*result, options.result_file);
  if (result->rank == 0) {
    PrintLine(absl::StrFormat("step %d  the parameters' CRC-32C is %08x", options.steps,
                              result->parameters_crc32c));
  }
  return absl::OkStatus();
}

}  // namespace signpost::demo
