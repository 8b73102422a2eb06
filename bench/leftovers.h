// What benchmarks make outside of their processes, and leave behind when they are killed.

#ifndef SIGNPOST_BENCH_LEFTOVERS_H_
#define SIGNPOST_BENCH_LEFTOVERS_H_

#include <sys/types.h>

#include <string>
#include <vector>

namespace signpost::bench {

// "signpost-bench-<namespace of its number>-<pid>": names of what a process makes are this, "-" and
// something more. Without an argument: this process.
std::string NamePrefix(pid_t pid);
std::string NamePrefix();

// The paths in a directory of this user's things with such names, of processes that are gone. None
// where there is no such directory.
std::vector<std::string> LeftIn(const std::string& directory);

}  // namespace signpost::bench

#endif  // SIGNPOST_BENCH_LEFTOVERS_H_
