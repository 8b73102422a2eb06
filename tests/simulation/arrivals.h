// What the simulator knows of one shard's rounds and their deadline: which frames its aggregator
// had in time, or had to wait for, and so which ranks it may not call late.

#ifndef SIGNPOST_TESTS_SIMULATION_ARRIVALS_H_
#define SIGNPOST_TESTS_SIMULATION_ARRIVALS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "proto/aggregator.pb.h"

namespace signpost::simulation {

// A rank may be late whose frame comes after the deadline; or within it, if rounds do not wait for
// it, as one has closed without it, it has left, or it is another process, and nothing has come
// from it since. Where it is not known whether that is so, it may be late. Times are of the
// aggregator's clock.
class Arrivals {
 public:
  using Report = std::function<void(const std::string& violation)>;
  // `round_deadline` is infinite where rounds wait for all.
  Arrivals(absl::Duration round_deadline, Report report)
      : round_deadline_(round_deadline), report_(std::move(report)) {}

  // A process claims the rank. What the one before has sent may be dropped, and comes for nothing.
  void AddJoin(uint32_t rank, uint64_t rank_incarnation);
  void AddLeave(uint32_t rank) { there_since_.erase(rank); }
  // Handed to the aggregator's process of that incarnation. Whether it is the rank's first there.
  bool AddFrame(uint64_t incarnation, const FrameHeader& header, absl::Time now);
  // That one was not taken, which was the first or not.
  void RemoveFrame(uint64_t incarnation, const FrameHeader& header, bool is_first);
  // As the process makes it for a frame. Reports a rank that is not late.
  void AddAnswer(uint64_t incarnation, const FrameHeader& header, const AnswerHeader& answer,
                 absl::Time now);

 private:
  using Key = std::tuple<uint64_t, uint32_t, uint64_t>;  // epoch, chunk, step
  // In one incarnation.
  struct Round {
    absl::Time since;
    std::map<uint32_t, bool> is_in_time;  // by rank, of those whose frame has come
    bool is_answered = false;
  };

  bool IsInTime(uint32_t rank, const Round& round, absl::Time now) const;
  // Whether a round that nothing is known of yet may have closed without the rank.
  bool MayBeLeftOut(uint32_t rank, absl::Time now) const;
  void Begin(uint64_t incarnation);

  const absl::Duration round_deadline_;
  const Report report_;
  std::map<uint32_t, uint64_t> claims_;  // by rank: the incarnation that joined last
  uint64_t incarnation_ = 0;             // of the aggregator's process
  std::map<Key, std::map<uint64_t, Round>> rounds_;
  std::map<Key, Round*> open_;                  // of this incarnation, not answered
  std::map<uint32_t, absl::Time> there_since_;  // by rank, in this incarnation
};

}  // namespace signpost::simulation

#endif  // SIGNPOST_TESTS_SIMULATION_ARRIVALS_H_
