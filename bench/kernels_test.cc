#include "bench/kernels.h"

#include <gtest/gtest.h>

#include <string>

#include "kernels/target.h"

namespace signpost::bench {
namespace {

using kernels::Target;

Figure FigureOf(const Figures& figures, const std::string& name, const std::string& unit) {
  for (const Figure& figure : figures.figures()) {
    if (figure.name() == name && figure.unit() == unit) return figure;
  }
  ADD_FAILURE() << "no " << name << " in " << unit;
  return {};
}

TEST(Kernels, NeedMemory) {
  EXPECT_TRUE(CheckMemory({.elements = 10000}).ok());
  const absl::Status status = CheckMemory({.elements = 999'999'999'999'999});
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
}

TEST(Kernels, EachHasItsSpeedInBytesAgainstABoundAndInElements) {
  const Figures figures = MeasureKernels({.elements = 10000, .rounds = 3});
  for (const std::string name : {"compress, one-bit momentum",
                                 "compress, dense momentum",
                                 "compress, no momentum",
                                 "apply",
                                 "decompress",
                                 "take back",
                                 "aggregate, 2 workers",
                                 "aggregate, 4 workers",
                                 "aggregate, 8 workers",
                                 "aggregate, 16 workers",
                                 "aggregate, 64 workers",
                                 "compress, fp32",
                                 "aggregate, fp32, 4 workers",
                                 "decompress, fp32",
                                 "Adam step, fp32",
                                 "adaptive step, fp32",
                                 "refresh step, fp32",
                                 "take back, fp32",
                                 "compress, bf16",
                                 "aggregate, bf16, 4 workers",
                                 "decompress, bf16",
                                 "Adam step, bf16",
                                 "adaptive step, bf16",
                                 "refresh step, bf16",
                                 "take back, bf16",
                                 "compress, fp16",
                                 "aggregate, fp16, 4 workers",
                                 "decompress, fp16",
                                 "Adam step, fp16",
                                 "adaptive step, fp16",
                                 "refresh step, fp16",
                                 "take back, fp16",
                                 "compress, int8",
                                 "decompress, int8",
                                 "take back, int8",
                                 "aggregate, int8, 4 workers",
                                 "aggregate, int8, 8 workers",
                                 "compress, int4",
                                 "decompress, int4",
                                 "take back, int4",
                                 "aggregate, int4, 4 workers",
                                 "aggregate, int4, 8 workers",
                                 "freeze",
                                 "thaw",
                                 "scale",
                                 "sum",
                                 "sum of squares",
                                 "momentum input",
                                 "apply, dense momentum",
                                 "local step",
                                 "LAMB moments, fp32",
                                 "LAMB step",
                                 "floor variance",
                                 "follow momentum",
                                 "follow momentum, dense"}) {
    SCOPED_TRACE(name);
    const Figure bytes = FigureOf(figures, name, "GB/s");
    EXPECT_GT(bytes.value(), 0);
    EXPECT_GT(bytes.bound(), 0);
    EXPECT_GT(bytes.of_bound(), 0);
    EXPECT_EQ(bytes.peer(), "reading and writing the same");
    EXPECT_GT(bytes.times_faster(), 0);
    EXPECT_GT(FigureOf(figures, name, "Gelem/s").value(), 0);
  }
  // e and 64 workers' bits are read; e and the answer's are written.
  EXPECT_NEAR(FigureOf(figures, "aggregate, 64 workers", "GB/s").value(),
              (4 + 8 + 4 + 0.125) * FigureOf(figures, "aggregate, 64 workers", "Gelem/s").value(),
              1e-6);
  // A gradient of two bytes, m, v and x are read; m, v and x are written.
  EXPECT_NEAR(FigureOf(figures, "adaptive step, bf16", "GB/s").value(),
              (2 + 12 + 12) * FigureOf(figures, "adaptive step, bf16", "Gelem/s").value(), 1e-6);
  // A code of a byte and e are read; e is written.
  EXPECT_NEAR(FigureOf(figures, "take back, int8", "GB/s").value(),
              (1 + 4 + 4) * FigureOf(figures, "take back, int8", "Gelem/s").value(), 1e-6);
  // m and v are read and written.
  EXPECT_NEAR(FigureOf(figures, "freeze", "GB/s").value(),
              (8 + 8) * FigureOf(figures, "freeze", "Gelem/s").value(), 1e-6);
  // g, m, u, d and x are read; m, u and x are written.
  EXPECT_NEAR(FigureOf(figures, "local step", "GB/s").value(),
              (20 + 12) * FigureOf(figures, "local step", "Gelem/s").value(), 1e-6);
  // The answer, m, d, f and x are read; m and f are written.
  EXPECT_NEAR(FigureOf(figures, "follow momentum, dense", "GB/s").value(),
              (20 + 8) * FigureOf(figures, "follow momentum, dense", "Gelem/s").value(), 1e-6);
}

TEST(Kernels, RoundsAreWhatTheMedianIsOf) {
  const Figure one = FigureOf(MeasureKernels({.elements = 10000, .rounds = 1}), "apply", "Gelem/s");
  EXPECT_EQ(one.least(), one.most());
  const Figure many =
      FigureOf(MeasureKernels({.elements = 10000, .rounds = 20}), "apply", "Gelem/s");
  EXPECT_LT(many.least(), many.most());
}

TEST(Kernels, AreThoseOfTheTargetThatIsAskedFor) {
  const Target best = kernels::SupportedTargets().back();
  if (best == Target::kScalar) GTEST_SKIP() << "this processor has only one";
  const auto speed = [](Target target) {
    return FigureOf(MeasureKernels({.elements = 10000, .rounds = 9, .target = target}),
                    "aggregate, 64 workers", "Gelem/s")
        .most();
  };
  EXPECT_GT(speed(best), 2 * speed(Target::kScalar));
  EXPECT_EQ(kernels::CurrentTarget(), best);  // as it was
}

}  // namespace
}  // namespace signpost::bench
