#include "tests/simulation/simulation.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/try_again.h"
#include "tests/forwarding_channel.h"
#include "tests/simulation/arrivals.h"
#include "tests/simulation/audit.h"
#include "tests/simulation/process.h"
#include "tests/simulation/scheduler.h"
#include "tests/simulation/sim_channel.h"
#include "tests/simulation/sim_disk.h"
#include "worker/variance_plan.h"
#include "worker/worker.h"

namespace signpost::simulation {
namespace {

constexpr uint64_t kMostDeaths = 3;  // of a job that begins anew with each
constexpr absl::Duration kJoinTimeout = absl::Minutes(10);
// After each death all may wait for a Join in vain.
constexpr absl::Duration kLongestJob = absl::Minutes(10 * (kMostDeaths + 2));
// Of all processes at once: longer than anybody waits for anybody.
constexpr absl::Duration kLongestTogether = absl::Minutes(20);
// Of one process, where others are to wait for it, and not to give up for good who is gone.
constexpr absl::Duration kLongestAlone = absl::Seconds(2);
constexpr absl::Duration kExchangeTimeout = absl::Minutes(1);

// What is trained; a function of the seed.
struct JobPlan {
  explicit JobPlan(uint64_t seed) : random(seed) {
    workers = 2 + Below(3);
    shards = 1 + Below(3);
    steps = 8 + Below(17);
    optimizer.freeze_step = 1 + Below(steps);
    optimizer.warm_up_codec = Below(3) == 0 ? BFLOAT16 : FLOAT32;
    if (Below(2) == 0) {
      bad_step = Below(steps);
      bad_rank = Below(workers);
    }
    if (Below(2) == 0) chunk_elements = 32;
    if (Below(5) < 2) {
      min_workers = std::max<uint32_t>(1, workers - 1 - Below(2));
      round_deadline = absl::Milliseconds(4 + Below(30));
    }
    if (min_workers > 0 && min_workers < workers && Below(2) == 0) {
      workers_die = true;
      steps += 40;
    }
    if (Below(3) == 0) optimizer.variance_refresh_interval = 2 + Below(6);
    if (Below(4) == 0) optimizer.freeze_step = OptimizerOptions::kAuto;
    overlaps = Below(2) == 0;
    if (overlaps && Below(2) == 0) {
      // Two tensors with more chunks than a window each, which may fill those of two ranks.
      chunk_elements = 16;
      tensors.push_back(150);
    }
    if (Below(3) == 0) optimizer.lamb.emplace();
    const bool may_choose = !optimizer.lamb;
    if (may_choose && Below(3) == 0) optimizer.codec = kOthers[Below(std::size(kOthers))];
    if (Below(4) == 0) optimizer.warm_up_codec = kOthers[2 + Below(3)];
    if (!optimizer.lamb && Below(3) == 0) ChooseZeroOneAdam();
    if (may_choose && std::isnan(bad_gradient) && Below(5) == 0) optimizer.codec = CUSTOM;
    if (!optimizer.zero_one && Below(8) == 0) optimizer.warm_up_codec = CUSTOM;
    random.seed(~seed);  // what came later leaves half of the seeds' jobs as they were
    ChooseWhatIsRarer();
    if (workers > 1 && min_workers == 0) workers_die = Below(4) == 0;
    may_lose_state = workers_die && Below(3) == 0;
    stands_still = Below(4) == 0;
    if (Below(4) == 0 && !optimizer.zero_one && optimizer.bias_correction) {
      optimizer.variance_refresh_interval = OptimizerOptions::kAuto;
    }
  }

  // Whether the variance follows the gradients.
  bool Follows() const { return optimizer.VarianceFollows(); }

  // Whether others go on without a worker.
  bool is_elastic() const { return min_workers > 0; }

  static constexpr Codec kOthers[] = {FLOAT32, BFLOAT16, FLOAT16, INT8, INT4};

  void ChooseWhatIsRarer() {
    if (!optimizer.zero_one && Below(8) == 0) optimizer.warm_up_codec = ONE_BIT;
    if (!optimizer.zero_one && Below(8) == 0) optimizer.freeze_step = OptimizerOptions::kNever;
    if (Below(8) == 0) optimizer.bias_correction = false;
    if (optimizer.freeze_step > 1 && Below(6) == 0) {
      optimizer.bias_correction = false;
      optimizer.variance_floor = 0;
      optimizer.as_deepspeed = true;
    }
    if (min_workers == 0 && Below(8) == 0) {
      workers = 1;
      bad_rank = 0;
    }
    if (optimizer.lamb && Below(2) == 0) {
      optimizer.codec = Below(4) == 0 ? CUSTOM : kOthers[Below(std::size(kOthers))];
    }
    const bool has_variance_codec = optimizer.zero_one || optimizer.variance_refresh_interval > 0;
    if (has_variance_codec && Below(3) < 2) {
      const uint64_t rare = Below(8);
      optimizer.variance_codec = rare == 0   ? CUSTOM
                                 : rare == 1 ? ONE_BIT
                                             : kOthers[Below(std::size(kOthers))];
    }
  }

  void ChooseZeroOneAdam() {
    optimizer = {.freeze_step = 1 + Below(steps), .codec = optimizer.codec};
    optimizer.zero_one = {.var_update_scaler = static_cast<uint32_t>(1 + Below(4)),
                          .local_step_scaler = 1 + Below(6),
                          .local_step_clipper = static_cast<uint32_t>(1 + Below(5))};
    // What is not finite a local step leaves alone; what is too large for a scale ends in a skip.
    const bool may_be_large = optimizer.codec == ONE_BIT && bad_step >= optimizer.freeze_step;
    if (may_be_large && Below(2) == 0) bad_gradient = 0x1p59f;
  }

  uint64_t Below(uint64_t n) { return random() % n; }

  std::mt19937_64 random;
  uint32_t workers, shards;
  uint64_t steps;
  OptimizerOptions optimizer;
  uint64_t bad_step = std::numeric_limits<uint64_t>::max();  // with a gradient that is not packed
  uint32_t bad_rank = 0;
  float bad_gradient = std::numeric_limits<float>::quiet_NaN();
  uint32_t min_workers = 0;
  absl::Duration round_deadline;
  bool workers_die = false;
  bool may_lose_state = false;   // the last that has it may die; of an elastic job
  bool stands_still = false;     // or some of its processes do
  bool overlaps = false;         // gradients come one by one, in any order, in most steps
  uint32_t chunk_elements = 64;  // 7 chunks, all of them under way at once; or 13, more than that
  std::vector<size_t> tensors = {37, 8, 1, 300, 64};
};

// Which all ranks share, by the element of a tensor; the largest has as many. Sines of each step's
// own took longer than all that is simulated.
std::array<float, 300> MakeDrift() {
  std::array<float, 300> drift;
  for (size_t i = 0; i < drift.size(); ++i) drift[i] = 0.3f * std::sin(static_cast<float>(i));
  return drift;
}

// Of one rank and step: noise around the drift.
std::vector<std::vector<float>> GradientsOf(const JobPlan& plan, uint32_t rank, uint64_t step) {
  static const std::array<float, 300> drift = MakeDrift();
  std::mt19937 random(1 + rank * 1000 + static_cast<uint32_t>(step));
  std::uniform_real_distribution<float> noise(-1, 1);
  std::vector<std::vector<float>> gradients;
  for (const size_t elements : plan.tensors) {
    std::vector<float>& gradient = gradients.emplace_back(elements);
    for (size_t i = 0; i < elements; ++i) {
      gradient[i] = noise(random) + drift.at(i);
    }
  }
  if (rank == plan.bad_rank && step == plan.bad_step) {
    gradients[3][200] = plan.bad_gradient;
  }
  return gradients;
}

double LearningRateOf(uint64_t step) { return 0.01 / (1 + step); }

// What a checkpoint has of a rank.
struct Saved {
  uint32_t parameters_crc32c = 0;
  std::vector<float> error;
};
using SavedRanks = std::map<uint32_t, Saved>;  // by rank

// What one simulation runs of the job.
struct Part {
  uint64_t from = 0;                                      // steps done before
  uint64_t until = std::numeric_limits<uint64_t>::max();  // steps done; at most all of them
  Disk* save_to = nullptr;                                // at its end
  Disk* resume_from = nullptr;
  const SavedRanks* saved = nullptr;  // what that has
};

// A worker's process, as far as others can tell.
struct Life : Caller {
  bool returns = false;  // in the place of another: it has the rank, and gets the state until
  bool has_joined = false;
  bool starts_again = false;  // after an error
  bool is_stepping = false;
  std::vector<uint64_t> served_by;  // by shard: what answered all of its last step
};

// That tells of what happens to a worker.
class WatchedChannel final : public testing::ForwardingChannel {
 public:
  struct Events {
    std::function<void()> on_return, on_answer;
  };
  WatchedChannel(std::unique_ptr<Channel> inner, Events events)
      : ForwardingChannel(std::move(inner)), events_(std::move(events)) {}

  absl::StatusOr<JoinResponse> Join(const JoinRequest& request, absl::Time deadline,
                                    CheckMayWait check_may_wait) override {
    absl::StatusOr<JoinResponse> response =
        ForwardingChannel::Join(request, deadline, check_may_wait);
    if (response.ok() && response->returning()) events_.on_return();
    return response;
  }

  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                absl::Time deadline, ExchangeDone done) override {
    auto shared = std::make_shared<ExchangeDone>(std::move(done));
    ForwardingChannel::Exchange(
        header, std::move(payload), deadline,
        [shared, on_answer = events_.on_answer](absl::StatusOr<Answer> answer) {
          on_answer();
          (*shared)(std::move(answer));
        });
  }

 private:
  const Events events_;
};

class Simulation {
 public:
  Simulation(const JobPlan& plan, uint64_t seed, const Digests* expected, const Part& part = {})
      : plan_(plan),
        scheduler_(seed),
        expected_(expected),
        part_(part),
        until_(std::min(part.until, plan.steps)),
        tells_late_ranks_(seed % 2 == 0),
        training_(plan.workers),
        audit_(plan.workers, plan.optimizer, LearningRateOf,
               [this](const std::string& violation) { Report(violation); }),
        has_trained_(plan.workers, std::vector<bool>(plan.steps)) {
    for (uint32_t rank = 0; rank < plan.workers; ++rank) clocks_.emplace_back(scheduler_);
    for (uint32_t shard = 0; shard < plan.shards; ++shard) {
      arrivals_.emplace_back(plan.is_elastic() ? plan.round_deadline : absl::InfiniteDuration(),
                             [this](const std::string& violation) { Report(violation); });
      processes_.push_back(std::make_unique<Process>(
          scheduler_, ShardId{shard, plan.shards}, tells_late_ranks_,
          [this, shard](const std::string& connection) {
            return IsConnected(*processes_[shard], connection);
          },
          [this](const std::string& violation) { Report(violation); }));
    }
  }

  void Run() {
    for (auto& process : processes_) process->Start();
    if (expected_ != nullptr) PlanFaults();
    for (uint32_t rank = 0; rank < plan_.workers; ++rank) {
      scheduler_.Spawn(clocks_[rank], [this, rank] {
        ProcessClock& clock = clocks_[rank];
        const absl::Time end = clock.Now() + kLongestJob;
        bool comes_back = Train(rank, /*is_first=*/true);
        while (comes_back) {
          if (clock.Now() > end) Report(absl::StrCat("rank ", rank, " starts for ever"));
          clock.Sleep(scheduler_.Between(absl::ZeroDuration(), absl::Milliseconds(60)));
          comes_back = result_.violations.empty() && Train(rank, /*is_first=*/false);
        }
        if (--training_ > 0) return;
        for (auto& process : processes_) process->Retire();
      });
    }
    scheduler_.Run();
    for (auto& process : processes_) {
      CheckOver(*process);
      result_.bit_flips += process->bit_flips();
    }
    // What is before the first step of a job that resumes is another simulation's.
    if (!result_.violations.empty() || part_.from > 0 || state_is_lost_) return;
    audit_.Check(until_, [this](uint32_t rank, uint64_t step) {
      return has_trained_[rank][step] ? GradientsAt(rank, step) : std::vector<std::vector<float>>();
    });
  }

  Digests digests() const {
    Digests digests;
    for (const auto& [step, digest] : digests_) digests.push_back(digest);
    return digests;
  }
  const SimulationResult& result() const { return result_; }
  const SavedRanks& saved() const { return saved_; }  // what was to be saved
  bool is_saved() const { return is_saved_; }
  const Audit& audit() const { return audit_; }

 private:
  // One is enough: what goes wrong after it may take for ever. All processes end soon.
  void Report(const std::string& violation) {
    if (!result_.violations.empty()) return;
    result_.violations.push_back(violation);
    scheduler_.After(absl::ZeroDuration(), [this] {
      for (const auto& [rank, life] : lives_) life->Die();
    });
  }

  // Made once: the audit asks for them with each chunk.
  const std::vector<std::vector<float>>& GradientsAt(uint32_t rank, uint64_t step) {
    const auto [gradients, is_new] = gradients_.try_emplace({rank, step});
    if (is_new) gradients->second = GradientsOf(plan_, rank, step);
    return gradients->second;
  }

  // The job as one process of a rank runs it. Whether another is to come in its place.
  bool Train(uint32_t rank, bool is_first) {
    std::vector<std::vector<float>> values;
    std::vector<Parameter> parameters;
    for (size_t i = 0; i < plan_.tensors.size(); ++i) {
      values.emplace_back(plan_.tensors[i], 0.5f);
    }
    for (size_t i = 0; i < values.size(); ++i) {
      parameters.push_back(
          {absl::StrCat("tensor", i), {values[i].size()}, absl::MakeSpan(values[i])});
    }
    const auto life = std::make_shared<Life>();
    if (expected_ != nullptr && plan_.workers_die && scheduler_.OneIn(10)) {
      scheduler_.After(
          scheduler_.Between(absl::ZeroDuration(), absl::Milliseconds(40)),
          [this, rank, life, serving = Incarnations()] { DieInJoin(rank, *life, serving); });
    }
    lives_[rank] = life;
    const absl::Cleanup end = [&] {
      life->is_gone = true;
      life->calls.clear();
      lives_.erase(rank);
      Disconnect(rank);
    };
    away_ranks_.insert(rank);  // until it has the state
    std::vector<std::unique_ptr<Channel>> channels;
    for (uint32_t shard = 0; shard < processes_.size(); ++shard) {
      Process& process = *processes_[shard];
      channels.push_back(std::make_unique<WatchedChannel>(
          std::make_unique<SimChannel>(Wire{scheduler_, process, links_[{rank, &process}], life,
                                            clocks_[rank], audit_, arrivals_[shard],
                                            tells_late_ranks_}),
          WatchedChannel::Events{.on_return =
                                     [this, rank, shard, life] {
                                       life->returns = true;
                                       losses_.erase({shard, rank});
                                     },
                                 .on_answer = [this, shard] { NoteRoundsWithoutTheDead(shard); }}));
    }
    absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::Join(
        {.job = "simulated",
         .rank = rank,
         .world_size = plan_.workers,
         .block_elements = 16,
         .chunk_elements = plan_.chunk_elements,
         .join_timeout = kJoinTimeout,
         .exchange_timeout = kExchangeTimeout,
         .round_deadline = plan_.round_deadline,
         .min_workers = plan_.min_workers,
         .codec_library = kCodecLibrary,
         .codec_options = kCodecOptions,
         .clock = &clocks_[rank]},
        plan_.optimizer, parameters, std::move(channels), {.checkpoints = part_.resume_from});
    life->has_joined = true;
    if (life->is_gone) return true;
    if (!worker.ok()) {
      const bool is_over = plan_.is_elastic() && finished_ranks_ > 0;
      if (!is_over && IsToStartAgain(worker.status())) return true;
      if (!is_over) Report(absl::StrCat("join: ", worker.status().ToString()));
      return false;
    }
    // A first process as well, when the answer to its Join is lost and the others go on.
    const bool begins_anew = !plan_.is_elastic() || state_is_lost_ || died_before_first_step_;
    if (!is_first && !(*worker)->returned() && !begins_anew)
      Report("a worker comes back as if it had been there");
    away_ranks_.erase(rank);
    if ((*worker)->returned()) {
      ++result_.returned_workers;
      audit_.SetReturn(rank, (*worker)->steps());
    }
    if ((*worker)->returned() && scheduler_.OneIn(4) && MayBeAway()) {
      GiveUp(rank, **worker);
      return true;
    }
    audit_.SetLayout((*worker)->layout());
    if (part_.saved != nullptr && !(*worker)->returned()) CheckResumed(rank, **worker);
    bool goes_on = true;
    while ((*worker)->steps() < until_ && goes_on) goes_on = TrainStep(rank, **worker, life);
    if (life->is_gone || (!goes_on && life->starts_again)) return true;
    if (goes_on) {
      audit_.SetFreezeStep((*worker)->optimizer().schedule().freeze_step());
      audit_.SetError(rank, (*worker)->optimizer().error());
    }
    if (part_.save_to != nullptr && goes_on) Save(rank, **worker);
    if (goes_on) ++finished_ranks_;
    // The last to leave may need what the first took with it.
    if (scheduler_.OneIn(2)) KillSoon();
    const absl::Status left = (*worker)->Leave();
    if (!left.ok()) Report(absl::StrCat("leave: ", left.ToString()));
    return !goes_on && plan_.workers_die;
  }

  void Save(uint32_t rank, Worker& worker) {
    const absl::Span<const float> error = worker.optimizer().error();
    saved_[rank] = {worker.ParametersCrc32c(), {error.begin(), error.end()}};
    if (scheduler_.OneIn(3)) KillSoon();
    const absl::Status status = worker.Checkpoint(*part_.save_to);
    if (status.ok()) is_saved_ = true;
    // It needs all ranks, of which some may not be there.
    const bool may_fail = absl::IsAborted(status) && plan_.is_elastic();
    if (!status.ok() && !may_fail) Report(absl::StrCat("checkpoint: ", status.ToString()));
  }

  void CheckResumed(uint32_t rank, Worker& worker) {
    const Saved& saved = part_.saved->at(rank);
    if (worker.ParametersCrc32c() != saved.parameters_crc32c) {
      Report(absl::StrFormat("rank %d resumes with other parameters than it saved", rank));
    }
    if (worker.optimizer().error() != absl::MakeConstSpan(saved.error)) {
      Report(absl::StrFormat("rank %d resumes with another error than it saved", rank));
    }
  }

  // Whether an error that a rank's program ends with is one that starting it again mends.
  bool IsToStartAgain(const absl::Status& status) const {
    const bool has_reason = plan_.is_elastic()
                                ? state_is_lost_ || died_before_first_step_
                                : result_.dead_workers > 0 || result_.longest_standstills > 0;
    // After an aggregator's restart it takes a while until a rank counts as gone. Who hears of
    // nothing else waits for its timeout; so does one that joins an elastic job where it is no
    // longer known that nobody has trained.
    const bool may_be_late = (died_before_first_step_ && plan_.is_elastic()) ||
                             !absl::StrContains(status.message(), "could not join");
    return has_reason && (IsTryAgain(status) || absl::IsAlreadyExists(status) ||
                          (absl::IsDeadlineExceeded(status) && may_be_late));
  }

  // Whether an elastic job can do without one more, or begin anew.
  bool MayBeAway() const {
    const bool is_last = away_ranks_.size() + 1 == plan_.workers;
    const bool others_suffice = plan_.workers - away_ranks_.size() > plan_.min_workers;
    // A state that is asked for where variances are brought up to date is given in the next round,
    // which then waits for those that wait for states: all may take longer than anybody waits.
    const bool may_be_few = plan_.optimizer.variance_refresh_interval == 0;
    return (others_suffice || may_be_few) && (!is_last || plan_.may_lose_state);
  }

  // Of a worker that has come back: it is told to stop before its first frame.
  void GiveUp(uint32_t rank, Worker& worker) {
    ++result_.given_up_workers;
    away_ranks_.insert(rank);
    if (away_ranks_.size() == plan_.workers) LoseState();
    if (scheduler_.OneIn(2)) KillSoon();
    const absl::Status left = worker.Leave();
    if (!left.ok()) Report(absl::StrCat("leave: ", left.ToString()));
  }

  // The rank's process dies in the middle of its step, if it may.
  void Die(uint32_t rank, uint64_t steps, Life& life) {
    if (!life.is_stepping || clocks_[rank].stands_still()) return;
    if (!plan_.is_elastic()) {
      // All begin anew: not when one may be done.
      if (steps + 3 < until_ && result_.dead_workers < kMostDeaths) Kill(rank, life);
      return;
    }
    const bool is_early = steps + 30 < until_;
    if (!is_early || !MayBeAway()) return;
    const bool is_last = away_ranks_.size() + 1 == plan_.workers;
    if (!Lose(rank, life.served_by)) return;
    Kill(rank, life);
    if (is_last) LoseState();
  }

  std::vector<uint64_t> Incarnations() const {
    std::vector<uint64_t> incarnations;
    for (const auto& process : processes_) incarnations.push_back(process->incarnation());
    return incarnations;
  }

  // From now on no aggregator ends that may need the rank's frames. Whether that can be: one that
  // served it may have ended.
  bool Lose(uint32_t rank, const std::vector<uint64_t>& served_by) {
    for (size_t shard = 0; shard < processes_.size(); ++shard) {
      const Process& process = *processes_[shard];
      const bool is_safe = process.is_up() && !process.is_stopping() &&
                           !process.disk().will_die() && !process.disk().died() &&
                           !served_by.empty() && process.incarnation() == served_by[shard];
      if (!is_safe) return false;
    }
    for (uint32_t shard = 0; shard < processes_.size(); ++shard) losses_[{shard, rank}] = {};
    return true;
  }

  // Before it has anything that others lack, but for its error in a job that resumes.
  void DieInJoin(uint32_t rank, Life& life, const std::vector<uint64_t>& serving) {
    if (life.is_gone || life.has_joined || result_.dead_workers >= kMostDeaths) return;
    if (clocks_[rank].stands_still()) return;
    const bool may_be_missed = plan_.is_elastic() && part_.resume_from != nullptr;
    if (may_be_missed && !Lose(rank, serving)) return;
    died_before_first_step_ = died_before_first_step_ || digests_.empty();
    Kill(rank, life);
  }

  void Kill(uint32_t rank, Life& life) {
    ++result_.dead_workers;
    away_ranks_.insert(rank);
    life.Die();
    Disconnect(rank);
    // Others go on without it, and take another in, through the restarts of aggregators.
    for (uint64_t i = scheduler_.Below(6); i > 0; --i) {
      const absl::Duration latest = absl::Milliseconds(scheduler_.OneIn(3) ? 2000 : 200);
      scheduler_.After(scheduler_.Between(absl::ZeroDuration(), latest),
                       [this] { Disturb(scheduler_.Below(processes_.size())); });
    }
  }

  // All ranks are away at once: the job begins anew.
  void LoseState() {
    state_is_lost_ = true;
    digests_.clear();
  }

  // An answer of the shard has come.
  void NoteRoundsWithoutTheDead(uint32_t shard) {
    for (auto& [key, loss] : losses_) {
      const auto [its_shard, rank] = key;
      if (its_shard != shard || loss.saves) continue;
      if (!audit_.HasClosedTwiceWithout(rank, shard, processes_.size())) continue;
      loss.saves = processes_[shard]->next_save();
    }
  }

  // Whether the shard's process could end without frames being needed that died with a worker, or
  // that one has which stands still. One that stands still itself goes on before it ends.
  bool MayDie(uint32_t shard) const {
    if (processes_[shard]->clock().stands_still()) return false;
    return absl::c_all_of(losses_, [&](const auto& entry) {
      const auto& [key, loss] = entry;
      return key.first != shard || (loss.saves && processes_[shard]->saves() >= *loss.saves);
    });
  }
  // Even if its newest snapshot were damaged then, which alone knows who has left.
  bool MayLoseSnapshot(uint32_t shard) const {
    if (finished_ranks_ > 0) return false;
    const auto loss = losses_.lower_bound({shard, 0});
    return loss == losses_.end() || loss->first.first != shard;
  }

  // Who still gets its state tells of no rounds that it has followed: a third that was late in one
  // may now be in time.
  bool MayLoseLateRanks() const {
    return plan_.workers == 2 || absl::c_none_of(lives_, [](const auto& entry) {
             return entry.second->returns && !entry.second->has_joined;
           });
  }

  bool IsConnected(const Process& process, const std::string& connection) const {
    return absl::c_any_of(links_, [&](const auto& entry) {
      const auto& [key, link] = entry;
      return key.second == &process && !link.is_cut && link.connection == connection &&
             link.incarnation == process.incarnation();
    });
  }
  // As the end of a rank's process does.
  void Disconnect(uint32_t rank) {
    for (auto& process : processes_) links_[{rank, process.get()}].Disconnect();
  }

  void KillSoon() {
    if (expected_ == nullptr) return;
    scheduler_.After(scheduler_.Between(absl::ZeroDuration(), absl::Milliseconds(10)), [this] {
      const uint32_t shard = scheduler_.Below(processes_.size());
      if (!MayDie(shard)) return;
      ++result_.kills;
      if (!losses_.empty()) ++result_.kills_without_the_dead;
      processes_[shard]->Kill();
    });
  }

  // Whether the rank can go on.
  // Tells the audit what each round does that the rank's schedule knows of: the ranks that took
  // part in a round may be dead.
  void TellRefreshes(const Schedule& schedule) {
    const bool is_frozen = schedule.begun_steps() > schedule.freeze_step();
    if (schedule.freeze_step() == 0 || !is_frozen) return;
    for (uint64_t round = schedule.refreshed_step(); round < schedule.begun_steps(); ++round) {
      audit_.SetKind(round, VariancePlan::KindOf(schedule, round));
    }
  }

  bool TrainStep(uint32_t rank, Worker& worker, const std::shared_ptr<Life>& life) {
    clocks_[rank].Sleep(scheduler_.Between(absl::ZeroDuration(), absl::Milliseconds(5)));
    if (scheduler_.OneIn(6)) {
      clocks_[rank].Sleep(scheduler_.Between(absl::ZeroDuration(), absl::Milliseconds(80)));
    }
    const uint64_t first = worker.steps();
    has_trained_[rank][first] = true;
    const auto& gradients = GradientsAt(rank, first);
    const std::vector<Gradient> spans(gradients.begin(), gradients.end());
    std::vector<uint64_t> serving = Incarnations();
    if (expected_ != nullptr && plan_.workers_die && scheduler_.OneIn(15)) {
      scheduler_.After(scheduler_.Between(absl::ZeroDuration(), absl::Milliseconds(10)),
                       [this, rank, first, life] { Die(rank, first, *life); });
    }
    life->is_stepping = true;
    // A beta2 that lets a job which looks for its freeze step find it soon.
    const GroupRates rates = {
        .learning_rate = LearningRateOf(first), .weight_decay = 0.1, .beta2 = 0.75};
    const bool overlaps = plan_.overlaps && !scheduler_.OneIn(4);
    const absl::StatusOr<StepReport> report =
        overlaps ? OverlappedStep(rank, worker, spans, rates) : worker.Step(spans, {rates});
    life->is_stepping = false;
    if (plan_.Follows()) TellRefreshes(worker.optimizer().schedule());
    const bool is_local = report.ok() && report->codec == CODEC_UNSPECIFIED;
    if (!is_local) life->served_by = std::move(serving);
    life->calls.clear();
    if (life->is_gone) return false;
    if (!report.ok()) {
      life->starts_again = IsToStartAgain(report.status());
      // The answers of four rounds are always kept; of the one after, parts may be there.
      const bool is_too_late = absl::StrContains(report.status().message(), "no longer kept") &&
                               !digests_.empty() && digests_.rbegin()->first >= first + 3;
      away_ranks_.insert(rank);
      // Those that were further may be dead: then nobody has the state.
      if (is_too_late && away_ranks_.size() == plan_.workers) LoseState();
      if (life->starts_again) return false;
      ++result_.lost_ranks;
      // Rounds stand still when too few are left, until some are back: if there is one to help
      // them.
      const bool others_suffice = away_ranks_.size() <= plan_.workers - plan_.min_workers;
      if (!is_too_late || (!others_suffice && !plan_.workers_die)) {
        Report(absl::StrFormat("rank %d: %s", rank, report.status().ToString()));
      }
      return false;
    }
    result_.replayed_frames += report->replayed_frames;
    result_.skipped_rounds += report->skipped.size();
    result_.late_rounds += report->late_rounds;
    result_.steps_caught_up += report->steps_caught_up;
    // After a local step each rank has its own.
    CheckDigest(rank, report->step, worker.is_synchronised() ? worker.ParametersCrc32c() : 0);
    if (scheduler_.OneIn(12)) KillSoon();
    return true;
  }

  // With gradients in an order of its own, and time between them.
  absl::StatusOr<StepReport> OverlappedStep(uint32_t rank, Worker& worker,
                                            const std::vector<Gradient>& gradients,
                                            const GroupRates& rates) {
    std::vector<size_t> order(gradients.size());
    std::iota(order.begin(), order.end(), 0);
    for (size_t left = order.size(); left > 1; --left) {
      std::swap(order[left - 1], order[scheduler_.Below(left)]);
    }
    const uint32_t digest = worker.ParametersCrc32c();
    absl::Status status = worker.BeginStep({rates});
    for (const size_t tensor : order) {
      if (!status.ok()) return status;
      if (scheduler_.OneIn(2)) {
        clocks_[rank].Sleep(scheduler_.Between(absl::ZeroDuration(), absl::Milliseconds(4)));
      }
      status = worker.GradientReady(tensor, gradients[tensor]);
    }
    if (!status.ok()) return status;
    if (worker.ParametersCrc32c() != digest) Report("parameters change in the middle of a step");
    return worker.FinishStep();
  }

  void CheckDigest(uint32_t rank, uint64_t step, uint32_t digest) {
    const uint32_t others = digests_.try_emplace(step, digest).first->second;
    if (digest != others) {
      Report(absl::StrFormat("rank %d: step %d gives %08x, on another rank it gave %08x", rank,
                             step, digest, others));
    }
    if (expected_ == nullptr || plan_.is_elastic() || digest == (*expected_)[step]) return;
    Report(absl::StrFormat("rank %d: step %d gives %08x, undisturbed it gives %08x", rank, step,
                           digest, (*expected_)[step]));
  }

  // Faults, until a time at which most jobs are over. Afterwards everything heals.
  void PlanFaults() {
    for (uint32_t shard = 0; shard < processes_.size(); ++shard) {
      Process* const process = processes_[shard].get();
      for (uint32_t rank = 0; rank < plan_.workers; ++rank) {
        Link& link = links_[{rank, process}];
        if (scheduler_.OneIn(2)) link.drop_one_in = 4 + scheduler_.Below(40);
        if (scheduler_.OneIn(2)) link.repeat_one_in = 2 + scheduler_.Below(20);
        for (uint64_t i = scheduler_.Below(3); i > 0; --i) {
          During(AtSomeTime(), scheduler_.Between(absl::Milliseconds(1), absl::Milliseconds(80)),
                 [&link](bool cut) { link.is_cut = cut; });
        }
      }
      for (uint64_t i = scheduler_.Below(12); i > 0; --i) {
        scheduler_.After(AtSomeTime(), [this, shard] { Disturb(shard); });
      }
      if (scheduler_.OneIn(3)) {
        During(AtSomeTime(), scheduler_.Between(absl::Milliseconds(5), absl::Milliseconds(100)),
               [process](bool full) { process->disk().set_full(full); });
      }
    }
    if (!plan_.stands_still) return;
    for (uint64_t i = 1 + scheduler_.Below(3); i > 0; --i) {
      scheduler_.After(AtSomeTime(), [this] { StandStill(); });
    }
  }

  // One process of the job, or all of it.
  void StandStill() {
    const bool is_short = scheduler_.OneIn(2);
    absl::Duration longest_alone = kLongestAlone;
    if (scheduler_.OneIn(4) && MayTimeOut()) longest_alone = 3 * kExchangeTimeout;
    // Who is gone for longer is not waited for in a checkpoint.
    if (part_.save_to != nullptr) longest_alone = kRestartGrace / 2;
    const auto draw = [&](absl::Duration longest) {
      return scheduler_.Between(absl::Milliseconds(1), is_short ? absl::Milliseconds(60) : longest);
    };
    switch (scheduler_.Below(3)) {
      case 0:
        ++result_.job_standstills;
        return StandStillTogether(draw(kLongestTogether));
      case 1:
        return LetWorkerStandStill(scheduler_.Below(plan_.workers), draw(longest_alone));
      default:
        ++result_.aggregator_standstills;
        StandStillAlone(processes_[scheduler_.Below(processes_.size())]->clock(),
                        draw(longest_alone));
    }
  }

  // Whether the others may give up, and begin the job anew: not when one may be done.
  bool MayTimeOut() const {
    if (plan_.is_elastic() || result_.longest_standstills == kMostDeaths) return false;
    const uint64_t steps = digests_.empty() ? 0 : digests_.rbegin()->first + 1;
    const auto& zero_one = plan_.optimizer.zero_one;
    const uint64_t local_steps = zero_one ? zero_one->local_step_clipper : 0;
    return steps + local_steps + 3 < until_;
  }

  void LetWorkerStandStill(uint32_t rank, absl::Duration length) {
    // For longer an aggregator that is started again meanwhile does not wait for its frames.
    const bool is_missed = plan_.is_elastic() && length > kRestartGrace / 2;
    const auto life = lives_.find(rank);
    if (is_missed && (life == lives_.end() || !Lose(rank, life->second->served_by))) {
      return scheduler_.After(scheduler_.Between(absl::ZeroDuration(), absl::Milliseconds(20)),
                              [this, rank, length] { LetWorkerStandStill(rank, length); });
    }
    ++result_.worker_standstills;
    StandStillAlone(clocks_[rank], length);
    if (!is_missed) return;
    clocks_[rank].Receive([this, rank] {
      for (uint32_t shard = 0; shard < processes_.size(); ++shard) losses_.erase({shard, rank});
    });
  }

  // The others give it up where that takes long.
  void StandStillAlone(ProcessClock& clock, absl::Duration length) {
    if (clock.stands_still()) return;
    if (length > kLongestAlone) ++result_.longest_standstills;
    clock.StandStill(length);
    if (length < kFailureTimeout) return;
    scheduler_.After(kFailureTimeout, [this, &clock] {
      for (uint32_t rank = 0; rank < plan_.workers; ++rank) {
        for (const auto& process : processes_) {
          const bool is_one_of_both = &clock == &clocks_[rank] || &clock == &process->clock();
          if (is_one_of_both) LoseConnection(rank, *process);
        }
      }
    });
  }

  // Where that takes long, whoever goes on looks at the time before it looks at what has come.
  void StandStillTogether(absl::Duration length) {
    const auto stand_still = [&](ProcessClock& clock) {
      scheduler_.After(scheduler_.Between(absl::ZeroDuration(), absl::Milliseconds(1)),
                       [&clock, length] { clock.StandStill(length); });
    };
    for (ProcessClock& clock : clocks_) stand_still(clock);
    for (const auto& process : processes_) stand_still(process->clock());
    if (length < kFailureTimeout) return;
    scheduler_.After(kFailureTimeout, [this] {
      for (uint32_t rank = 0; rank < plan_.workers; ++rank) {
        for (const auto& process : processes_) {
          if (scheduler_.OneIn(2)) LoseConnection(rank, *process);
        }
      }
    });
  }

  // The worker or the aggregator gives it up.
  void LoseConnection(uint32_t rank, Process& process) {
    Link& link = links_[{rank, &process}];
    link.Disconnect();
    const auto life = lives_.find(rank);
    if (life != lives_.end()) life->second->MakeAgain(link);
  }

  void Disturb(uint32_t shard) {
    Process& process = *processes_[shard];
    const uint64_t kind = scheduler_.Below(4);
    if (!MayDie(shard)) return;
    if (!losses_.empty()) ++result_.kills_without_the_dead;
    switch (kind) {
      case 0:
        ++result_.stops;
        return process.Stop();
      case 1:
        ++result_.kills;
        return process.KillAndFlipBit(MayLoseSnapshot(shard), MayLoseLateRanks());
      default:
        ++result_.kills_while_saving;
        if (process.is_up()) process.KillWhileSaving();
    }
  }

  absl::Duration AtSomeTime() {
    return scheduler_.Between(absl::ZeroDuration(), absl::Milliseconds(25) * (until_ - part_.from));
  }

  void During(absl::Duration begin, absl::Duration length, std::function<void(bool)> set) {
    scheduler_.After(begin, [set] { set(true); });
    scheduler_.After(begin + length, [set] { set(false); });
  }

  void CheckOver(Process& process) {
    if (!process.is_up() || !away_ranks_.empty()) return;
    const StatusResponse status = process.aggregator().Status({});
    if (status.jobs_size() != 0) {
      Report(absl::StrCat("the job is still there: ", status.ShortDebugString()));
    }
  }

  const JobPlan& plan_;
  Scheduler scheduler_;
  const Digests* const expected_;  // null: nothing fails
  const Part part_;
  const uint64_t until_;  // steps done at the end
  // Frames tell of late ranks what is written down of them too, and either must do alone.
  const bool tells_late_ranks_;
  std::map<std::pair<uint32_t, Process*>, Link> links_;
  std::deque<ProcessClock> clocks_;  // by rank, of all its processes; channels have references
  std::deque<Arrivals> arrivals_;    // by shard; likewise
  std::vector<std::unique_ptr<Process>> processes_;
  std::map<uint64_t, uint32_t> digests_;             // by step
  std::set<uint32_t> away_ranks_;                    // dead, lost, or not there yet
  std::map<uint32_t, std::shared_ptr<Life>> lives_;  // by rank
  // By shard and rank: frames that died with a worker, until another is welcomed in its place; or
  // that one has which stands still, until it goes on.
  struct Loss {
    // Of the shard's process, so many that none of the rank's frames is needed: two rounds had
    // closed without it before the last one of them began.
    std::optional<uint64_t> saves;
  };
  std::map<std::pair<uint32_t, uint32_t>, Loss> losses_;
  uint32_t training_;  // ranks whose last process has not ended
  uint32_t finished_ranks_ = 0;
  bool state_is_lost_ = false;           // all ranks were away at once
  bool died_before_first_step_ = false;  // some process, before any rank had done a step
  SavedRanks saved_;
  bool is_saved_ = false;
  SimulationResult result_;
  Audit audit_;
  std::vector<std::vector<bool>> has_trained_;  // by rank and step: with a gradient
  std::map<std::pair<uint32_t, uint64_t>, std::vector<std::vector<float>>> gradients_;
};

}  // namespace

OptimizerOptions OptimizerOf(uint64_t seed) { return JobPlan(seed).optimizer; }

Digests Undisturbed(uint64_t seed) {
  const JobPlan plan(seed);
  Simulation simulation(plan, seed, nullptr);
  simulation.Run();
  return simulation.digests();
}

AnsweredCodecs AnsweredCodecsOf(uint64_t seed) {
  const JobPlan plan(seed);
  Simulation simulation(plan, seed, nullptr);
  simulation.Run();
  const Audit& audit = simulation.audit();
  return {audit.WarmUpCodecs(), audit.FrozenCodecs(), audit.VarianceCodecs()};
}

SimulationResult Simulate(uint64_t seed, const Digests& expected) {
  const JobPlan plan(seed);
  if (expected.size() != plan.steps && !plan.is_elastic())
    return {.violations = {"the undisturbed job failed"}};
  Simulation simulation(plan, seed, &expected);
  simulation.Run();
  return simulation.result();
}

SimulationResult SimulateResumed(uint64_t seed, const Digests& expected) {
  JobPlan plan(seed);
  if (expected.size() != plan.steps && !plan.is_elastic())
    return {.violations = {"the undisturbed job failed"}};
  Scheduler disks(seed);
  SimDisk checkpoints(
      disks);  // that does not fail: tests/checkpoint_damage_test.cc has one that does
  const uint64_t saved_after = 1 + seed % (plan.steps - 1);
  Simulation first(plan, seed, &expected, {.until = saved_after, .save_to = &checkpoints});
  first.Run();
  if (!first.result().violations.empty() || !first.is_saved()) return first.result();
  plan.shards = 1 + plan.shards % 3;
  Simulation second(plan, seed + 1, &expected,
                    {.from = saved_after, .resume_from = &checkpoints, .saved = &first.saved()});
  second.Run();
  SimulationResult result = second.result();
  result.kills += first.result().kills;
  result.replayed_frames += first.result().replayed_frames;
  return result;
}

}  // namespace signpost::simulation
