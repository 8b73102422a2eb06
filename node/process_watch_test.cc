#include "node/process_watch.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/synchronization/notification.h"

namespace signpost::node {
namespace {

// A process that does nothing until it is killed.
class Child {
 public:
  Child() : pid_(fork()) {
    while (pid_ == 0) pause();
  }
  ~Child() { Reap(); }

  pid_t pid() const { return pid_; }
  void Kill() { kill(pid_, SIGKILL); }
  void Reap() {
    Kill();
    waitpid(pid_, nullptr, 0);
  }

 private:
  const pid_t pid_;
};

TEST(ProcessWatch, TellsWhenAProcessIsKilledAlsoBeforeItsParentHasHeardOfIt) {
  Child child, other;
  absl::Notification told;
  ProcessWatch watch;
  watch.Add(other.pid(), PidNamespace(), [] { ADD_FAILURE(); });
  watch.Add(child.pid(), PidNamespace(), [&] { told.Notify(); });
  EXPECT_FALSE(told.HasBeenNotified());
  child.Kill();
  told.WaitForNotification();
}

TEST(ProcessWatch, TellsAtOnceOfOneThatIsNotThere) {
  Child child;
  child.Reap();
  ProcessWatch watch;
  bool told = false;
  watch.Add(child.pid(), PidNamespace(), [&] { told = true; });
  EXPECT_TRUE(told);
}

TEST(ProcessWatch, TellsNothingOfWhatWasRemovedOrIsCountedElsewhere) {
  Child child;
  absl::Notification told;
  {
    ProcessWatch watch;
    const uint64_t removed = watch.Add(child.pid(), PidNamespace(), [] { ADD_FAILURE(); });
    watch.Remove(removed);
    watch.Remove(removed);
    for (const uint64_t pid_namespace : {uint64_t{0}, PidNamespace() + 1}) {
      watch.Remove(watch.Add(child.pid(), pid_namespace, [] { ADD_FAILURE(); }));
      watch.Add(child.pid(), pid_namespace, [] { ADD_FAILURE(); });
    }
    watch.Add(child.pid(), PidNamespace(), [&] { told.Notify(); });
    child.Kill();
    told.WaitForNotification();
  }
}

}  // namespace
}  // namespace signpost::node
