#include <memory>
#include <random>
#include <vector>

#include "kernels/adam_cuda-inl.h"
#include "kernels/dense_cuda-inl.h"
#include "kernels/onebit_cuda-inl.h"
#include "kernels/run_cuda.h"
#include "kernels/sum_cuda-inl.h"
#include "kernels/test_inputs.h"
#include "kernels/thread_block_cuda-inl.h"

namespace signpost::kernels::cuda {
namespace {

// In what order a GPU has thread blocks, and threads in a phase, nobody knows: in each call
// another.
uint32_t NewOrder() {
  static std::mt19937 engine(TestSeed());
  return static_cast<uint32_t>(engine() % kThreads);
}

// Calls body(block, segment, number) for each block, as OnBlocks does on a GPU.
template <class Segment, class Body>
void OnBlocks(const BlockRule& rule, const std::vector<Segment>& segments, Body body) {
  const uint32_t order = NewOrder();
  const uint32_t blocks = BlocksOf(rule, segments);
  for (uint32_t i = 0; i < blocks; ++i) {
    const uint32_t number = (i + order) % blocks;
    const auto block = std::make_unique<HostBlock>(order);
    body(*block, SegmentOfBlock(segments.data(), segments.size(), number), number);
  }
}

template <Term kTerm>
double SumOnHost(absl::Span<const float> values) {
  std::vector<double> workspace(SumWorkspace(values.size()));
  double sum;
  SumInRuns<kTerm>(values.data(), values.size(), workspace.data(), &sum,
                   [](auto term, size_t runs, const auto* terms, size_t count, double* sums) {
                     for (uint32_t number = 0; number < runs; ++number) {
                       const auto block = std::make_unique<HostBlock>(NewOrder());
                       SumBlock<term>(*block, terms, count, number, sums);
                     }
                   });
  return sum;
}

}  // namespace

uint32_t RunCompressOneBit(const BlockRule& rule, const std::vector<CompressSegment>& segments) {
  uint32_t first = kAllPacked;
  OnBlocks(rule, segments, [&](HostBlock& on, const CompressSegment& segment, uint32_t number) {
    CompressBlock(on, rule, segment, number, &first);
  });
  return first;
}

uint32_t RunCompressDense(const BlockRule& rule, const std::vector<DenseSegment>& segments) {
  uint32_t first = kAllPacked;
  OnBlocks(rule, segments, [&](HostBlock& on, const DenseSegment& segment, uint32_t number) {
    CompressDenseBlock(on, rule, segment, number, &first);
  });
  return first;
}

void RunApplyMomentum(const BlockRule& rule, const std::vector<ApplySegment>& segments) {
  OnBlocks(rule, segments, [&](HostBlock& on, const ApplySegment& segment, uint32_t number) {
    ApplyBlock(on, rule, segment, number);
  });
}

void RunAddOneBit(const BlockRule& rule, const std::vector<AddSegment>& segments) {
  OnBlocks(rule, segments, [&](HostBlock& on, const AddSegment& segment, uint32_t number) {
    AddBlock(on, rule, segment, number);
  });
}

void RunAddDense(const BlockRule& rule, const std::vector<AddDenseSegment>& segments) {
  OnBlocks(rule, segments, [&](HostBlock& on, const AddDenseSegment& segment, uint32_t number) {
    AddDenseBlock(on, rule, segment, number);
  });
}

void RunScale(const BlockRule& rule, const std::vector<ScaleSegment>& segments) {
  OnBlocks(rule, segments, [&](HostBlock& on, const ScaleSegment& segment, uint32_t number) {
    ScaleBlock(on, rule, segment, number);
  });
}

void RunAdamStep(const BlockRule& rule, const std::vector<AdamSegment<AdamRates>>& segments) {
  OnBlocks(rule, segments,
           [&](HostBlock& on, const AdamSegment<AdamRates>& segment, uint32_t number) {
             AdamBlock(on, rule, segment, number);
           });
}

void RunFreeze(const BlockRule& rule, const std::vector<AdamSegment<FreezeRates>>& segments) {
  OnBlocks(rule, segments,
           [&](HostBlock& on, const AdamSegment<FreezeRates>& segment, uint32_t number) {
             FreezeBlock(on, rule, segment, number);
           });
}

void RunRefreshStep(const BlockRule& rule, const std::vector<AdamSegment<RefreshRates>>& segments) {
  OnBlocks(rule, segments,
           [&](HostBlock& on, const AdamSegment<RefreshRates>& segment, uint32_t number) {
             RefreshBlock(on, rule, segment, number);
           });
}

void RunThaw(const BlockRule& rule, const std::vector<AdamSegment<RefreshRates>>& segments) {
  OnBlocks(rule, segments,
           [&](HostBlock& on, const AdamSegment<RefreshRates>& segment, uint32_t number) {
             ThawBlock(on, rule, segment, number);
           });
}

double RunSum(absl::Span<const float> values) { return SumOnHost<Term::kItself>(values); }

double RunSumOfSquares(absl::Span<const float> values) { return SumOnHost<Term::kSquare>(values); }

}  // namespace signpost::kernels::cuda
