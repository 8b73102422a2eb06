// The GPU and the PyTorch that a job asks for.

#ifndef SIGNPOST_DOCTOR_GPU_H_
#define SIGNPOST_DOCTOR_GPU_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "doctor/job.h"
#include "doctor/report.h"

namespace signpost::doctor {

struct TorchFacts {
  std::string version;
  bool sees_gpu = false;
};

struct GpuFacts {
  bool has_driver = false;  // NVIDIA's, in the kernel
  absl::Status kernels;     // whether signpost's kernels run there, as kernels::CheckDevice
  std::string devices;      // as kernels::DescribeDevices
  std::optional<absl::StatusOr<TorchFacts>> torch;  // of the job's interpreter, if it names one
};

// Starts the job's interpreter, if it names one, for at most half a minute.
GpuFacts FindGpu(const Job& job);

void CheckGpu(const GpuFacts& facts, const Job& job, Reporter& to);

}  // namespace signpost::doctor

#endif  // SIGNPOST_DOCTOR_GPU_H_
