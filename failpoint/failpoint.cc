#include "failpoint/failpoint.h"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace signpost {
namespace {

constexpr FailpointPlace kPlaces[] = {
    {Failpoint::kStateDirCounted, "state_dir.counted",
     "the new generation is written down, nothing is loaded yet"},
    {Failpoint::kStateDirLoaded, "state_dir.loaded",
     "the newest snapshots are read, nothing is served yet"},
    {Failpoint::kServerListening, "server.listening",
     "workers can connect, but the process has not said so yet"},
    {Failpoint::kJoinReceived, "join.received", "a Join has come"},
    {Failpoint::kJoinDurable, "join.durable", "a job is on disk, its Joins are not answered yet"},
    {Failpoint::kFrameReceived, "frame.received", "a frame has come"},
    {Failpoint::kFrameContributed, "frame.contributed",
     "a frame is in its round, which waits for others"},
    {Failpoint::kRoundClosed, "round.closed", "a round's answer is made, nobody has it yet"},
    {Failpoint::kAnswerSent, "answer.sent", "one rank has its answer, others may not"},
    {Failpoint::kReplayAsked, "replay.asked",
     "frames from before the crash are about to be asked for"},
    {Failpoint::kSnapshotBegun, "snapshot.begun",
     "a job's state is to be written, none of it is yet"},
    {Failpoint::kFileCreated, "file.created", "a new file of the state directory is empty"},
    {Failpoint::kFileHalfWritten, "file.half_written",
     "a part of it is written, and more may follow"},
    {Failpoint::kFileWritten, "file.written", "it is written, not synced yet"},
    {Failpoint::kFileSynced, "file.synced", "it is synced, and still has its temporary name"},
    {Failpoint::kFileRenamed, "file.renamed", "it has its name, the directory is not synced yet"},
    {Failpoint::kSnapshotSaved, "snapshot.saved",
     "a snapshot is durable, the one that is one too many still there"},
    {Failpoint::kSnapshotPruned, "snapshot.pruned",
     "only the newest two are there, no chunk knows of the newest"},
    {Failpoint::kSnapshotAnnounced, "snapshot.announced",
     "answers carry the new durable step from now on"},
    {Failpoint::kLeaveReceived, "leave.received", "a Leave has come"},
    {Failpoint::kLeaveDurable, "leave.durable", "a Leave is on disk, not answered yet"},
    {Failpoint::kJobHalfForgotten, "job.half_forgotten",
     "the first snapshot of a job that is over is removed"},
    {Failpoint::kSuspendBegun, "suspend.begun", "SIGTERM has come, nothing is done about it yet"},
    {Failpoint::kSuspendHalfDone, "suspend.half_done",
     "calls have ended because of SIGTERM, the state is not written yet"},
    {Failpoint::kWorkerSending, "worker.sending", "a worker is about to send a frame"},
    {Failpoint::kWorkerAnswered, "worker.answered", "a worker has an answer, not applied yet"},
    {Failpoint::kNodeAnswered, "worker.node_answered",
     "a process's node has taken a step, and the process has yet to read the parameters"},
};

constexpr bool EachIsAtItsPlace() {
  for (size_t i = 0; i < std::size(kPlaces); ++i) {
    if (static_cast<size_t>(kPlaces[i].point) != i) return false;
  }
  return true;
}
static_assert(EachIsAtItsPlace());

enum class Action { kKill, kStop, kSleep };

struct Arm {
  Failpoint point;
  Action action = Action::kKill;
  absl::Duration sleep;
  uint64_t count = 1;
};

std::vector<Arm> arms;  // constant once armed
std::array<std::atomic<uint64_t>, std::size(kPlaces)> passes;

absl::Status Misunderstood(absl::string_view entry, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("failpoint '", entry, "': ", what,
                                                 "; wanted NAME=kill|stop|sleep:DURATION[@COUNT]"));
}

absl::Status ParsePoint(absl::string_view entry, absl::string_view name, Arm& arm) {
  for (const FailpointPlace& place : kPlaces) {
    if (place.name != name) continue;
    arm.point = place.point;
    return absl::OkStatus();
  }
  const std::string names = absl::StrJoin(
      kPlaces, ", ",
      [](std::string* out, const FailpointPlace& place) { absl::StrAppend(out, place.name); });
  return Misunderstood(entry, absl::StrCat("there is no '", name, "', but there are: ", names));
}

absl::Status ParseAction(absl::string_view entry, absl::string_view action, Arm& arm) {
  if (action == "kill") {
    arm.action = Action::kKill;
  } else if (action == "stop") {
    arm.action = Action::kStop;
  } else if (absl::ConsumePrefix(&action, "sleep:")) {
    arm.action = Action::kSleep;
    if (!absl::ParseDuration(action, &arm.sleep) || arm.sleep < absl::ZeroDuration() ||
        arm.sleep == absl::InfiniteDuration()) {
      return Misunderstood(entry, absl::StrCat("'", action, "' is not a duration such as 2s"));
    }
  } else {
    return Misunderstood(entry, absl::StrCat("'", action, "' is not an action"));
  }
  return absl::OkStatus();
}

absl::Status ParseArm(absl::string_view entry, Arm& arm) {
  const std::pair<absl::string_view, absl::string_view> halves =
      absl::StrSplit(entry, absl::MaxSplits('=', 1));
  const std::pair<absl::string_view, absl::string_view> action =
      absl::StrSplit(halves.second, absl::MaxSplits('@', 1));
  if (absl::Status status = ParsePoint(entry, halves.first, arm); !status.ok()) return status;
  if (absl::Status status = ParseAction(entry, action.first, arm); !status.ok()) return status;
  const bool has_count = action.first.size() < halves.second.size();
  if (has_count && (!absl::SimpleAtoi(action.second, &arm.count) || arm.count == 0)) {
    return Misunderstood(entry, absl::StrCat("'", action.second, "' is not a count from 1 on"));
  }
  return absl::OkStatus();
}

void Do(const Arm& arm) {
  const absl::string_view name = kPlaces[static_cast<size_t>(arm.point)].name;
  dprintf(STDERR_FILENO, "signpost: at failpoint %.*s, pass %llu\n", static_cast<int>(name.size()),
          name.data(), static_cast<unsigned long long>(arm.count));
  switch (arm.action) {
    case Action::kKill:
      kill(getpid(), SIGKILL);
      break;
    case Action::kStop:
      kill(getpid(), SIGSTOP);
      break;
    case Action::kSleep:
      absl::SleepFor(arm.sleep);
      break;
  }
}

}  // namespace

absl::Span<const FailpointPlace> AllFailpoints() { return kPlaces; }

absl::Status ArmFailpoints(absl::string_view spec) {
  std::vector<Arm> parsed;
  for (const absl::string_view entry : absl::StrSplit(spec, ',')) {
    if (absl::Status status = ParseArm(entry, parsed.emplace_back()); !status.ok()) return status;
  }
  arms = std::move(parsed);
  failpoint_internal::armed = true;
  return absl::OkStatus();
}

void failpoint_internal::Act(Failpoint point) {
  const uint64_t pass = ++passes[static_cast<size_t>(point)];
  for (const Arm& arm : arms) {
    if (arm.point == point && arm.count == pass) Do(arm);
  }
}

}  // namespace signpost
