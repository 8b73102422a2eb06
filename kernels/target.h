// Which instruction set the kernels use. Chosen once, at the first call: the best one that this
// processor has. All give the same bytes; tests and benchmarks go through each of them.

#ifndef SIGNPOST_KERNELS_TARGET_H_
#define SIGNPOST_KERNELS_TARGET_H_

#include <string>
#include <vector>

namespace signpost::kernels {

// With GFNI, and AVX-512 of bytes (Ice Lake, Zen 4 and later), an aggregator adds up one-bit and
// int4 frames faster.
enum class Target { kScalar, kAvx2, kAvx512, kAvx512Gfni };

std::string TargetName(Target target);  // "scalar", "avx2", "avx512", "avx512_gfni"

// The targets that this processor and this build have, slowest first; kScalar is always there.
std::vector<Target> SupportedTargets();

Target CurrentTarget();

// Makes all kernels of this process use `target`, one of SupportedTargets(). For tests and
// benchmarks; not to be called while another thread is in a kernel.
void UseTarget(Target target);

}  // namespace signpost::kernels

#endif  // SIGNPOST_KERNELS_TARGET_H_
