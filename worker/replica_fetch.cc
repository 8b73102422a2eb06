#include "worker/replica_fetch.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "proto/codec.h"
#include "proto/try_again.h"
#include "worker/inbox.h"

namespace signpost {
namespace {

// Of each chunk: how often it may turn out that the state which came is not to be gone on from.
constexpr uint32_t kMostFetches = 32;

using Answers = Inbox<absl::StatusOr<Answer>>;

class ReplicaFetch {
 public:
  ReplicaFetch(const ReplicaSource& source, const Layout& layout, Optimizer& optimizer)
      : source_(source),
        layout_(layout),
        optimizer_(optimizer),
        parts_(layout.chunks().size()),
        newest_step_(source.least_step),
        inbox_(std::make_shared<Answers>()) {}

  absl::StatusOr<Replica> Run() {
    while (true) {
      SetTarget();
      if (target_ && absl::c_all_of(parts_, [&](const Part& p) { return p.step == target_; })) {
        EndLastStep();
        optimizer_.SetSchedule(schedules_.lower_bound(*target_)->second);
        Replica replica = {.step = *target_};
        for (Part& part : parts_) replica.followed.push_back(std::move(part.listens));
        return replica;
      }
      for (uint32_t chunk = 0; chunk < parts_.size(); ++chunk) Ask(chunk);
      // The chunks that are here would be followed for ever.
      const bool is_in_vain = absl::c_any_of(parts_, [](const Part& part) {
        return !part.step && !part.is_under_way && part.fetches == kMostFetches;
      });
      if (is_in_vain) {
        return TryAgain(absl::FailedPreconditionError(
            "the states that came are too old to go on from, time and again"));
      }
      std::optional<Answers::Item> item = inbox_->Take(*source_.clock, source_.timeout);
      if (!item) continue;  // it ends by its deadline
      absl::Status status = Receive(item->chunk, std::move(item->what));
      if (!status.ok()) return status;
    }
  }

 private:
  // What is here of a chunk.
  struct Part {
    std::optional<uint64_t> step;  // none: nothing yet
    FrameHeader asked;             // with is_under_way
    bool is_under_way = false;
    uint32_t fetches = 0;
    StepRates followed;              // those of the last step that it followed
    std::vector<SentFrame> listens;  // answered, of the steps that it followed
  };

  // Whether the answer is one of the newest process of its aggregator that is known. One that was
  // started again may have closed rounds otherwise that are in what this rank has by then: what the
  // others have since is what it goes on from.
  bool IsOfNewestProcess(uint32_t chunk, uint64_t generation) {
    const auto [found, is_first] =
        generations_.try_emplace(source_.channel_of_chunk[chunk], generation);
    if (generation <= found->second) return generation == found->second;
    found->second = generation;
    BeginAnew();
    return true;
  }

  // Schedules and scales are of all chunks, those of other aggregators too.
  void BeginAnew() {
    for (Part& part : parts_) part.step.reset();
    target_.reset();
    least_state_step_ = 0;
    newest_step_ = source_.least_step;
    schedules_.clear();
    newest_state_step_ = 0;
    newest_scales_ = {};
  }

  // When all chunks are here, the step to which all are to come: that of the newest.
  void SetTarget() {
    for (Part& part : parts_) {
      if (part.step && IsBehindFreeze(part)) LeaveBehindFreeze(part);
    }
    if (absl::c_any_of(parts_, [](const Part& part) { return !part.step; })) {
      target_.reset();
    } else if (!target_) {
      target_ = source_.least_step;
      for (const Part& part : parts_) target_ = std::max(*target_, *part.step);
    }
  }

  // A freeze needs all of a tensor, so a chunk by itself cannot go beyond it.
  bool IsBehindFreeze(const Part& part) const {
    return optimizer_.FreezesBefore(*part.step) && newest_step_ > *part.step;
  }

  // No state of that step, of any chunk, can be gone on from, nor an earlier one.
  void LeaveBehindFreeze(Part& part) {
    least_state_step_ = std::max(least_state_step_, *part.step + 1);
    part.step.reset();
  }

  // That this rank can take part in, as far as is known.
  uint64_t FirstStep() const {
    uint64_t first = std::max(source_.least_step, least_state_step_);
    for (const Part& part : parts_) first = std::max(first, part.step.value_or(0));
    return first;
  }

  // Of the one before the target. What it needs of all chunks came with the state of a chunk that
  // was given after it. When there was none, all chunks have followed it, and all is here.
  void EndLastStep() {
    if (newest_state_step_ == *target_) {
      for (uint32_t chunk = 0; chunk < parts_.size(); ++chunk) {
        optimizer_.EndFollowedStep(chunk, *target_ - 1, parts_[chunk].followed, newest_scales_);
      }
      return optimizer_.SetScales(newest_scales_);
    }
    for (const Part& part : parts_) optimizer_.FollowStep(*target_ - 1, part.followed);
    optimizer_.EndStep();
  }

  // For what comes next of the chunk, if it is time.
  void Ask(uint32_t chunk) {
    Part& part = parts_[chunk];
    if (part.is_under_way) return;
    if (part.step) {
      // At a freeze the answer is of no use; but where too few others are left, an aggregator
      // closes the round only if it knows who waits.
      if (!target_ || *part.step < *target_) Send(chunk, LISTEN, *part.step);
      return;
    }
    uint32_t& fetching = fetching_[source_.channel_of_chunk[chunk]];
    if (fetching == source_.window || part.fetches == kMostFetches) return;
    ++fetching;
    ++part.fetches;
    Send(chunk, FETCH, least_state_step_);
  }

  void Send(uint32_t chunk, Codec codec, uint64_t step) {
    Part& part = parts_[chunk];
    part.is_under_way = true;
    part.asked = source_.header_of(chunk);
    part.asked.set_codec(codec);
    part.asked.set_step(step);
    part.asked.set_answered_steps(FirstStep());
    source_.channel_of_chunk[chunk]->Exchange(
        part.asked, std::make_shared<const Payload>(), source_.clock->Now() + source_.timeout,
        [inbox = inbox_, chunk](absl::StatusOr<Answer> answer) {
          inbox->Put(chunk, std::move(answer));
        });
  }

  absl::Status Receive(uint32_t chunk, absl::StatusOr<Answer> answer) {
    Part& part = parts_[chunk];
    part.is_under_way = false;
    const bool is_state = part.asked.codec() == FETCH;
    if (is_state) --fetching_[source_.channel_of_chunk[chunk]];
    if (!is_state && absl::IsFailedPrecondition(answer.status()) && part.fetches < kMostFetches) {
      part.step.reset();  // it was too slow: the answer is no longer kept
      return absl::OkStatus();
    }
    absl::Status status =
        absl::IsDeadlineExceeded(answer.status()) ? TooLateError(is_state) : answer.status();
    if (status.ok()) {
      status = CheckAnswer(answer->header, answer->payload.span(), part.asked, layout_);
    }
    if (status.ok() && answer->header.codec() == REPLAY) {
      status = absl::InvalidArgumentError("it asks for a replay, of a rank that comes back");
    }
    if (status.ok()) {
      if (!IsOfNewestProcess(chunk, answer->header.generation())) return absl::OkStatus();
      newest_step_ = std::max(newest_step_, answer->header.open_step());
      status = is_state ? Adopt(part, *answer) : Follow(part, *std::move(answer));
    }
    if (status.ok()) return status;
    return WithMessage(
        status,
        absl::StrFormat("%s of chunk %d, from aggregator %s: %s",
                        is_state ? "the state" : absl::StrFormat("step %d", part.asked.step()),
                        chunk, source_.channel_of_chunk[chunk]->target(), status.message()));
  }

  absl::Status TooLateError(bool is_state) const {
    const std::string timeout = absl::FormatDuration(source_.timeout);
    if (!is_state) {
      return absl::DeadlineExceededError(
          absl::StrFormat("the others' round has not closed in %s (exchange_timeout)", timeout));
    }
    return absl::DeadlineExceededError(absl::StrFormat(
        "no other worker has given it in %s (exchange_timeout): they do in their next round, for "
        "which that must be long enough",
        timeout));
  }

  // The others' schedule may say when the variance was frozen.
  // It is that of `step`, or of the one before.
  absl::Status Keep(const Schedule& schedule, uint64_t step) {
    const uint64_t begun = schedule.begun_steps();
    if (begun != step && begun != step + 1) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "the schedule is that after %d steps, wanted %d or %d", begun, step, step + 1));
    }
    schedules_[begun] = schedule;
    optimizer_.SetSchedule(schedules_.rbegin()->second);
    return absl::OkStatus();
  }

  absl::Status Adopt(Part& part, const Answer& answer) {
    if (answer.header.later_rates_size() != 1) {
      return absl::InvalidArgumentError("the state comes without the optimizer's schedule");
    }
    const StepRates& rates = answer.header.later_rates(0);
    absl::Status status = Keep(rates.schedule(), answer.header.step());
    if (!status.ok()) return status;
    optimizer_.SetState(answer.header.chunk(), answer.payload.span());
    part.step = answer.header.step();
    part.listens.clear();
    newest_step_ = std::max(newest_step_, *part.step);
    if (*part.step >= newest_state_step_) {
      newest_state_step_ = *part.step;
      newest_scales_ = rates.scales();
    }
    return absl::OkStatus();
  }

  absl::Status Follow(Part& part, Answer answer) {
    if (!part.step) return absl::OkStatus();  // it is to be fetched again
    // It was asked for before the target was known.
    if (target_ && *part.step >= *target_) return absl::OkStatus();
    if (answer.header.later_rates_size() != 1) {
      return absl::InvalidArgumentError("the answer does not say at which rates the others step");
    }
    const StepRates& rates = answer.header.later_rates(0);
    if (static_cast<uint32_t>(rates.groups_size()) < optimizer_.groups()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("the others step at rates for %d parameter groups, this worker has %d",
                          rates.groups_size(), optimizer_.groups()));
    }
    absl::Status status = optimizer_.CheckRates(RatesOf(rates));
    if (status.ok()) status = Keep(rates.schedule(), *part.step);
    if (!status.ok()) return status;
    // The newest schedule need not know of older freezes; that of the step itself does.
    optimizer_.SetSchedule(rates.schedule());
    const bool is_behind_freeze = IsBehindFreeze(part);
    optimizer_.SetSchedule(schedules_.rbegin()->second);
    if (is_behind_freeze) {
      LeaveBehindFreeze(part);
      return absl::OkStatus();
    }
    const uint32_t chunk = answer.header.chunk();
    optimizer_.EndFollowedStep(chunk, *part.step - 1, part.followed, rates.scales());
    part.followed = rates;
    part.listens.push_back({.header = part.asked,
                            .payload = std::make_shared<const Payload>(),
                            .round_codec = answer.header.codec(),
                            .answered = true,
                            .answer_crc32c = answer.header.payload_crc32c()});
    *part.listens.back().header.mutable_late_ranks() = answer.header.late_ranks();
    std::erase_if(part.listens, [&](const SentFrame& listen) {
      return listen.header.step() < answer.header.durable_step();
    });
    optimizer_.FollowStep((*part.step)++, rates);
    if (answer.header.codec() == SKIP) {
      optimizer_.TakeBack(chunk, /*payload=*/nullptr);
      optimizer_.SetSchedule(schedules_.rbegin()->second);
      return absl::OkStatus();
    }
    if (answer.header.codec() != optimizer_.codec()) {
      return absl::InvalidArgumentError(absl::StrFormat("the answer is %s, wanted %s",
                                                        CodecName(answer.header.codec()),
                                                        CodecName(optimizer_.codec())));
    }
    optimizer_.Apply(chunk, std::move(answer));
    optimizer_.SetSchedule(schedules_.rbegin()->second);
    return absl::OkStatus();
  }

  const ReplicaSource& source_;
  const Layout& layout_;
  Optimizer& optimizer_;
  std::vector<Part> parts_;                         // by chunk
  std::map<const Channel*, uint32_t> fetching_;     // chunks, of each aggregator
  uint64_t least_state_step_ = 0;                   // earlier states are behind a freeze
  std::map<const Channel*, uint64_t> generations_;  // of the newest process that has answered
  uint64_t newest_step_;                            // that an aggregator is known to have reached
  std::optional<uint64_t> target_;
  std::map<uint64_t, Schedule> schedules_;  // by begun_steps, of the steps that were heard of
  uint64_t newest_state_step_ = 0;          // of the states that came
  TensorScales newest_scales_;              // as that state has them
  // Shared with exchanges that may still be under way at the end.
  std::shared_ptr<Answers> inbox_;
};

}  // namespace

absl::StatusOr<Replica> FetchReplica(const ReplicaSource& source, const Layout& layout,
                                     Optimizer& optimizer) {
  return ReplicaFetch(source, layout, optimizer).Run();
}

}  // namespace signpost
