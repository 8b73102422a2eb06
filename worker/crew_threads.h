// For tests: how many threads of crews (chunk_crew.h) this process has.

#ifndef SIGNPOST_WORKER_CREW_THREADS_H_
#define SIGNPOST_WORKER_CREW_THREADS_H_

#include <filesystem>
#include <fstream>
#include <string>

namespace signpost {

inline int CrewThreads() {
  int threads = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    threads += name == "signpost-crew";
  }
  return threads;
}

}  // namespace signpost

#endif  // SIGNPOST_WORKER_CREW_THREADS_H_
