#include "kernels/gpu_messages.h"

#include <array>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace signpost::kernels::cuda {
namespace {

// "1.3 GiB"
std::string Size(size_t bytes) {
  static constexpr std::array kUnits = {"bytes", "KiB", "MiB", "GiB"};
  size_t unit = 0;
  double size = static_cast<double>(bytes);
  for (; size >= 1024 && unit + 1 < kUnits.size(); ++unit) size /= 1024;
  return absl::StrFormat("%.*f %s", unit == 0 ? 0 : 1, size, kUnits[unit]);
}

// "12.4"
std::string Version(int version) { return absl::StrCat(version / 1000, ".", version % 1000 / 10); }

constexpr int kLeastMajor = 8;  // Ampere: what nvcc_object compiles for

}  // namespace

absl::Status NotHereError(absl::string_view gpu, absl::string_view place) {
  return absl::InvalidArgumentError(absl::StrCat("memory of ", gpu, " is needed, and this is ",
                                                 place, ": move there what is in it"));
}

absl::Status NotOursError(absl::string_view gpu, absl::string_view whose) {
  return absl::InvalidArgumentError(
      absl::StrCat("a stream of ", gpu, " is needed, where the tensors are, and this is ", whose));
}

absl::Status NoRoomError(absl::string_view gpu, size_t wanted, size_t free, size_t total) {
  return absl::ResourceExhaustedError(absl::StrCat(
      gpu, " has no room for another ", Size(wanted), ": ", Size(free), " of ", Size(total),
      " are free. PyTorch keeps what it has freed: make the optimizer before the first batch, or "
      "call torch.cuda.empty_cache() before it. Otherwise have less of the model on it, or smaller "
      "batches, or end what else runs there: nvidia-smi shows it"));
}

absl::Status NotPinnedError(absl::string_view gpu, size_t wanted, absl::string_view why) {
  return absl::ResourceExhaustedError(absl::StrCat(
      gpu, " cannot have ", Size(wanted), " of the host's memory pinned for its copies (", why,
      "): give the host, or its container, more memory, and let more of it be locked "
      "(ulimit -l unlimited, docker run --ulimit memlock=-1)"));
}

absl::Status NotSharedError(absl::string_view gpu, absl::string_view why) {
  return absl::FailedPreconditionError(
      absl::StrCat(gpu, " cannot share memory with GPUs of other processes (", why,
                   "; containers need process numbers and IPC in common for it (docker run "
                   "--pid=host --ipc=host), and two GPUs peer access: nvidia-smi topo -p2p r)"));
}

absl::Status NotExportedError() {
  return absl::InvalidArgumentError("that is no memory which a GPU has exported");
}

absl::Status CheckCapability(absl::string_view gpu, int major, int minor) {
  if (major >= kLeastMajor) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(gpu, " has compute capability ", major, ".", minor, ", and this program is for ",
                   kLeastMajor, ".0 (Ampere) and later; name another, or train on the CPU"));
}

std::string ExplainInsufficientDriver(int driver, int built_with) {
  if (driver == 0) return "no NVIDIA driver is installed";
  return absl::StrCat("the NVIDIA driver is for CUDA up to ", Version(driver),
                      " and this program needs ", Version(built_with), "; install a newer driver");
}

std::string ExplainUnsupportedPtx(int driver, int built_with) {
  return absl::StrCat("the NVIDIA driver, for CUDA up to ", Version(driver),
                      ", cannot compile for this GPU what CUDA ", Version(built_with),
                      " has made of the kernels; install a newer driver");
}

std::string ExplainNoKernelImage(absl::string_view error) {
  return absl::StrCat(error,
                      ": this program's kernels are machine code for compute capability 8.x "
                      "(Ampere) and 9.0, and PTX for later GPUs; is CUDA_DISABLE_PTX_JIT set? "
                      "Otherwise build it with nvcc and --config=cuda again");
}

}  // namespace signpost::kernels::cuda
