#include "bench/kernels.h"

#include <time.h>

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "bench/device_runs.h"
#include "bench/figures.h"
#include "bench/kernel_runs.h"
#include "bench/traffic.h"
#include "doctor/limits.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "kernels/target.h"
#include "proto/layout.h"
#include "storage/block_vector.h"

namespace signpost::bench {
namespace {

using kernels::Target;

// For how long this thread has had a core: what else runs on the machine takes time too.
double SecondsOnCore() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

// How long a function takes on a target.
double SecondsOf(const std::function<void()>& run, Target target) {
  kernels::UseTarget(target);
  const double begin = SecondsOnCore();
  run();
  return SecondsOnCore() - begin;
}

// Of one kernel and what it is compared with, in turns; 1e9 elements per second.
struct Rates {
  std::vector<double> elements;
  std::vector<double> bounds;
  std::vector<double> traffic;  // empty: not measured
};

Rates Measure(const KernelRun& kernel, const KernelsOptions& options) {
  const double elements = static_cast<double>(options.elements);
  // A float is four bytes to read and four to write.
  BlockVector<float> changed(static_cast<size_t>(elements * BytesOf(kernel.streams) / 8), 1.0f);
  const auto change = [&changed] { kernels::Scale(/*factor=*/-1, absl::MakeSpan(changed)); };
  Traffic traffic(kernel.streams, options.elements);
  const Target best = kernels::SupportedTargets().back();
  Rates rates;
  SecondsOf(kernel.run, options.target);  // brings its arrays into memory and caches
  for (int round = 0; round < options.rounds; ++round) {
    rates.bounds.push_back(elements / SecondsOf(change, best) / 1e9);
    rates.traffic.push_back(elements / SecondsOf([&] { traffic.Run(); }, best) / 1e9);
    rates.elements.push_back(elements / SecondsOf(kernel.run, options.target) / 1e9);
  }
  return rates;
}

std::vector<double> RatesOf(size_t elements, std::vector<double> seconds) {
  for (double& value : seconds) value = static_cast<double>(elements) / value / 1e9;
  return seconds;
}

std::vector<double> Times(double factor, std::vector<double> values) {
  for (double& value : values) value *= factor;
  return values;
}

constexpr char kTraffic[] = "reading and writing the same";

// What was measured of each kernel, first in bytes and then in elements.
class Tables {
 public:
  void Add(const std::string& name, double bytes_per_element, const Rates& rates) {
    const std::vector<double> samples = Times(bytes_per_element, rates.elements);
    bytes_.push_back(MakeFigure(name, "GB/s", samples));
    SetBounds(samples, Times(bytes_per_element, rates.bounds), Better::kMore, bytes_.back());
    if (!rates.traffic.empty()) {
      SetPeer(kTraffic, rates.elements, rates.traffic, Better::kMore, bytes_.back());
    }
    elements_.push_back(MakeFigure(name, "Gelem/s", rates.elements));
  }

  Figures Join() {
    Figures figures;
    for (Figure& figure : bytes_) *figures.add_figures() = std::move(figure);
    for (Figure& figure : elements_) *figures.add_figures() = std::move(figure);
    return figures;
  }

 private:
  std::vector<Figure> bytes_, elements_;
};

}  // namespace

absl::Status CheckMemory(const KernelsOptions& options) {
  const double most = 1.0 * kBytesPerElement * options.elements;
  const doctor::Limits limits = doctor::FindLimits();
  if (most <= limits.free_memory_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%d elements take up to %.1f GB of memory, and %.1f GB are free, by %s: "
      "measure with fewer --elements",
      options.elements, most / 1e9, limits.free_memory_bytes / 1e9, limits.memory_bound));
}

Figures MeasureKernels(const KernelsOptions& options) {
  const Target before = kernels::CurrentTarget();
  Tables tables;
  for (const KernelRun& kernel : MakeKernelRuns(options.elements)) {
    tables.Add(kernel.name, BytesOf(kernel.streams), Measure(kernel, options));
  }
  kernels::UseTarget(before);
  return tables.Join();
}

absl::StatusOr<Figures> MeasureDeviceKernels(const DeviceKernelsOptions& options) {
  absl::StatusOr<std::vector<DeviceRun>> runs =
      MeasureOnDevice(options.elements, options.rounds,
                      SuitableChunkElements(options.elements, kernels::BlockRule().block_elements,
                                            /*workers=*/2));
  if (!runs.ok()) return runs.status();
  Tables tables;
  for (const DeviceRun& run : *runs) {
    tables.Add(
        run.name, run.bytes_per_element,
        {RatesOf(options.elements, run.seconds), RatesOf(options.elements, run.copy_seconds), {}});
  }
  return tables.Join();
}

}  // namespace signpost::bench
