// What benchmarks make outside of their processes, and leave behind when they are killed.

#ifndef SIGNPOST_BENCH_LEFTOVERS_H_
#define SIGNPOST_BENCH_LEFTOVERS_H_

#include <string>
#include <vector>

namespace signpost::bench {

// "signpost-bench-<pid>": names of what this process makes are this, "-" and something more.
std::string NamePrefix();

// The paths in a directory of this user's things with such names, of processes that are gone. None
// where there is no such directory.
std::vector<std::string> LeftIn(const std::string& directory);

}  // namespace signpost::bench

#endif  // SIGNPOST_BENCH_LEFTOVERS_H_
