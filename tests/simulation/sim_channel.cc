#include "tests/simulation/sim_channel.h"

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace signpost::simulation {
namespace {

// What Leave and ReadError bring. ABORTED is the caller's to act upon, and no lost connection.
template <typename Response>
struct OrMustOffer {
  bool must_offer_first = false;
  Response response = {};
};
using Left = OrMustOffer<LeaveResponse>;
using ErrorRead = OrMustOffer<ReadErrorResponse>;

// What comes of a frame, and from nowhere else, the aggregator's error then, if it can be read.
struct Answered {
  Answer answer;
  std::optional<ReadErrorResponse> error;
};

Answer AnswerOf(const Aggregator::Reply& reply) {
  Answer answer{OwnedChunk::HeaderOf(reply), Payload(reply.answer->payload.size())};
  std::memcpy(answer.payload.data(), reply.answer->payload.data(), answer.payload.size());
  return answer;
}

bool IsOfRound(const AnswerHeader& answer) {
  return answer.codec() != REPLAY && IsContribution(answer.codec());
}

// Before the round that follows the answer's.
std::optional<ReadErrorResponse> ErrorBehind(Aggregator& aggregator, const FrameHeader& header,
                                             const AnswerHeader& answer) {
  if (!IsOfRound(answer)) return std::nullopt;
  ReadErrorRequest request;
  request.set_job(header.job());
  request.set_epoch(header.epoch());
  request.set_rank(header.rank());
  request.set_incarnation(header.incarnation());
  request.set_chunk(answer.chunk());
  request.set_step(answer.step() + 1);
  absl::StatusOr<ReadErrorResponse> error = aggregator.ReadError(request);
  if (!error.ok()) return std::nullopt;  // it is further, or has not come as far again
  return *std::move(error);
}

Frame FrameOf(const FrameHeader& header, const Payload& payload, bool tells_late_ranks) {
  Frame frame{header, Payload(payload.size())};
  if (!tells_late_ranks) frame.header.clear_late_ranks();
  std::memcpy(frame.payload.data(), payload.data(), payload.size());
  return frame;
}

template <typename Response>
struct Call {
  using Reply = std::function<void(absl::StatusOr<Response>)>;

  absl::Time deadline;
  // Hands the request, which came by that connection, to the aggregator.
  std::function<void(Aggregator&, const std::string& connection, Reply)> send;
  std::function<void(absl::StatusOr<Response>)> done;
  bool ended = false;
  uint64_t lost_connections = 0;  // under it

  void End(absl::StatusOr<Response> result) {
    if (!std::exchange(ended, true)) done(std::move(result));
  }
};

template <typename Response>
using CallPtr = std::shared_ptr<Call<Response>>;

absl::Duration Latency(const Wire& wire) {
  return wire.scheduler.Between(absl::Microseconds(50), absl::Milliseconds(3));
}

bool Lost(const Wire& wire) {
  return wire.link.drop_one_in != 0 && wire.scheduler.OneIn(wire.link.drop_one_in);
}

// Makes one if there is none.
std::string ConnectionOf(const Wire& wire) {
  Link& link = wire.link;
  if (link.connection.empty() || link.incarnation != wire.process.incarnation()) {
    link.connection = wire.process.NewConnection();
    link.incarnation = wire.process.incarnation();
  }
  return link.connection;
}

// To make a call, over one connection.
template <typename Response>
struct Attempt {
  Wire wire;
  CallPtr<Response> call;
  uint64_t lost_connections;  // before it

  // With its connection: another has taken its place.
  bool is_lost() const { return call->lost_connections != lost_connections; }
  // Whether what has been sent to a process is seen there: what waits in the buffers of a lost
  // connection may be.
  bool IsRead() const { return !is_lost() || wire.scheduler.OneIn(2); }
};

template <typename Response>
void Deliver(const Attempt<Response>& attempt, const std::string& connection);
template <typename Response>
void TryLater(const Attempt<Response>& attempt);

template <typename Response>
void Try(const Attempt<Response>& attempt) {
  const auto& [wire, call, lost_connections] = attempt;
  if (attempt.is_lost() || call->ended || wire.caller->is_gone) return;
  if (wire.link.is_cut || !wire.process.is_up() || Lost(wire)) return TryLater(attempt);
  // Nobody is there to make a connection with.
  if (wire.link.connection.empty() && wire.process.clock().stands_still())
    return wire.process.clock().Receive([attempt] { TryLater(attempt); });
  const std::string connection = ConnectionOf(wire);
  wire.scheduler.After(Latency(wire), [attempt, connection] {
    attempt.wire.process.clock().Receive([attempt, connection] { Deliver(attempt, connection); });
  });
  if (wire.link.repeat_one_in == 0 || !wire.scheduler.OneIn(wire.link.repeat_one_in)) return;
  // A copy that was on its way when its connection was given up. Nobody waits for its answer.
  wire.scheduler.After(wire.scheduler.Between(absl::ZeroDuration(), absl::Milliseconds(40)),
                       [wire = wire, call = call, connection] {
                         wire.process.clock().Receive([wire, call, connection] {
                           if (wire.process.is_up())
                             call->send(wire.process.aggregator(), connection,
                                        [](absl::StatusOr<Response>) {});
                         });
                       });
}

template <typename Response>
void TryLater(const Attempt<Response>& attempt) {
  const Wire& wire = attempt.wire;
  wire.clock.After(wire.scheduler.Between(absl::Milliseconds(1), absl::Milliseconds(20)),
                   [attempt] { Try(attempt); });
}

template <typename Response>
void Deliver(const Attempt<Response>& attempt, const std::string& connection) {
  const auto& [wire, call, lost_connections] = attempt;
  if (!attempt.IsRead()) return;
  if (wire.link.is_cut || !wire.process.is_up()) return TryLater(attempt);
  const uint64_t incarnation = wire.process.incarnation();
  call->send(wire.process.aggregator(), connection,
             [attempt, incarnation](absl::StatusOr<Response> response) {
               const auto& [wire, call, lost_connections] = attempt;
               if (attempt.is_lost()) return;
               const absl::Status& status = response.status();
               const bool arrives = wire.process.incarnation() == incarnation &&
                                    !wire.link.is_cut && !Lost(wire) && !wire.process.disk().died();
               // ABORTED: a copy overtook the request and took its place.
               if (!arrives || absl::IsUnavailable(status) || absl::IsAborted(status))
                 return TryLater(attempt);
               // Shared, because a function must be copyable.
               auto result = std::make_shared<absl::StatusOr<Response>>(std::move(response));
               wire.scheduler.After(Latency(wire), [attempt, result] {
                 attempt.wire.clock.Receive([attempt, result] {
                   if (attempt.IsRead()) attempt.call->End(std::move(*result));
                 });
               });
             });
}

// Makes the call's first try, and ends it by its deadline, or with its process.
template <typename Response>
void Begin(Wire wire, CallPtr<Response> call) {
  const auto cancel = [call] { call->End(absl::CancelledError("its process is gone")); };
  if (wire.caller->is_gone) return cancel();
  const auto make_again = [wire, call] {
    if (call->ended) return;
    ++call->lost_connections;
    TryLater(Attempt<Response>{wire, call, call->lost_connections});
  };
  wire.caller->calls.push_back({&wire.link, cancel, make_again});
  wire.clock.After(call->deadline - wire.clock.Now(), [call] {
    call->End(absl::DeadlineExceededError("no answer in the time given"));
  });
  Try(Attempt<Response>{wire, call, call->lost_connections});
}

template <typename Response>
absl::StatusOr<Response> Await(Wire wire, CallPtr<Response> call,
                               Channel::CheckMayWait check_may_wait = Channel::MayWait) {
  absl::Mutex mutex;
  bool done = false;
  absl::StatusOr<Response> result;
  call->done = [&](absl::StatusOr<Response> response) {
    result = std::move(response);
    done = true;
  };
  Begin(wire, call);
  while (true) {
    {
      absl::MutexLock lock(&mutex);
      const absl::Condition is_done(&done);
      if (wire.clock.Await(mutex, is_done, Channel::kQuestionInterval)) return result;
    }
    absl::Status told = check_may_wait();
    if (!told.ok()) call->End(std::move(told));
  }
}

// What came of one call at aggregators. They hear of it when nobody waits for its answer any more.
class SentJoins {
 public:
  explicit SentJoins(Wire wire) : wire_(wire) {}

  void Add(uint64_t call) {
    calls_.push_back({wire_.process.incarnation(), call});
    if (is_cancelled_) CancelSoon(calls_.back());
  }
  void Cancel() {
    is_cancelled_ = true;
    for (const Sent& sent : calls_) CancelSoon(sent);
  }

 private:
  struct Sent {
    uint64_t incarnation, call;
  };

  void CancelSoon(const Sent& sent) const {
    wire_.scheduler.After(Latency(wire_), [wire = wire_, sent] {
      wire.process.clock().Receive([wire, sent] {
        if (!wire.process.is_up() || wire.process.incarnation() != sent.incarnation) return;
        wire.process.aggregator().CancelJoin(sent.call, absl::CancelledError("its caller is gone"));
      });
    });
  }

  const Wire wire_;
  std::vector<Sent> calls_;
  bool is_cancelled_ = false;
};

}  // namespace

absl::StatusOr<JoinResponse> SimChannel::Join(const JoinRequest& request, absl::Time deadline,
                                              CheckMayWait check_may_wait) {
  auto call = std::make_shared<Call<JoinResponse>>();
  call->deadline = deadline;
  const auto sent = std::make_shared<SentJoins>(wire_);
  call->send = [request, sent, &arrivals = wire_.arrivals](Aggregator& aggregator,
                                                           const std::string& connection,
                                                           Call<JoinResponse>::Reply reply) {
    arrivals.AddJoin(request.rank(), request.incarnation());
    sent->Add(aggregator.Join(request, std::move(reply), connection));
  };
  absl::StatusOr<JoinResponse> response = Await(wire_, call, check_may_wait);
  sent->Cancel();
  return response;
}

void SimChannel::Exchange(const FrameHeader& header, std::shared_ptr<const Payload> payload,
                          absl::Time deadline, ExchangeDone done) {
  auto call = std::make_shared<Call<Answered>>();
  call->deadline = deadline;
  call->send = [header, payload, wire = wire_](Aggregator& aggregator,
                                               const std::string& connection,
                                               Call<Answered>::Reply reply) {
    const uint64_t incarnation = wire.process.incarnation();
    const bool is_contribution = IsContribution(header.codec());
    const bool is_new =
        is_contribution && wire.arrivals.AddFrame(incarnation, header, wire.process.clock().Now());
    const auto is_waiting = std::make_shared<bool>(false);
    aggregator.Exchange(
        FrameOf(header, *payload, wire.tells_late_ranks),
        [=, &aggregator, reply = std::move(reply)](absl::StatusOr<Aggregator::Reply> result) {
          const bool is_of_round = result.ok() && IsOfRound(result->answer->header);
          if (is_of_round) {
            wire.arrivals.AddAnswer(incarnation, header, result->answer->header,
                                    wire.process.clock().Now());
          }
          if (!is_of_round && is_contribution && !*is_waiting) {
            wire.arrivals.RemoveFrame(incarnation, header, is_new);
          }
          if (!result.ok()) return reply(result.status());
          Answer answer = AnswerOf(*result);
          const auto error = ErrorBehind(aggregator, header, answer.header);
          reply(Answered{std::move(answer), error});
        },
        connection);
    *is_waiting = true;
  };
  wire_.audit.AddFrame(header, payload->span());
  auto shared_done = std::make_shared<ExchangeDone>(std::move(done));
  // Who listens may have no use for what comes: then nobody has had it.
  const bool is_used = header.codec() != LISTEN;
  call->done = [shared_done, is_used, epoch = header.epoch(),
                &audit = wire_.audit](absl::StatusOr<Answered> answered) {
    if (!answered.ok()) return (*shared_done)(answered.status());
    const Answer& answer = answered->answer;
    if (is_used) audit.AddAnswer(epoch, answer.header, answer.payload.span());
    if (is_used && answered->error) audit.AddAggregatorError(epoch, *answered->error);
    (*shared_done)(std::move(answered->answer));
  };
  Begin(wire_, call);
}

absl::Status SimChannel::Leave(const LeaveRequest& request, absl::Time deadline) {
  auto call = std::make_shared<Call<Left>>();
  call->deadline = deadline;
  call->send = [request, &arrivals = wire_.arrivals](Aggregator& aggregator, const std::string&,
                                                     Call<Left>::Reply reply) {
    arrivals.AddLeave(request.rank());
    aggregator.Leave(request, [reply = std::move(reply)](absl::Status status) {
      if (!status.ok() && !absl::IsAborted(status)) return reply(status);
      reply(Left{absl::IsAborted(status)});
    });
  };
  const absl::StatusOr<Left> left = Await(wire_, call);
  if (left.ok() && left->must_offer_first) return absl::AbortedError("frames are missing");
  return left.status();
}

absl::StatusOr<ReadErrorResponse> SimChannel::ReadError(const ReadErrorRequest& request,
                                                        absl::Time deadline) {
  auto call = std::make_shared<Call<ErrorRead>>();
  call->deadline = deadline;
  call->send = [request](Aggregator& aggregator, const std::string&, Call<ErrorRead>::Reply reply) {
    absl::StatusOr<ReadErrorResponse> read = aggregator.ReadError(request);
    if (read.ok()) return reply(ErrorRead{false, *std::move(read)});
    if (!absl::IsAborted(read.status())) return reply(read.status());
    reply(ErrorRead{/*must_offer_first=*/true});
  };
  absl::StatusOr<ErrorRead> read = Await(wire_, call);
  if (!read.ok()) return read.status();
  if (read->must_offer_first) return absl::AbortedError("frames are missing");
  wire_.audit.AddAggregatorError(request.epoch(), read->response);
  return std::move(read->response);
}

absl::StatusOr<StatusResponse> SimChannel::Status(const StatusRequest& request,
                                                  absl::Time deadline) {
  auto call = std::make_shared<Call<StatusResponse>>();
  call->deadline = deadline;
  call->send = [request](Aggregator& aggregator, const std::string&,
                         Call<StatusResponse>::Reply reply) { reply(aggregator.Status(request)); };
  return Await(wire_, call);
}

}  // namespace signpost::simulation
