// The directory in which one aggregator process keeps what must survive it:
//
//   lock                          locked by the process that serves the directory
//   identity                      which shard it belongs to, and how often it has been served
//   <epoch>-<sequence>.snapshot   of a running job: the newest two (snapshot.h), in hexadecimal
//   <epoch>.late                  of such a job: rounds that close without some rank
//   epochs                        of the last 1,024 jobs that had a snapshot, in hexadecimal
//   *.damaged                     what could not be read, for whoever wants to know why

#ifndef SIGNPOST_SERVER_STATE_DIR_H_
#define SIGNPOST_SERVER_STATE_DIR_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/job.h"
#include "server/snapshot.h"
#include "storage/disk.h"

namespace signpost {

// Not thread-safe, but for SaveLateRounds.
class StateDir {
 public:
  // Creates the directory if need be, locks it, and begins a new generation. UNAVAILABLE when
  // another process has it locked; FAILED_PRECONDITION, naming both, when it belongs to another
  // shard or version.
  static absl::StatusOr<std::unique_ptr<StateDir>> Open(const std::string& path, ShardId shard);
  // The same, without the lock, on a disk that outlives it.
  static absl::StatusOr<std::unique_ptr<StateDir>> Open(Disk& disk, ShardId shard);

  // Whether Open would find it of that shard and version. Changes nothing; OK when nothing is
  // there.
  static absl::Status CheckShard(const std::string& path, ShardId shard);

  ~StateDir();

  uint64_t generation() const { return generation_; }  // more than all before it

  // Where it is, for logs.
  std::string Describe() const { return path_.empty() ? "the state directory" : path_; }
  // A message about it, for peers: they need not know where it is.
  std::string WithoutPath(absl::string_view message) const;

  struct Recovered {
    std::vector<JobState> jobs;         // each from its newest snapshot that can be read
    std::vector<uint64_t> given_up;     // epochs of jobs that cannot be gone on with
    std::vector<uint64_t> known;        // epochs of jobs that had a snapshot, the last of them
    std::vector<std::string> warnings;  // what could not be read, for a person
  };
  // To be called once, before anything is saved. DATA_LOSS when a job has snapshots but none that
  // can be read; if `allow_error_reset`, such a job is given up with a warning instead: its workers
  // are told, and it can be started again. Nothing ever goes on with an error that was made up.
  absl::StatusOr<Recovered> Recover(bool allow_error_reset);

  // Writes the job's next snapshot (WriteSnapshot) and removes all but the newest two. Before the
  // first one it is made known. On error those before stay.
  absl::Status Save(const JobState& job, const ChunkSource& source);

  // Writes down which rounds close without which ranks; Recover puts it into the chunks' states.
  // On error what was written before stays. Jobs that have a snapshot only.
  absl::Status SaveLateRounds(uint64_t epoch, const LateRounds& rounds);

  // The job is over. On error some of its files may be left, for the next call; the newest snapshot
  // if any is. After a crash it is in that one, or gone. Recover says that it is known, also to
  // later processes: some of the job's own may still be there.
  absl::Status Forget(uint64_t epoch);

 private:
  explicit StateDir(Disk& disk) : disk_(disk) {}

  absl::Status BeginGeneration(ShardId shard);
  absl::Status SetAside(const std::string& name);
  absl::Status RecoverLateRounds(JobState& state);
  absl::Status RecoverEpochs(std::vector<std::string>& warnings);
  absl::Status SetKnown(uint64_t epoch);

  std::unique_ptr<Disk> owned_disk_;
  std::string path_;  // of the owned one
  Disk& disk_;
  int lock_fd_ = -1;
  uint64_t generation_ = 0;
  std::map<uint64_t, std::vector<uint64_t>> sequences_;  // by epoch: of its snapshots, ascending
  std::map<uint64_t, uint64_t> last_sequence_;           // by epoch: damaged ones included
  std::deque<uint64_t> known_;                           // epochs, as they were first saved
  ChunkState scratch_;                                   // of Save
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_STATE_DIR_H_
