// The smallest whole training job on the C++ SDK: fits y = W x, each worker on samples of its own.
//
//   ./signpost run -n 4 --aggregators 2 -- bazel-bin/client/examples/linear_regression

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/session.h"
#include "proto/exit_code.h"

namespace {

constexpr int kInputs = 96, kOutputs = 64, kBatch = 16, kSteps = 600;
constexpr double kPeakLearningRate = 0.02;

// What the model has to find; known to all workers only because this is an example.
float TargetWeight(int output, int input) { return std::sin(1.7 * output + 0.3 * input); }

// The gradient of the mean squared error on a fresh batch, into `gradient`; returns that error.
double Gradient(const std::vector<float>& weights, std::mt19937& random,
                std::vector<float>& gradient) {
  std::normal_distribution<float> normal;
  gradient.assign(weights.size(), 0);
  double squared_error = 0;
  std::vector<float> x(kInputs);
  for (int sample = 0; sample < kBatch; ++sample) {
    for (float& value : x) value = normal(random);
    for (int output = 0; output < kOutputs; ++output) {
      float difference = 0;
      for (int input = 0; input < kInputs; ++input) {
        difference += (weights[output * kInputs + input] - TargetWeight(output, input)) * x[input];
      }
      squared_error += difference * difference;
      for (int input = 0; input < kInputs; ++input) {
        gradient[output * kInputs + input] += 2 * difference * x[input] / kBatch;
      }
    }
  }
  return squared_error / (kBatch * kOutputs);
}

absl::Status Train() {
  absl::StatusOr<signpost::SessionOptions> options = signpost::SessionOptions::FromEnvironment();
  if (!options.ok()) return options.status();

  std::vector<float> weights(kOutputs * kInputs), gradient;
  auto session =
      signpost::Session::Join(*options, {.freeze_step = kSteps / 5},
                              {{"weights", {kOutputs, kInputs}, absl::MakeSpan(weights)}});
  if (!session.ok()) return session.status();

  std::mt19937 random(options->worker.rank);
  while ((*session)->steps() < kSteps) {
    const uint64_t step = (*session)->steps();
    const double error = Gradient(weights, random, gradient);
    const double learning_rate = kPeakLearningRate * (1 - double(step) / kSteps);
    auto report = (*session)->Step({gradient}, {{.learning_rate = learning_rate, .beta2 = 0.99}});
    if (!report.ok()) return report.status();
    if (options->worker.rank == 0 && (step % 100 == 0 || step == kSteps - 1)) {
      std::printf("step %3d  %s  squared error %.6f\n", int(step),
                  signpost::CodecName(report->codec).c_str(), error);
    }
  }
  const signpost::WireBytes bytes = (*session)->wire_bytes();
  std::printf("done: parameters %08x, sent %llu bytes, received %llu bytes\n",
              (*session)->ParametersCrc32c(), (unsigned long long)bytes.sent,
              (unsigned long long)bytes.received);
  return (*session)->Leave();
}

}  // namespace

int main() {
  const absl::Status status = Train();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return signpost::ExitCodeOf(status);  // whether to start it again
}
