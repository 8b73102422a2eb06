#include "tests/job.h"

#include <numeric>
#include <random>
#include <string>

#include "gtest/gtest.h"

namespace signpost::testing {

std::vector<float> GradientOf(uint32_t rank, int step, size_t elements) {
  std::mt19937 random(36'000'000 + 1000 * step +
                      rank);  // reference_test.cc wants no close decisions
  std::normal_distribution<float> normal;
  std::vector<float> gradient(elements);
  for (size_t i = 0; i < elements; ++i) gradient[i] = normal(random) + 0.5f * (i % 7) - 1.5f;
  return gradient;
}

std::vector<float> InitialParameters(size_t elements) {
  std::vector<float> values(elements);
  for (size_t i = 0; i < elements; ++i) values[i] = 0.01f * (i % 100) - 0.3f;
  return values;
}

Replica::Replica(const JobOptionsForTest& options, uint32_t rank)
    : tensors(options.tensors),
      values(InitialParameters(std::accumulate(tensors.begin(), tensors.end(), size_t{0}))),
      gradient(values.size()) {}

std::vector<Parameter> Replica::Parameters() {
  std::vector<Parameter> parameters;
  size_t first = 0;
  for (size_t elements : tensors) {
    parameters.push_back({"tensor" + std::to_string(parameters.size()),
                          {elements},
                          absl::MakeSpan(values).subspan(first, elements)});
    first += elements;
  }
  return parameters;
}

std::vector<Gradient> Replica::Gradients() const {
  std::vector<Gradient> spans;
  size_t first = 0;
  for (size_t elements : tensors) {
    spans.push_back(absl::MakeSpan(gradient).subspan(first, elements));
    first += elements;
  }
  return spans;
}

std::vector<std::vector<float>> Train(const Connect& connect, const JobOptionsForTest& options,
                                      const AfterStep& after_step, const BeforeStep& before_step) {
  std::vector<std::vector<float>> results(options.workers);
  OnEachRank(options.workers, [&](uint32_t rank) {
    Replica replica(options, rank);
    WorkerOptions worker_options = options.worker;
    worker_options.rank = rank;
    worker_options.world_size = options.workers;
    auto worker = Worker::Join(worker_options, options.optimizer, replica.Parameters(), connect());
    ASSERT_TRUE(worker.ok()) << worker.status();
    for (int step = 0; step < options.steps; ++step) {
      replica.gradient = GradientOf(rank, step, replica.values.size());
      if (before_step) before_step(rank, step, replica.gradient);
      const absl::StatusOr<StepReport> report =
          options.take_step
              ? options.take_step(rank, step, **worker, replica.Gradients(), options.rates)
              : (*worker)->Step(replica.Gradients(), {options.rates});
      ASSERT_TRUE(report.ok()) << report.status();
      if (after_step) after_step(rank, step, replica, **worker);
    }
    EXPECT_TRUE((*worker)->Leave().ok());
    results[rank] = replica.values;
  });
  return results;
}

std::vector<std::vector<float>> Train(Cluster& cluster, const JobOptionsForTest& options,
                                      const AfterStep& after_step, const BeforeStep& before_step) {
  return Train([&cluster] { return cluster.Connect(); }, options, after_step, before_step);
}

}  // namespace signpost::testing
