// The order in which an aggregator's reference kernels add up what the ranks sent (block.h).

#ifndef SIGNPOST_KERNELS_RANK_SUM_H_
#define SIGNPOST_KERNELS_RANK_SUM_H_

#include <algorithm>
#include <cstddef>

#include "kernels/block.h"

namespace signpost::kernels::reference {

// term(0) + ... + term(ranks - 1), in groups of kRankGroup; ranks >= 1.
template <class Term>
float SumOverRanks(size_t ranks, Term term) {
  float sum = 0;
  for (size_t group = 0; group < ranks; group += kRankGroup) {
    float partial = term(group);
    for (size_t rank = group + 1; rank < std::min(group + kRankGroup, ranks); ++rank) {
      partial += term(rank);
    }
    sum = group == 0 ? partial : sum + partial;
  }
  return sum;
}

}  // namespace signpost::kernels::reference

#endif  // SIGNPOST_KERNELS_RANK_SUM_H_
