// Highway's targets, limited to those that are compiled in; comes before any header of Highway. The
// fallback is Highway's scalar target, in whose place the reference functions stand.

#ifndef SIGNPOST_KERNELS_HIGHWAY_TARGETS_H_
#define SIGNPOST_KERNELS_HIGHWAY_TARGETS_H_

#ifdef HIGHWAY_HWY_DETECT_TARGETS_H_
#error "include kernels/highway_targets.h before Highway's headers"
#endif

#define HWY_BROKEN_EMU128 1              // the fallback of newer compilers; it would not be scalar
#define HWY_BASELINE_TARGETS HWY_SCALAR  // also with -march=native
#define HWY_DISABLED_TARGETS (~(HWY_SCALAR | HWY_AVX2 | HWY_AVX3))

#include "hwy/targets.h"

#endif  // SIGNPOST_KERNELS_HIGHWAY_TARGETS_H_
