#include "tests/simulation/process.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace signpost::simulation {
namespace {

constexpr absl::Duration kLongestPause = absl::Milliseconds(2);

}  // namespace

Process::Process(Scheduler& scheduler, ShardId shard, bool damages_late_ranks,
                 IsConnected is_connected, Report report)
    : scheduler_(scheduler),
      clock_(scheduler),
      shard_(shard),
      damages_late_ranks_(damages_late_ranks),
      is_connected_(std::move(is_connected)),
      report_(std::move(report)),
      disk_(scheduler),
      longest_save_(absl::Milliseconds(scheduler.OneIn(2) ? 8 : 60)) {
  disk_.set_pause([this] {
    // Of a process that starts nobody sees anything.
    if (users_ == 0 || !scheduler_.OneIn(8)) return;
    clock_.Sleep(scheduler_.Between(absl::ZeroDuration(), kLongestPause));
  });
  scheduler_.Spawn(clock_, [this] { SaveNowAndThen(); });
  scheduler_.Spawn(clock_, [this] { CloseLateRoundsNowAndThen(); });
}

Process::~Process() { ++incarnation_; }

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
                                                     .forget_after = absl::InfiniteDuration(),
                                                     .is_connected = is_connected_,
                                                     .now = [this] { return clock_.Now(); }},
                                   state_dir_.get());
  status = aggregator_->Restore(recovered);
  if (!status.ok()) report_(absl::StrCat("jobs cannot go on: ", status.ToString()));
}

void Process::StartLater() {
  clock_.After(scheduler_.Between(absl::Milliseconds(1), absl::Milliseconds(60)),
               [this] { Start(); });
}

void Process::Use(absl::FunctionRef<void(Aggregator& aggregator)> use) {
  if (!is_up()) return;
  ++users_;
  use(*aggregator_);
  --users_;
  if (!is_up()) {
    if (users_ == 0) HasEnded();
  } else if (disk_.died()) {
    End();
  }
}

void Process::SaveNowAndThen() {
  while (!is_retired_) {
    if (is_stopping_) {
      Suspend();
    } else {
      Use([this](Aggregator& aggregator) {
        is_saving_ = true;
        const absl::Status status = aggregator.TakeSnapshots();
        is_saving_ = false;
        if (status.ok()) ++saves_;
        const bool may_fail = disk_.died() || absl::IsResourceExhausted(status);
        if (!status.ok() && !may_fail) report_(status.ToString());
      });
    }
    clock_.Sleep(scheduler_.Between(absl::Microseconds(200), longest_save_));
  }
}

void Process::CloseLateRoundsNowAndThen() {
  while (!is_retired_) {
    absl::Duration due = absl::InfiniteDuration();
    Use([&](Aggregator& aggregator) { due = aggregator.CloseLateRounds(); });
    // Jobs with a deadline may begin at any time.
    const absl::Duration soon = scheduler_.Between(absl::Microseconds(200), absl::Milliseconds(3));
    clock_.Sleep(due == absl::InfiniteDuration() ? absl::Milliseconds(10) : soon);
  }
}

void Process::Suspend() {
  Use([this](Aggregator& aggregator) {
    const absl::Status status = aggregator.Suspend();
    if (status.ok()) ++saves_;
    const bool may_fail = disk_.died() || absl::IsResourceExhausted(status);
    if (!status.ok() && !may_fail) report_(status.ToString());
    if (is_up()) End();
  });
}

void Process::End() {
  ++incarnation_;
  is_stopping_ = false;
  ended_aggregator_ = std::move(aggregator_);
  ended_state_dir_ = std::move(state_dir_);
  if (users_ == 0) HasEnded();
}

void Process::HasEnded() {
  ended_aggregator_.reset();
  ended_state_dir_.reset();
  if (disk_.died()) disk_.Crash();
  if (flip_) FlipBit(*std::exchange(flip_, std::nullopt));
  StartLater();
}

void Process::Kill() {
  if (!is_up()) return;
  disk_.Die();
  End();
}

void Process::KillAndFlipBit(bool other_is_as_good, bool may_be_of_late_ranks) {
  if (!is_up()) return;
  flip_ = {other_is_as_good, may_be_of_late_ranks && damages_late_ranks_};
  Kill();
}

void Process::FlipBit(const Flip& flip) {
  std::vector<std::string> snapshots = *disk_.List();
  for (const std::string& name : snapshots) {
    if (!flip.may_be_of_late_ranks || !absl::EndsWith(name, ".late") || scheduler_.OneIn(2)) {
      continue;
    }
    disk_.FlipBit(name);
    ++bit_flips_;
    return;
  }
  std::erase_if(snapshots,
                [](const std::string& name) { return !absl::EndsWith(name, ".snapshot"); });
  if (snapshots.size() < 2 || flipped_ || !flip.other_is_as_good) return;
  const std::string& newest = snapshots.back();
  const std::string& other = snapshots[snapshots.size() - 2];
  if (newest.substr(0, newest.find('-')) != other.substr(0, other.find('-'))) return;  // epochs
  disk_.FlipBit(newest);
  flipped_ = true;
  ++bit_flips_;
}

}  // namespace signpost::simulation
