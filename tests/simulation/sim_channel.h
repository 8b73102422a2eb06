// The network between one worker and one aggregator process: it delays, drops, repeats and cuts.

#ifndef SIGNPOST_TESTS_SIMULATION_SIM_CHANNEL_H_
#define SIGNPOST_TESTS_SIMULATION_SIM_CHANNEL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tests/simulation/arrivals.h"
#include "tests/simulation/audit.h"
#include "tests/simulation/process.h"
#include "tests/simulation/scheduler.h"
#include "worker/channel.h"

namespace signpost::simulation {

// Shared by the channel and whoever makes trouble.
struct Link {
  bool is_cut = false;
  uint64_t drop_one_in = 0;    // of requests and of replies; 0: none
  uint64_t repeat_one_in = 0;  // of requests: they arrive a second time, later
  // The connection over it, which is there again after a cut, as calls wait. The next call makes
  // one if there is none: its name is empty then.
  std::string connection = {};
  uint64_t incarnation = 0;  // of the aggregator's process, which has that connection

  void Disconnect() { connection.clear(); }
};

// A process that makes calls.
struct Caller {
  struct OpenCall {
    const Link* link;
    std::function<void()> end, make_again;  // unless it has ended
  };

  bool is_gone = false;  // what it sent arrives, if it can, but is not sent again
  std::vector<OpenCall> calls;

  // Calls over the link's connection, which is lost, over another.
  void MakeAgain(const Link& link) {
    for (const OpenCall& call : calls) {
      if (call.link == &link) call.make_again();
    }
  }

  void Die() {
    is_gone = true;
    for (auto& call : std::exchange(calls, {})) call.end();
  }
};

// What a channel runs over. Outlives it, because calls do.
struct Wire {
  Scheduler& scheduler;
  Process& process;
  Link& link;
  std::shared_ptr<Caller> caller;
  ProcessClock& clock;  // the caller's
  Audit& audit;
  Arrivals& arrivals;     // at the process
  bool tells_late_ranks;  // false: frames arrive without them
};

// As GrpcChannel: a call whose connection is lost is made again, with the same bytes, until its
// deadline.
class SimChannel final : public Channel {
 public:
  explicit SimChannel(Wire wire) : wire_(wire) {}

  std::string target() const override { return "simulated"; }
  absl::StatusOr<JoinResponse> Join(const JoinRequest& request, absl::Time deadline,
                                    CheckMayWait check_may_wait) override;
  void Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                absl::Time deadline, ExchangeDone done) override;
  absl::Status Leave(const LeaveRequest& request, absl::Time deadline) override;
  absl::StatusOr<ReadErrorResponse> ReadError(const ReadErrorRequest& request,
                                              absl::Time deadline) override;
  absl::StatusOr<StatusResponse> Status(const StatusRequest& request, absl::Time deadline) override;

 private:
  const Wire wire_;
};

}  // namespace signpost::simulation

#endif  // SIGNPOST_TESTS_SIMULATION_SIM_CHANNEL_H_
