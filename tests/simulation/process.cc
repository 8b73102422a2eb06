#include "tests/simulation/process.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace signpost::simulation {
namespace {

// Longer than any worker takes to come back, which one that leaves another shard first does late.
constexpr absl::Duration kRestartGrace = absl::Seconds(1);

}  // namespace

Process::Process(Scheduler& scheduler, ShardId shard, bool damages_late_ranks, Report report)
    : scheduler_(scheduler),
      shard_(shard),
      damages_late_ranks_(damages_late_ranks),
      report_(std::move(report)),
      disk_(scheduler),
      longest_save_(absl::Milliseconds(scheduler.OneIn(2) ? 8 : 60)) {}

Process::~Process() { End(); }

void Process::Start() {
  absl::StatusOr<std::unique_ptr<StateDir>> state_dir = StateDir::Open(disk_, shard_);
  absl::Status status = state_dir.status();
  StateDir::Recovered recovered;
  if (status.ok()) {
    absl::StatusOr<StateDir::Recovered> result = (*state_dir)->Recover(/*allow_error_reset=*/false);
    status = result.status();
    if (result.ok()) recovered = *std::move(result);
  }
  // It died while it started, or the disk is full: whoever starts it tries again.
  if (disk_.died() || absl::IsResourceExhausted(status)) {
    if (disk_.died()) disk_.Crash();
    return StartLater();
  }
  if (!status.ok()) return report_(absl::StrCat("aggregator does not start: ", status.ToString()));
  state_dir_ = *std::move(state_dir);
  aggregator_ =
      std::make_unique<Aggregator>(AggregatorOptions{.shard = shard_.shard,
                                                     .shard_count = shard_.shard_count,
                                                     .restart_grace = kRestartGrace,
                                                     .now = [this] { return scheduler_.Now(); }},
                                   state_dir_.get());
  status = aggregator_->Restore(recovered);
  if (!status.ok()) report_(absl::StrCat("jobs cannot go on: ", status.ToString()));
  SaveNowAndThen(incarnation_);
  CloseLateRoundsNowAndThen(incarnation_);
}

void Process::StartLater() {
  scheduler_.After(scheduler_.Between(absl::Milliseconds(1), absl::Milliseconds(60)),
                   [this] { Start(); });
}

void Process::SaveNowAndThen(uint64_t incarnation) {
  if (incarnation != incarnation_ || !is_up()) return;
  const absl::Status status = aggregator_->TakeSnapshots();
  if (disk_.died()) return Kill();
  if (status.ok()) ++saves_;
  if (!status.ok() && !absl::IsResourceExhausted(status)) report_(status.ToString());
  scheduler_.After(scheduler_.Between(absl::Microseconds(200), longest_save_),
                   [this, incarnation] { SaveNowAndThen(incarnation); });
}

void Process::CloseLateRoundsNowAndThen(uint64_t incarnation) {
  if (incarnation != incarnation_ || !is_up()) return;
  const absl::Duration due = aggregator_->CloseLateRounds();
  if (disk_.died()) return Kill();
  // Jobs with a deadline may begin at any time.
  const absl::Duration soon = scheduler_.Between(absl::Microseconds(200), absl::Milliseconds(3));
  scheduler_.After(due == absl::InfiniteDuration() ? absl::Milliseconds(10) : soon,
                   [this, incarnation] { CloseLateRoundsNowAndThen(incarnation); });
}

void Process::End() {
  ++incarnation_;
  aggregator_.reset();
  state_dir_.reset();
}

void Process::Kill() {
  if (!is_up()) return;
  End();
  disk_.Crash();
  StartLater();
}

bool Process::KillAndFlipBit(bool other_is_as_good) {
  if (!is_up()) return false;
  Kill();
  std::vector<std::string> snapshots = *disk_.List();
  for (const std::string& name : snapshots) {
    if (!damages_late_ranks_ || !absl::EndsWith(name, ".late") || scheduler_.OneIn(2)) continue;
    disk_.FlipBit(name);
    return true;
  }
  std::erase_if(snapshots,
                [](const std::string& name) { return !absl::EndsWith(name, ".snapshot"); });
  if (snapshots.size() < 2 || flipped_ || !other_is_as_good) return false;
  disk_.FlipBit(snapshots.back());
  flipped_ = true;
  return true;
}

void Process::Stop() {
  if (!is_up()) return;
  const absl::Status status = aggregator_->Suspend();
  if (disk_.died()) return Kill();
  if (status.ok()) ++saves_;
  if (!status.ok() && !absl::IsResourceExhausted(status)) report_(status.ToString());
  End();
  StartLater();
}

}  // namespace signpost::simulation
