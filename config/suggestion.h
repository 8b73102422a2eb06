// "Did you mean ...?"

#ifndef SIGNPOST_CONFIG_SUGGESTION_H_
#define SIGNPOST_CONFIG_SUGGESTION_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace signpost::config {

// How many letters must be inserted, removed, replaced or swapped with their neighbour to make b of
// a.
size_t EditDistance(absl::string_view a, absl::string_view b);

// The one of `known` that `word` most likely stands for: at most a third of its letters wrong, or
// its beginning. Empty if there is none.
std::string Nearest(absl::string_view word, const std::vector<std::string>& known);

}  // namespace signpost::config

#endif  // SIGNPOST_CONFIG_SUGGESTION_H_
