#include "doctor/gpu.h"

#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "kernels/device.h"

namespace signpost::doctor {
namespace {

std::string Quote(const std::string& word) {
  return absl::StrCat("'", absl::StrReplaceAll(word, {{"'", "'\\''"}}), "'");
}

// What is printed last is ours; others may print before.
absl::StatusOr<TorchFacts> AskPython(const std::string& python) {
  const std::string command =
      absl::StrCat("timeout 30 ", Quote(python),
                   " -c 'import torch; print(torch.__version__, torch.cuda.is_available())' 2>&1");
  FILE* const stream = popen(command.c_str(), "r");
  if (stream == nullptr) return absl::UnavailableError("no process can be started");
  std::string last;
  for (char line[4096]; fgets(line, sizeof line, stream) != nullptr;) last = line;
  const int status = pclose(stream);
  while (!last.empty() && last.back() == '\n') last.pop_back();
  const std::vector<std::string> words = absl::StrSplit(last, ' ');
  if (status != 0 || words.size() != 2) {
    return absl::NotFoundError(last.empty() ? "it ends without a word" : last);
  }
  return TorchFacts{words[0], words[1] == "True"};
}

void CheckTorch(const absl::StatusOr<TorchFacts>& torch, const Job& job, Reporter& to) {
  if (!torch.ok()) {
    to.Fault("pytorch", absl::StrCat(job.python, " has none: ", torch.status().message()),
             absl::StrCat(job.python, " -m pip install torch; is it the job's interpreter?"));
  } else if (job.gpu && !torch->sees_gpu) {
    to.Fault("pytorch", absl::StrCat(torch->version, " of ", job.python, " sees no GPU"),
             absl::StrCat("a PyTorch that is built for CUDA: ", job.python,
                          " -m pip install torch; is CUDA_VISIBLE_DEVICES empty?"));
  } else {
    to.Fine("pytorch", absl::StrCat(torch->version, " of ", job.python));
  }
}

}  // namespace

GpuFacts FindGpu(const Job& job) {
  GpuFacts facts;
  facts.has_driver = std::filesystem::exists("/proc/driver/nvidia/version");
  facts.devices = kernels::DescribeDevices();
  if (job.gpu) facts.kernels = kernels::CheckDevice(*job.gpu);
  if (!job.python.empty()) facts.torch = AskPython(job.python);
  return facts;
}

void CheckGpu(const GpuFacts& facts, const Job& job, Reporter& to) {
  if (!job.gpu) {
    to.Fine("gpu", absl::StrCat("none is asked for (", facts.devices, ")"));
  } else if (!facts.has_driver) {
    to.Fault("gpu", absl::StrCat("GPU ", *job.gpu, " is asked for, and no NVIDIA driver is loaded"),
             "apt-get install nvidia-driver && modprobe nvidia; in a container: --gpus all, or "
             "nvidia.com/gpu among the pod's limits; nvidia-smi shows whether it is there");
  } else if (!facts.kernels.ok()) {
    to.Fault("gpu", std::string(facts.kernels.message()),
             "nvidia-smi shows what is there; --device names another");
  } else {
    to.Fine("gpu", facts.devices);
  }
  if (facts.torch) CheckTorch(*facts.torch, job, to);
}

}  // namespace signpost::doctor
