#include "node/attached_session.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "failpoint/failpoint.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/support/client_callback.h"
#include "node/definition.h"
#include "node/gpu_tensors.h"
#include "node/host_tensors.h"
#include "node/process_watch.h"
#include "proto/exit_code.h"
#include "proto/failure_timeout.h"
#include "proto/grpc_status.h"
#include "proto/node.grpc.pb.h"
#include "proto/steady_time.h"
#include "proto/try_again.h"
#include "trace/recorder.h"
#include "trace/span.h"

namespace signpost::node {
namespace {

// As a worker.
constexpr absl::Duration kInterruptInterval = absl::Milliseconds(500);
// So long a process waits for its node's worker, which may just be starting, without a word.
constexpr absl::Duration kSilence = absl::Seconds(1);

int Milliseconds(absl::Duration duration) {
  return static_cast<int>(absl::ToInt64Milliseconds(duration));
}

std::shared_ptr<grpc::Channel> Connect(const SessionOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // A worker that hangs. One that works, for however long, answers.
  const FailureTimeout& failure = options.failure_timeout;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(failure.keepalive_time()));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Milliseconds(failure.keepalive_timeout()));
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, Milliseconds(failure.longest_backoff()));
  arguments.SetInt(GRPC_ARG_ENABLE_CHANNELZ, 0);
  arguments.SetMaxReceiveMessageSize(-1);
  return grpc::CreateCustomChannel(options.node, grpc::InsecureChannelCredentials(), arguments);
}

// As the node's worker, which may be elsewhere in the file system, has to have it.
std::string Absolute(const std::string& path) {
  return path.empty() ? path : std::filesystem::absolute(path).string();
}

StepReport ReportOf(const Stepped& message) {
  StepReport report;
  report.step = message.step();
  report.steps_caught_up = message.steps_caught_up();
  report.late_rounds = message.late_rounds();
  report.late_ranks = {message.late_ranks().begin(), message.late_ranks().end()};
  report.codec = message.codec();
  report.kernels = absl::Nanoseconds(message.kernels_ns());
  report.wire = absl::Nanoseconds(message.wire_ns());
  report.wait = absl::Nanoseconds(message.wait_ns());
  for (const Stepped::SkippedRound& skipped : message.skipped()) {
    report.skipped.push_back({skipped.rank(), skipped.block()});
  }
  report.restarted_aggregators = message.restarted_aggregators();
  report.replayed_frames = message.replayed_frames();
  report.kept_bytes = message.kept_bytes();
  report.sent_bits = message.sent_bits();
  return report;
}

WireBytes WireBytesOf(const Wire& wire) { return {wire.sent_bytes(), wire.received_bytes()}; }

}  // namespace

// The stream to the node's worker. gRPC's threads look after it, also while this process computes:
// otherwise its pings would go unanswered, and a connection that lives be given up.
class AttachedSession::Connection final : private grpc::ClientBidiReactor<Request, Reply> {
 public:
  explicit Connection(const SessionOptions& options)
      : target_(options.node),
        is_interrupted_(options.worker.is_interrupted),
        channel_(node::Connect(options)),
        stub_(NodeService::NewStub(channel_)) {}

  ~Connection() override {
    if (is_open_) Close();
  }

  absl::Status Open(const SessionOptions& options) {
    if (!absl::StartsWith(target_, "unix:")) {
      return absl::InvalidArgumentError(
          absl::StrCat("the worker of this node cannot be at '", target_,
                       "': wanted unix:PATH, what `signpost worker` listens on (--listen)"));
    }
    CountWhileRunning();
    const absl::Duration timeout = options.worker.join_timeout;
    const absl::Time deadline = SteadyNow() + timeout;
    const auto connects_until = [this](absl::Time time) {
      while (!channel_->WaitForConnected(ToSystemClock(time))) {
        // Otherwise this process has stood still, while gRPC's clock went on.
        if (SteadyNow() >= time) return false;
      }
      return true;
    };
    bool is_there = connects_until(std::min(deadline, SteadyNow() + kSilence));
    if (!is_there) {
      signpost::Tell(options, absl::StrCat("waiting for the worker of this node, at ", target_));
      is_there = connects_until(deadline);
    }
    if (!is_there) {
      return absl::UnavailableError(absl::StrFormat(
          "no worker of this node answers at %s in %s. Start it: signpost worker --listen %s "
          "--processes ...",
          target_, absl::FormatDuration(timeout), target_));
    }
    is_open_ = true;
    stub_->async()->Serve(&context_, this);
    AddHold();  // until Close: between two requests there is nothing under way
    StartCall();
    return absl::OkStatus();
  }

  bool was_interrupted() const { return was_interrupted_; }

  // Tells, without an answer, that the parameter's gradient is shared, of the step that is to be
  // taken at these rates. Does not wait: what comes while a message is under way goes with the next
  // one.
  void Tell(const StepRates& rates, size_t parameter) {
    {
      absl::MutexLock lock(&mutex_);
      if (!is_open_ || is_broken_) return;  // the next call says why
      GradientsReady& ready = *to_tell_.mutable_gradients_ready();
      if (!std::exchange(has_told_, true)) *ready.mutable_rates() = rates;
      ready.add_tensors(static_cast<uint32_t>(parameter));
      if (is_telling_) return;
      TakeWhatToTell();
    }
    StartWrite(&told_);
  }

  // Waits for as long as the worker does, which has deadlines of its own, and is alive; or until it
  // is interrupted, after which there is nothing more to call. A step says what was to be told.
  absl::StatusOr<Reply> Call(const Request& request) {
    if (was_interrupted_) {
      return absl::FailedPreconditionError(
          "an earlier call was interrupted; the node's worker keeps this process's place: join "
          "again");
    }
    if (is_open_) {
      {
        absl::MutexLock lock(&mutex_);
        to_tell_.Clear();
        has_told_ = false;
      }
      // One message is under way at a time.
      bool is_over = !AwaitUnlessInterrupted(&Connection::IsNotTelling);
      if (!is_over) {
        outstanding_ = 2;
        StartWrite(&request);
        StartRead(&reply_);
        is_over = !AwaitUnlessInterrupted(&Connection::HasNothingOutstanding);
      }
      if (is_over) return absl::CancelledError("interrupted");
      if (!is_broken_) {
        if (reply_.code() == 0) return reply_;
        const absl::Status error(static_cast<absl::StatusCode>(reply_.code()), reply_.message());
        return reply_.try_again() ? TryAgain(error) : error;
      }
      Close();
    }
    return absl::UnavailableError(absl::StrCat(
        "the worker of this node, at ", target_, ", is gone, and what it had of the job with it (",
        status_.error_message(),
        "). Start it again, and resume from the newest checkpoint. Or it still runs, and has given "
        "up this process, which had stopped for longer than the failure timeout: then join again"));
  }

 private:
  // Otherwise the stream is over.
  bool AwaitUnlessInterrupted(bool (Connection::*condition)() const) {
    while (!Await(condition, kInterruptInterval)) {
      if (!is_interrupted_ || !is_interrupted_()) continue;
      was_interrupted_ = true;
      context_.TryCancel();
      Await(condition);
      Close();
      return false;
    }
    return true;
  }

  // Waits until gRPC has no more to say; status_ is there then.
  void Close() {
    is_open_ = false;
    if (!is_broken_) context_.TryCancel();
    RemoveHold();
    Await(&Connection::IsDone);
  }

  void TakeWhatToTell() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    is_telling_ = true;
    told_ = std::exchange(to_tell_, Request());
  }

  void OnWriteDone(bool ok) override {
    {
      absl::MutexLock lock(&mutex_);
      if (!ok) is_broken_ = true;
      if (!is_telling_) {
        --outstanding_;
        return;
      }
      is_telling_ = false;
      if (!ok || !to_tell_.has_gradients_ready()) return;
      TakeWhatToTell();
    }
    StartWrite(&told_);
  }
  void OnReadDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    --outstanding_;
    if (!ok) is_broken_ = true;
  }
  void OnDone(const grpc::Status& status) override {
    absl::MutexLock lock(&mutex_);
    status_ = status;
    is_done_ = true;
  }

  bool HasNothingOutstanding() const { return outstanding_ == 0; }
  bool IsNotTelling() const { return !is_telling_; }
  bool IsDone() const { return is_done_; }
  bool Await(bool (Connection::*condition)() const,
             absl::Duration timeout = absl::InfiniteDuration()) {
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(this, condition), timeout);
  }

  const std::string target_;
  const std::function<bool()> is_interrupted_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<NodeService::Stub> stub_;
  grpc::ClientContext context_;
  bool is_open_ = false;
  bool was_interrupted_ = false;
  Reply reply_;
  absl::Mutex mutex_;  // of the following, which gRPC's threads write while something is under way
  int outstanding_ = 0;      // of a call: its request, its reply
  bool is_telling_ = false;  // told_ is under way
  Request told_, to_tell_;   // gradients that are ready; what goes next
  bool has_told_ = false;    // of this step
  bool is_broken_ = false;
  bool is_done_ = false;
  grpc::Status status_;
};

absl::StatusOr<std::unique_ptr<AttachedSession>> AttachedSession::Join(
    const SessionOptions& options, const OptimizerOptions& optimizer,
    std::vector<Parameter> parameters) {
  if (!options.gpu) return JoinOn(/*gpu=*/nullptr, options, optimizer, std::move(parameters));
  absl::StatusOr<std::unique_ptr<kernels::cuda::Gpu>> gpu = kernels::cuda::OpenGpu(*options.gpu);
  if (!gpu.ok()) return gpu.status();
  auto session = JoinOn(gpu->get(), options, optimizer, std::move(parameters));
  if (session.ok()) (*session)->own_gpu_ = *std::move(gpu);
  return session;
}

absl::StatusOr<std::unique_ptr<AttachedSession>> AttachedSession::JoinOn(
    kernels::cuda::Gpu* gpu, const SessionOptions& options, const OptimizerOptions& optimizer,
    std::vector<Parameter> parameters) {
  if (absl::Status status = CheckJobName(options.worker.job); !status.ok()) return status;
  if (absl::Status status = CheckOptions(optimizer); !status.ok()) return status;
  if (absl::Status status = CheckParameters(parameters, gpu); !status.ok()) return status;
  if (absl::Status status = StartTrace(options); !status.ok()) return status;
  std::unique_ptr<AttachedSession> session(
      new AttachedSession(optimizer, std::move(parameters), std::make_unique<Connection>(options)));
  session->trace_step_.rank = options.worker.rank;
  session->trace_step_.job = trace::LabelOf(options.worker.job);
  absl::Status status = session->connection_->Open(options);
  if (status.ok()) status = session->Attach(gpu, options, optimizer);
  if (!status.ok()) return status;
  if (gpu != nullptr) {
    Tell(options, absl::StrCat("trains through the worker of its node, from ", gpu->name()));
  }
  return session;
}

AttachedSession::AttachedSession(const OptimizerOptions& optimizer,
                                 std::vector<Parameter> parameters,
                                 std::unique_ptr<Connection> connection)
    : optimizer_(optimizer),
      parameters_(std::move(parameters)),
      connection_(std::move(connection)) {}

AttachedSession::~AttachedSession() = default;

absl::Status AttachedSession::Attach(kernels::cuda::Gpu* gpu, const SessionOptions& options,
                                     const OptimizerOptions& optimizer) {
  Request request;
  node::Attach& attach = *request.mutable_attach();
  attach.set_job(options.worker.job);
  attach.set_rank(options.worker.rank);
  attach.set_world_size(options.worker.world_size);
  attach.set_pid(getpid());
  attach.set_pid_namespace(PidNamespace());
  attach.set_on_gpu(gpu != nullptr);
  *attach.mutable_definition() = DefinitionOf(options, optimizer, parameters_);
  Start& start = *attach.mutable_start();
  start.set_start_from_rank_0(options.start_from_rank_0);
  start.set_resume_with_other_world_size(options.worker.resume_with_other_world_size);
  start.set_resume(Absolute(options.resume));
  std::unique_ptr<SharedMemory> state;  // until the worker has read it
  if (options.resume_state) {
    absl::StatusOr<std::unique_ptr<SharedMemory>> memory =
        SharedMemory::Create(std::max<uint64_t>(options.resume_state->size(), 1));
    if (!memory.ok()) return memory.status();
    state = *std::move(memory);
    std::memcpy(state->data(), options.resume_state->data(), options.resume_state->size());
    *start.mutable_resume_state() = state->handle();
  }
  const absl::StatusOr<Reply> reply = connection_->Call(request);
  if (!reply.ok()) return reply.status();
  if (absl::Status status = MapMemory(reply->attached(), gpu); !status.ok()) return status;
  return Begin();
}

absl::Status AttachedSession::MapMemory(const Attached& attached, kernels::cuda::Gpu* gpu) {
  const uint64_t bytes = elements() * sizeof(float);
  if (!attached.gradients().on_gpu().empty()) {
    if (gpu == nullptr) return absl::InternalError("the worker shares memory of a GPU with a host");
    if (attached.gradients().bytes() != bytes || attached.parameters().bytes() != bytes) {
      return absl::InternalError(absl::StrFormat(
          "the worker shares %d and %d bytes of its GPU's memory, and these tensors take %d",
          attached.gradients().bytes(), attached.parameters().bytes(), bytes));
    }
    absl::StatusOr<std::unique_ptr<GpuTensors>> tensors = GpuTensors::CreateBeside(
        *gpu, parameters_, attached.gradients().on_gpu(), attached.parameters().on_gpu());
    if (tensors.ok()) tensors_ = *std::move(tensors);
    return tensors.status();
  }
  auto gradients = SharedMemory::Open(attached.gradients(), bytes);
  if (!gradients.ok()) return gradients.status();
  auto values = SharedMemory::Open(attached.parameters(), bytes);
  if (!values.ok()) return values.status();
  gradients_ = *std::move(gradients);
  values_ = *std::move(values);
  if (gpu == nullptr) {
    tensors_ = std::make_unique<HostTensors>(parameters_, gradients_->floats().data(),
                                             values_->floats().data());
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<GpuTensors>> tensors =
      GpuTensors::Create(*gpu, parameters_, *gradients_, *values_);
  if (tensors.ok()) tensors_ = *std::move(tensors);
  return tensors.status();
}

absl::Status AttachedSession::Begin() {
  absl::Status status;
  for (size_t i = 0; i < parameters_.size() && status.ok(); ++i) {
    status = tensors_->Share(i, parameters_[i].values);
  }
  if (status.ok()) status = tensors_->Await();
  if (!status.ok()) return status;
  Request request;
  request.mutable_begin();
  const auto called = std::chrono::steady_clock::now();
  const absl::StatusOr<Reply> reply = connection_->Call(request);
  if (!reply.ok()) return reply.status();
  const Begun& begun = reply->begun();
  steps_ = begun.steps();
  resumed_ = {begun.resumed_checkpoint(),
              {begun.resume_warnings().begin(), begun.resume_warnings().end()}};
  if (begun.returned()) {
    returned_ = Returned{begun.returned_step()};
    if (begun.has_lost_error_norm()) returned_->lost_error_norm = begun.lost_error_norm();
  }
  wire_bytes_ = WireBytesOf(begun.wire());
  is_synchronised_ = begun.is_synchronised();
  return TakeParameters(called);
}

absl::StatusOr<StepReport> AttachedSession::Step(absl::Span<const Gradient> gradients,
                                                 absl::Span<const GroupRates> rates) {
  if (gradients.size() != parameters_.size()) {
    return absl::InvalidArgumentError(absl::StrFormat("got gradients of %d tensors, the job has %d",
                                                      gradients.size(), parameters_.size()));
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (absl::Status status = CheckGradient(i, gradients[i]); !status.ok()) return status;
  }
  if (absl::Status status = CheckRates(rates); !status.ok()) return status;
  if (absl::Status status = CheckNoStepFailed(); !status.ok()) return status;
  if (absl::Status status = CheckNoStepIsOpen(); !status.ok()) return status;
  trace_step_.step = steps_;
  const trace::Span span(trace_step_);
  for (size_t i = 0; i < gradients.size() && failure_.ok(); ++i) {
    failure_ = tensors_->Share(i, gradients[i]);
  }
  if (!failure_.ok()) return failure_;
  return TakeStep(MessageOf(rates, Schedule()));
}

absl::Status AttachedSession::BeginStep(absl::Span<const GroupRates> rates) {
  if (absl::Status status = CheckRates(rates); !status.ok()) return status;
  if (absl::Status status = CheckNoStepFailed(); !status.ok()) return status;
  if (absl::Status status = CheckNoStepIsOpen(); !status.ok()) return status;
  open_step_ = OpenStep{.rates = MessageOf(rates, Schedule()),
                        .has_gradient = std::vector<bool>(parameters_.size()),
                        .gradients_missing = parameters_.size()};
  return absl::OkStatus();
}

absl::Status AttachedSession::GradientReady(size_t parameter, Gradient gradient) {
  if (absl::Status status = CheckNoStepFailed(); !status.ok()) return status;
  if (!open_step_) {
    return absl::FailedPreconditionError("a gradient came before its step has begun");
  }
  if (absl::Status status = CheckGradient(parameter, gradient); !status.ok()) return status;
  if (open_step_->has_gradient[parameter]) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "the gradient of tensor '%s' came twice in step %d", parameters_[parameter].name, steps_));
  }
  open_step_->has_gradient[parameter] = true;
  --open_step_->gradients_missing;
  failure_ = tensors_->Share(parameter, gradient);
  open_step_->being_shared.push_back(parameter);
  if (failure_.ok()) failure_ = TellOfShared();
  return failure_;
}

absl::Status AttachedSession::TellOfShared() {
  std::deque<size_t>& parameters = open_step_->being_shared;
  while (!parameters.empty()) {
    const absl::StatusOr<bool> is_shared = tensors_->IsShared(parameters.front());
    if (!is_shared.ok()) return is_shared.status();
    if (!*is_shared) break;
    connection_->Tell(open_step_->rates, parameters.front());
    parameters.pop_front();
  }
  return absl::OkStatus();
}

absl::StatusOr<StepReport> AttachedSession::FinishStep() {
  if (absl::Status status = CheckNoStepFailed(); !status.ok()) return status;
  if (!open_step_) {
    return absl::FailedPreconditionError("there is no step to finish: none has begun");
  }
  if (open_step_->gradients_missing > 0) {
    const size_t missing =
        absl::c_find(open_step_->has_gradient, false) - open_step_->has_gradient.begin();
    return absl::FailedPreconditionError(absl::StrFormat(
        "step %d lacks the gradients of %d tensors, that of '%s' among them; one that is zero has "
        "to be given too",
        steps_, open_step_->gradients_missing, parameters_[missing].name));
  }
  trace_step_.step = steps_;
  const trace::Span span(trace_step_);
  // A GPU may have much to compute still, whose copies come one after the other.
  while (open_step_->being_shared.size() > 1) {
    failure_ = tensors_->AwaitShared(open_step_->being_shared.front());
    if (failure_.ok()) failure_ = TellOfShared();
    if (!failure_.ok()) return failure_;
  }
  const StepRates rates = std::move(open_step_->rates);
  open_step_.reset();
  return TakeStep(rates);
}

absl::StatusOr<StepReport> AttachedSession::TakeStep(const StepRates& rates) {
  failure_ = tensors_->Await();
  if (!failure_.ok()) return failure_;
  Request request;
  *request.mutable_step()->mutable_rates() = rates;
  const auto called = std::chrono::steady_clock::now();
  const absl::StatusOr<Reply> reply = connection_->Call(request);
  if (!reply.ok()) {
    if (!absl::IsInvalidArgument(reply.status())) failure_ = reply.status();
    return reply.status();
  }
  failure_ = TakeParameters(called);
  if (!failure_.ok()) return failure_;
  steps_ = reply->stepped().steps();
  wire_bytes_ = WireBytesOf(reply->stepped().wire());
  is_synchronised_ = reply->stepped().is_synchronised();
  return ReportOf(reply->stepped());
}

absl::Status AttachedSession::TakeParameters(std::chrono::steady_clock::time_point called) {
  Reach(Failpoint::kNodeAnswered);
  absl::Status status = tensors_->TakeParameters();
  // In less time nobody loses a place, and asking takes a tenth of a millisecond. Time counts in
  // which this process stood still, too.
  const auto took = absl::FromChrono(std::chrono::steady_clock::now() - called);
  if (!status.ok() || took < FailureTimeout::kLeast / 2) return status;
  if (status = tensors_->Await(); !status.ok()) return status;
  Request request;
  request.mutable_confirm();
  return connection_->Call(request).status();
}

absl::Status AttachedSession::Checkpoint(const std::string& directory) {
  if (absl::Status status = CheckNoStepFailed(); !status.ok()) return status;
  if (absl::Status status = CheckNoStepIsOpen(); !status.ok()) return status;
  Request request;
  request.mutable_checkpoint()->set_directory(Absolute(directory));
  return connection_->Call(request).status();
}

absl::StatusOr<std::string> AttachedSession::SaveState() {
  if (absl::Status status = CheckNoStepFailed(); !status.ok()) return status;
  if (absl::Status status = CheckNoStepIsOpen(); !status.ok()) return status;
  Request request;
  request.mutable_save_state();
  const absl::StatusOr<Reply> reply = connection_->Call(request);
  if (!reply.ok()) return reply.status();
  const Memory& handle = reply->saved_state().state();
  const absl::StatusOr<std::unique_ptr<SharedMemory>> state =
      SharedMemory::Open(handle, handle.bytes());
  if (!state.ok()) return state.status();
  return std::string((*state)->text());
}

absl::Status AttachedSession::Leave() {
  has_left_ = true;
  if (connection_->was_interrupted()) return absl::OkStatus();  // it has left its worker alone
  // Others may train on in what this process reads.
  const absl::Status awaited = tensors_->Await();
  Request request;
  request.mutable_leave();
  absl::Status status = connection_->Call(request).status();
  status.Update(awaited);
  return status;
}

uint64_t AttachedSession::elements() const {
  uint64_t elements = 0;
  for (const Parameter& parameter : parameters_) elements += parameter.values.size();
  return elements;
}

absl::Status AttachedSession::CheckRates(absl::Span<const GroupRates> rates) const {
  if (absl::Status status = signpost::CheckRates(optimizer_, rates); !status.ok()) return status;
  for (const Parameter& parameter : parameters_) {
    if (parameter.group < rates.size()) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("tensor '%s' is in parameter group %d, but rates came for %d groups",
                        parameter.name, parameter.group, rates.size()));
  }
  return absl::OkStatus();
}

absl::Status AttachedSession::CheckGradient(size_t parameter, const Gradient& gradient) const {
  if (parameter >= parameters_.size()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "got the gradient of tensor %d, the job has %d", parameter, parameters_.size()));
  }
  const auto name = [&] { return DescribeTensor(TensorOf(parameters_[parameter])); };
  const size_t wanted = parameters_[parameter].values.size();
  if (gradient.size != wanted) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the gradient of tensor %s has %d values, wanted %d", name(), gradient.size, wanted));
  }
  const absl::Status status = tensors_->CheckGradient(gradient);
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrFormat("the gradient of tensor %s: %s", name(), status.message()));
}

absl::Status AttachedSession::CheckNoStepFailed() const {
  if (has_left_) return absl::InvalidArgumentError("this process has left its job: join again");
  if (failure_.ok()) return absl::OkStatus();
  const absl::Status status = absl::FailedPreconditionError(absl::StrCat(
      "an earlier step failed; leave, and join again. It failed with: ", failure_.message()));
  return ExitCodeOf(failure_) == kExitTryAgain ? TryAgain(status) : status;
}

absl::Status AttachedSession::CheckNoStepIsOpen() const {
  if (!open_step_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "step %d has begun and is not finished: gradients of %d tensors have come, of %d", steps_,
      parameters_.size() - open_step_->gradients_missing, parameters_.size()));
}

}  // namespace signpost::node
