// `signpost aggregator` as a process that is started again whenever it ends, as `signpost run` and
// a StatefulSet do, and that can be made to end in many ways.

#ifndef SIGNPOST_TESTS_CHAOS_SUPERVISED_H_
#define SIGNPOST_TESTS_CHAOS_SUPERVISED_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/channel.h"

namespace signpost::testing {

struct SupervisedOptions {
  uint32_t shard = 0;
  uint32_t shard_count = 1;
  std::string state_dir;  // empty: it has none
  std::string listen = "127.0.0.1:0";
  std::string failure_timeout = "1s";
  // How its connections are protected, and further flags.
  std::vector<std::string> flags = {"--insecure-i-understand"};
  // A command that runs the aggregator's, such as {"ip", "netns", "exec", NAME}.
  std::vector<std::string> wrapper;
  // SIGNPOST_FAILPOINT of the first process, of the second, and so on; beyond: not set.
  std::vector<std::string> failpoints;
  // Called when a process has ended, before the next is started, from the supervisor's thread.
  std::function<void()> before_restart = [] {};
};

// Thread-safe. Kills the process when it goes, and all die with the test.
class Supervised {
 public:
  explicit Supervised(const SupervisedOptions& options);
  ~Supervised();

  // "127.0.0.1:port": the first process that listens decides, and the later ones get it too. Blocks
  // until then.
  std::string target() const;

  // To the process that runs now.
  void Signal(int signal) const;
  pid_t pid() const;

  // How processes ended so far, as wait(2) has it.
  std::vector<int> ends() const;
  // False: so many had not ended within 20 s, or nobody listens then.
  bool AwaitListeningAfter(size_t ends) const;

 private:
  void Supervise();
  void RunOnce(size_t start);
  pid_t Start(size_t start, int output) const;

  const SupervisedOptions options_;
  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  pid_t pid_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: none
  bool listening_ ABSL_GUARDED_BY(mutex_) = false;
  std::string target_ ABSL_GUARDED_BY(mutex_);
  std::vector<int> ends_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

// One channel to each of them, for one worker, with a failure timeout of a second.
std::vector<std::unique_ptr<Channel>> ConnectTo(
    const std::vector<std::unique_ptr<Supervised>>& shards);

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_CHAOS_SUPERVISED_H_
