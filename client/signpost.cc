#include "client/signpost.h"

#include <cxxabi.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/optimizer_config.h"
#include "client/reduction_session.h"
#include "client/session.h"
#include "config/file.h"
#include "config/session_settings.h"
#include "kernels/gpu.h"
#include "proto/aggregator.pb.h"
#include "proto/exit_code.h"
#include "worker/saved_state.h"

struct signpost_session {
  std::unique_ptr<signpost::Session> session;
  std::vector<signpost::Gradient> gradients;  // by parameter: the size and type of each
  std::string resume_warnings;
};

struct signpost_state {
  std::string bytes;
  std::optional<signpost::SavedState> parts = std::nullopt;  // once they are asked for
  std::string description;
};

struct signpost_config {
  // None without such a section; why it is wrong, for those who ask.
  absl::StatusOr<std::optional<signpost::OptimizerConfig>> optimizer = std::nullopt;
  std::map<std::string, std::string, std::less<>> session;  // by key
};

struct signpost_reduction {
  std::unique_ptr<signpost::ReductionSession> session;
  std::vector<size_t> sizes;  // by tensor
};

namespace {

using signpost::FailureTimeout;
using signpost::Gradient;
using signpost::GradientType;
using signpost::GroupRates;
using signpost::LambOptions;
using signpost::OptimizerConfig;
using signpost::OptimizerOptions;
using signpost::Parameter;
using signpost::ReductionOptions;
using signpost::ReductionSession;
using signpost::SavedState;
using signpost::SessionOptions;
using signpost::StateField;
using signpost::StepReport;
using signpost::ZeroOneOptions;
using signpost::config::File;
using signpost::config::SessionSettings;

std::atomic<signpost_interrupt> interrupt = nullptr;
thread_local signpost_interrupt thread_interrupt = nullptr;

struct ReplacedExitStatus {
  int status;
  int code;
};
std::atomic<ReplacedExitStatus> replaced_exit_status = ReplacedExitStatus{0, 0};

absl::Status CheckDirectory(const char* directory) {
  if (directory != nullptr && *directory != '\0') return absl::OkStatus();
  return absl::InvalidArgumentError("a checkpoint needs a directory");
}

bool IsInterrupted() {
  const signpost_interrupt is_interrupted =
      thread_interrupt != nullptr ? thread_interrupt : interrupt.load();
  return is_interrupted != nullptr && is_interrupted() != 0;
}

thread_local absl::Status last_failure;  // of a call on this thread

int Report(const absl::Status& status, char* error, size_t error_size) {
  if (!status.ok()) last_failure = status;
  if (!status.ok() && error != nullptr && error_size > 0) {
    const size_t size = std::min(status.message().size(), error_size - 1);
    std::memcpy(error, status.message().data(), size);
    error[size] = '\0';
  }
  return static_cast<int>(status.code());
}

absl::StatusOr<SessionOptions> SessionOptionsOf(const signpost_options& options) {
  for (const auto& [name, seconds] : {std::pair{"join_timeout_s", options.join_timeout_s},
                                      {"exchange_timeout_s", options.exchange_timeout_s},
                                      {"round_deadline_s", options.round_deadline_s}}) {
    if (!std::isnan(seconds)) continue;
    return absl::InvalidArgumentError(absl::StrCat(name, " is not a number"));
  }
  if (options.exchange_timeout_s <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("exchange_timeout_s is ", options.exchange_timeout_s, ", wanted more than 0"));
  }
  const absl::StatusOr<FailureTimeout> failure_timeout =
      FailureTimeout::Of(absl::Seconds(options.failure_timeout_s));
  if (!failure_timeout.ok()) return failure_timeout.status();
  absl::StatusOr<std::string> trace = signpost::TraceFromEnvironment();
  if (!trace.ok()) return trace.status();
  const absl::StatusOr<uint32_t> connections = signpost::ConnectionsFromEnvironment();
  if (!connections.ok()) return connections.status();
  SessionOptions session;
  session.failure_timeout = *failure_timeout;
  session.connections = *connections;
  session.trace = *std::move(trace);
  if (options.aggregators != nullptr) {
    session.aggregators = signpost::SplitAddresses(options.aggregators);
  }
  if (options.node != nullptr) session.node = options.node;
  if (options.tls_dir != nullptr) session.security.tls_dir = options.tls_dir;
  if (options.token_file != nullptr) session.security.token_file = options.token_file;
  session.security.insecure = options.insecure != 0;
  session.worker.job = options.job;
  session.worker.rank = options.rank;
  session.worker.world_size = options.world_size;
  session.worker.join_timeout = absl::Seconds(options.join_timeout_s);
  session.worker.exchange_timeout = absl::Seconds(options.exchange_timeout_s);
  session.worker.round_deadline = absl::Seconds(options.round_deadline_s);
  session.worker.min_workers = options.min_workers;
  session.worker.block_elements = options.block_elements;
  session.worker.chunk_elements = options.chunk_elements;
  const absl::StatusOr<uint32_t> threads =
      options.threads > 0 ? options.threads : signpost::ThreadsFromEnvironment();
  if (!threads.ok()) return threads.status();
  session.worker.threads = *threads;
  session.worker.gamma = options.gamma;
  session.worker.is_interrupted = IsInterrupted;
  session.worker.resume_with_other_world_size = options.resume_with_other_world_size != 0;
  session.start_from_rank_0 = options.start_from_rank_0 != 0;
  if (options.gpu < -1) {
    return absl::InvalidArgumentError(
        absl::StrCat("gpu is ", options.gpu, ", wanted a GPU, from 0 on, or -1 for the host"));
  }
  if (options.gpu >= 0) session.gpu = options.gpu;
  session.worker.shards = options.shards;
  if (options.sum_over_shards != nullptr) {
    if (options.as_deepspeed != 0 || options.node != nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(
          "sum_over_shards does not go together with ",
          options.node != nullptr ? "a node's worker, which trains whole tensors"
                                  : "as_deepspeed, where a tensor has one scale as a whole"));
    }
    session.worker.sum_over_shards = [sum = options.sum_over_shards,
                                      context = options.sum_context](absl::Span<double> numbers) {
      if (sum(context, numbers.data(), numbers.size()) == 0) return absl::OkStatus();
      return absl::AbortedError("the sums over the shards of the model have failed");
    };
  }
  if (options.codec_library != nullptr) session.worker.codec_library = options.codec_library;
  if (options.codec_options != nullptr) session.worker.codec_options = options.codec_options;
  if (options.resume != nullptr) session.resume = options.resume;
  if (options.resume_state != nullptr) {
    session.resume_state.emplace(static_cast<const char*>(options.resume_state),
                                 options.resume_state_bytes);
  }
  return session;
}

std::optional<LambOptions> LambOptionsOf(const signpost_options& options) {
  if (options.lamb == 0) return std::nullopt;
  return LambOptions{
      .max_coeff = options.max_coeff,
      .min_coeff = options.min_coeff,
      .coeff_beta = options.coeff_beta,
      .factor_max = options.factor_max,
      .factor_min = options.factor_min,
      .factor_threshold = options.factor_threshold,
  };
}

std::optional<ZeroOneOptions> ZeroOneOptionsOf(const signpost_options& options) {
  if (options.zero_one == 0) return std::nullopt;
  return ZeroOneOptions{
      .var_update_scaler = options.var_update_scaler,
      .local_step_scaler = options.local_step_scaler,
      .local_step_clipper = options.local_step_clipper,
  };
}

OptimizerOptions OptimizerOptionsOf(const signpost_options& options) {
  return {
      .bias_correction = options.bias_correction != 0,
      .freeze_step = options.freeze_step,
      .warm_up_codec = static_cast<signpost::Codec>(options.warm_up_codec),
      .codec = static_cast<signpost::Codec>(options.codec),
      .variance_codec = static_cast<signpost::Codec>(options.variance_codec),
      .variance_floor = options.variance_floor,
      .variance_refresh_interval = options.variance_refresh_interval,
      .lamb = LambOptionsOf(options),
      .zero_one = ZeroOneOptionsOf(options),
  };
}

// A copy that stays until the process ends, one of each text; null of an empty one.
const char* KeptOrNull(const std::string& text) {
  static absl::Mutex mutex;
  static auto* const kept = new std::set<std::string>;
  if (text.empty()) return nullptr;
  const absl::MutexLock lock(&mutex);
  return kept->insert(text).first->c_str();
}

// The other way round than OptimizerOptionsOf; what the optimizer does not have gets its default.
void SetOptimizerOptions(const OptimizerOptions& optimizer, signpost_options& options) {
  options.variance_floor = optimizer.variance_floor;
  options.variance_refresh_interval = optimizer.variance_refresh_interval;
  options.lamb = optimizer.lamb.has_value();
  const LambOptions lamb = optimizer.lamb.value_or(LambOptions());
  options.max_coeff = lamb.max_coeff;
  options.min_coeff = lamb.min_coeff;
  options.coeff_beta = lamb.coeff_beta;
  options.factor_max = lamb.factor_max;
  options.factor_min = lamb.factor_min;
  options.factor_threshold = lamb.factor_threshold;
  options.zero_one = optimizer.zero_one.has_value();
  const ZeroOneOptions zero_one = optimizer.zero_one.value_or(ZeroOneOptions());
  options.var_update_scaler = zero_one.var_update_scaler;
  options.local_step_scaler = zero_one.local_step_scaler;
  options.local_step_clipper = zero_one.local_step_clipper;
  options.freeze_step = optimizer.freeze_step;
  options.warm_up_codec = optimizer.warm_up_codec;
  options.codec = optimizer.codec;
  options.variance_codec = optimizer.variance_codec;
  options.bias_correction = optimizer.bias_correction;
}

void SetOptimizer(const OptimizerConfig& config, signpost_options& options) {
  SetOptimizerOptions(config.options, options);
  options.gamma = config.gamma;
  options.codec_library = KeptOrNull(config.codec_library);
  options.codec_options = KeptOrNull(config.codec_options);
  options.as_deepspeed = config.as_deepspeed;
}

signpost_rates RatesOf(const GroupRates& rates) {
  return {rates.learning_rate, rates.weight_decay, rates.beta1, rates.beta2, rates.epsilon};
}

absl::StatusOr<std::optional<File>> FileOf(const char* path, const char* text) {
  if (path == nullptr && text == nullptr) return File::FromEnvironment();
  absl::StatusOr<File> file =
      text == nullptr ? File::Read(path) : File::Parse(path == nullptr ? "config" : path, text);
  if (!file.ok()) return file.status();
  return std::optional<File>(*std::move(file));
}

absl::StatusOr<std::unique_ptr<signpost_config>> ConfigOf(const std::optional<File>& file) {
  auto config = std::make_unique<signpost_config>();
  const absl::StatusOr<SessionSettings> settings =
      SessionSettings::Collect(file.has_value() ? &*file : nullptr);
  if (!settings.ok()) return settings.status();
  for (const signpost::config::Key& key : settings->keys()) {
    if (key.Strongest() != nullptr) config->session[key.name] = key.Strongest()->Text();
  }
  if (!file.has_value() || file->Section("optimizer") == nullptr) return config;
  absl::StatusOr<OptimizerConfig> optimizer = OptimizerConfig::Read(*file);
  if (optimizer.ok()) {
    config->optimizer = *std::move(optimizer);
  } else {
    config->optimizer = optimizer.status();
  }
  return config;
}

// Calls `body`, which may allocate, and lets no exception out.
template <typename Body>
int Guard(char* error, size_t error_size, const Body& body) {
  try {
    return Report(body(), error, error_size);
  } catch (const std::bad_alloc&) {
    return Report(absl::ResourceExhaustedError("out of memory"), error, error_size);
  } catch (const abi::__forced_unwind&) {
    throw;  // the thread is being cancelled
  } catch (const std::exception& exception) {
    return Report(absl::InternalError(exception.what()), error, error_size);
  } catch (...) {
    return Report(absl::InternalError("an exception that is no std::exception"), error, error_size);
  }
}

// The same on a session or reduction, which a fork of the process that has joined has no part in.
template <typename Joined, typename Body>
int GuardOn(const Joined* joined, char* error, size_t error_size, const Body& body) {
  return Guard(error, error_size, [&]() -> absl::Status {
    const absl::Status status = joined->session->owner().Check();
    return status.ok() ? body() : status;
  });
}

// In a fork it stays: destroying it would wait for threads that are not there.
template <typename Joined>
void Close(Joined* joined) {
  if (joined != nullptr && joined->session->owner().IsThisProcess()) delete joined;
}

absl::StatusOr<const SavedState*> PartsOf(signpost_state& state) {
  if (!state.parts) {
    absl::StatusOr<SavedState> parts = SavedState::Read(state.bytes);
    if (!parts.ok()) return parts.status();
    state.parts = *std::move(parts);
  }
  return &*state.parts;
}

Parameter ParameterOf(const signpost_parameter& parameter) {
  Parameter result;
  result.name = parameter.name;
  result.shape.assign(parameter.shape, parameter.shape + parameter.dimensions);
  size_t elements = 1;
  for (uint64_t size : result.shape) elements *= size;
  result.values = {parameter.values, elements};
  result.group = parameter.group;
  result.whole_elements = parameter.whole_elements;
  return result;
}

// Of no size where there is no such parameter.
Gradient GradientOf(const signpost_session& session, size_t parameter, const void* values) {
  Gradient gradient;
  if (parameter < session.gradients.size()) gradient = session.gradients[parameter];
  gradient.values = values;
  return gradient;
}

absl::StatusOr<GradientType> GradientTypeOf(const signpost_parameter& parameter) {
  switch (parameter.gradient_type) {
    case SIGNPOST_GRADIENT_FP32:
      return GradientType::kFloat32;
    case SIGNPOST_GRADIENT_BF16:
      return GradientType::kBfloat16;
    case SIGNPOST_GRADIENT_FP16:
      return GradientType::kFloat16;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("gradient_type of parameter ", parameter.name, " is ",
                       parameter.gradient_type, "; there are 0 (fp32), 1 (bf16) and 2 (fp16)"));
  }
}

std::vector<GroupRates> GroupRatesOf(const signpost_rates* rates, size_t count) {
  std::vector<GroupRates> groups;
  for (const signpost_rates& group : absl::MakeSpan(rates, count)) {
    groups.push_back(
        {group.learning_rate, group.weight_decay, group.beta1, group.beta2, group.epsilon});
  }
  return groups;
}

// The tensors of a session or reduction, and their sizes in elements.
struct Tensors {
  std::vector<Parameter> tensors;
  std::vector<size_t> sizes;
};

absl::StatusOr<Tensors> TensorsOf(const signpost_parameter* parameters, size_t count) {
  Tensors result;
  for (const signpost_parameter& parameter : absl::MakeSpan(parameters, count)) {
    if (parameter.name == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", result.tensors.size(), " has no name"));
    }
    if (parameter.shape == nullptr && parameter.dimensions > 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parameter ", parameter.name, " has ", parameter.dimensions, " dimensions and no shape"));
    }
    result.tensors.push_back(ParameterOf(parameter));
    result.sizes.push_back(result.tensors.back().values.size());
  }
  return result;
}

absl::Status CheckHasJob(const signpost_options& options) {
  const bool has_target = options.aggregators != nullptr || options.node != nullptr;
  if (has_target && options.job != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError("options need aggregators, or a node, and a job");
}

signpost_report ReportOf(const StepReport& step, const signpost::WireBytes& bytes) {
  signpost_report report = {};
  report.step = step.step;
  report.steps_caught_up = step.steps_caught_up;
  report.late_rounds = step.late_rounds;
  report.codec = static_cast<uint32_t>(step.codec);
  report.skipped_rounds = step.skipped.size();
  report.skipped_by_rank = step.skipped.empty() ? 0 : step.skipped.front().rank;
  report.kernels_s = absl::ToDoubleSeconds(step.kernels);
  report.wire_s = absl::ToDoubleSeconds(step.wire);
  report.wait_s = absl::ToDoubleSeconds(step.wait);
  report.sent_bits = step.sent_bits;
  report.sent_bytes = bytes.sent;
  report.received_bytes = bytes.received;
  return report;
}

}  // namespace

uint32_t signpost_abi(void) { return SIGNPOST_ABI; }

int signpost_has_cuda(void) { return signpost::kernels::cuda::CanOpenGpus() ? 1 : 0; }

void signpost_set_interrupt(signpost_interrupt is_interrupted) { interrupt = is_interrupted; }

void signpost_set_thread_interrupt(signpost_interrupt is_interrupted) {
  thread_interrupt = is_interrupted;
}

int signpost_exit_code(int code) {
  const auto status_code = static_cast<absl::StatusCode>(code);
  const bool is_last = last_failure.code() == status_code;
  return signpost::ExitCodeOf(is_last ? last_failure : absl::Status(status_code, ""));
}

void signpost_replace_exit_status(int status, int code) {
  replaced_exit_status = ReplacedExitStatus{status, code};
  // glibc goes on with the handlers that are left when one of them calls exit().
  static const int registered = on_exit(
      [](int status, void*) {
        const ReplacedExitStatus replaced = replaced_exit_status;
        if (status == replaced.status && status != replaced.code) exit(replaced.code);
      },
      nullptr);
  static_cast<void>(registered);
}

void signpost_options_init(signpost_options* options) {
  const SessionOptions session;
  const OptimizerOptions optimizer;
  *options = {};
  options->world_size = session.worker.world_size;
  options->join_timeout_s = absl::ToDoubleSeconds(session.worker.join_timeout);
  options->exchange_timeout_s = absl::ToDoubleSeconds(session.worker.exchange_timeout);
  options->failure_timeout_s = absl::ToDoubleSeconds(session.failure_timeout.duration());
  options->gpu = -1;
  options->shards = 1;
  options->block_elements = session.worker.block_elements;
  options->chunk_elements = session.worker.chunk_elements;
  options->threads = 0;
  options->gamma = session.worker.gamma;
  SetOptimizerOptions(optimizer, *options);
}

void signpost_rates_init(signpost_rates* rates) { *rates = RatesOf(GroupRates()); }

int signpost_options_from_environment(signpost_options* options, char* error, size_t error_size) {
  return Guard(error, error_size, [&] {
    absl::StatusOr<SessionOptions> session = SessionOptions::FromEnvironment();
    if (!session.ok()) return session.status();
    signpost_options_init(options);
    options->aggregators = KeptOrNull(absl::StrJoin(session->aggregators, ","));
    options->node = KeptOrNull(session->node);
    options->tls_dir = KeptOrNull(session->security.tls_dir);
    options->token_file = KeptOrNull(session->security.token_file);
    options->insecure = session->security.insecure;
    options->job = KeptOrNull(session->worker.job);
    options->rank = session->worker.rank;
    options->world_size = session->worker.world_size;
    options->threads = session->worker.threads;
    options->join_timeout_s = absl::ToDoubleSeconds(session->worker.join_timeout);
    options->exchange_timeout_s = absl::ToDoubleSeconds(session->worker.exchange_timeout);
    options->failure_timeout_s = absl::ToDoubleSeconds(session->failure_timeout.duration());
    options->round_deadline_s = absl::ToDoubleSeconds(session->worker.round_deadline);
    options->min_workers = session->worker.min_workers;
    return absl::OkStatus();
  });
}

int signpost_config_open(const char* path, const char* text, signpost_config** config, char* error,
                         size_t error_size) {
  return Guard(error, error_size, [&] {
    const absl::StatusOr<std::optional<File>> file = FileOf(path, text);
    if (!file.ok()) return file.status();
    absl::StatusOr<std::unique_ptr<signpost_config>> read = ConfigOf(*file);
    if (!read.ok()) return read.status();
    *config = read->release();
    return absl::OkStatus();
  });
}

void signpost_config_close(signpost_config* config) { delete config; }

int signpost_config_optimizer(const signpost_config* config, signpost_options* options,
                              signpost_rates* rates, char* error, size_t error_size) {
  return Guard(error, error_size, [&] {
    if (!config->optimizer.ok()) return config->optimizer.status();
    if (!config->optimizer->has_value()) {
      return absl::InvalidArgumentError("there is no configuration with a section 'optimizer'");
    }
    const OptimizerConfig& optimizer = **config->optimizer;
    if (optimizer.max_grad_norm > 0) {
      return absl::InvalidArgumentError(
          "max_grad_norm of section 'optimizer' is for Python alone: clip gradients yourself");
    }
    if (absl::Status status = optimizer.Check(); !status.ok()) return status;
    SetOptimizer(optimizer, *options);
    *rates = RatesOf(optimizer.rates);
    return absl::OkStatus();
  });
}

int signpost_config_optimizer_json(const signpost_config* config, const char** json, char* error,
                                   size_t error_size) {
  return Guard(error, error_size, [&] {
    if (!config->optimizer.ok()) return config->optimizer.status();
    *json = config->optimizer->has_value() ? (*config->optimizer)->json.c_str() : nullptr;
    return absl::OkStatus();
  });
}

const char* signpost_config_session(const signpost_config* config, const char* key) {
  const auto found = config->session.find(absl::string_view(key));
  return found == config->session.end() ? nullptr : found->second.c_str();
}

int signpost_join(const signpost_options* options, const signpost_parameter* parameters,
                  size_t parameter_count, signpost_session** session, char* error,
                  size_t error_size) {
  return Guard(error, error_size, [&] {
    if (absl::Status status = CheckHasJob(*options); !status.ok()) return status;
    absl::StatusOr<SessionOptions> session_options = SessionOptionsOf(*options);
    if (!session_options.ok()) return session_options.status();
    OptimizerOptions optimizer = OptimizerOptionsOf(*options);
    absl::StatusOr<Tensors> tensors = TensorsOf(parameters, parameter_count);
    if (!tensors.ok()) return tensors.status();
    std::vector<Gradient> gradients;
    for (size_t i = 0; i < parameter_count; ++i) {
      const absl::StatusOr<GradientType> type = GradientTypeOf(parameters[i]);
      if (!type.ok()) return type.status();
      if (*type != GradientType::kFloat32 && !session_options->gpu) {
        return absl::InvalidArgumentError(absl::StrCat(
            "gradient_type of parameter ", parameters[i].name, ": on the host gradients are fp32"));
      }
      gradients.emplace_back(nullptr, tensors->sizes[i], *type);
    }
    if (options->as_deepspeed != 0) {
      signpost::SetAsDeepSpeed(tensors->tensors, *session_options, optimizer);
    }
    auto joined = signpost::Session::Join(*session_options, optimizer, std::move(tensors->tensors));
    if (!joined.ok()) return joined.status();
    std::string warnings = absl::StrJoin((*joined)->resumed().warnings, "\n");
    *session = new signpost_session{*std::move(joined), std::move(gradients), std::move(warnings)};
    return absl::OkStatus();
  });
}

int signpost_set_stream(signpost_session* session, void* stream, char* error, size_t error_size) {
  return GuardOn(session, error, error_size,
                 [&] { return session->session->SetStream(static_cast<CUstream_st*>(stream)); });
}

int signpost_step(signpost_session* session, const void* const* gradients, size_t gradient_count,
                  const signpost_rates* rates, size_t rates_count, signpost_report* report,
                  char* error, size_t error_size) {
  return GuardOn(session, error, error_size, [&] {
    std::vector<Gradient> all;
    for (size_t i = 0; i < gradient_count; ++i)
      all.push_back(GradientOf(*session, i, gradients[i]));
    absl::StatusOr<StepReport> step = session->session->Step(all, GroupRatesOf(rates, rates_count));
    if (!step.ok()) return step.status();
    if (report != nullptr) *report = ReportOf(*step, session->session->wire_bytes());
    return absl::OkStatus();
  });
}

int signpost_begin_step(signpost_session* session, const signpost_rates* rates, size_t rates_count,
                        char* error, size_t error_size) {
  return GuardOn(session, error, error_size,
                 [&] { return session->session->BeginStep(GroupRatesOf(rates, rates_count)); });
}

int signpost_gradient_ready(signpost_session* session, size_t parameter, const void* gradient,
                            char* error, size_t error_size) {
  return GuardOn(session, error, error_size, [&] {
    return session->session->GradientReady(parameter, GradientOf(*session, parameter, gradient));
  });
}

int signpost_finish_step(signpost_session* session, signpost_report* report, char* error,
                         size_t error_size) {
  return GuardOn(session, error, error_size, [&] {
    absl::StatusOr<StepReport> step = session->session->FinishStep();
    if (!step.ok()) return step.status();
    if (report != nullptr) *report = ReportOf(*step, session->session->wire_bytes());
    return absl::OkStatus();
  });
}

int signpost_checkpoint(signpost_session* session, const char* directory, char* error,
                        size_t error_size) {
  return GuardOn(session, error, error_size, [&] {
    if (absl::Status status = CheckDirectory(directory); !status.ok()) return status;
    return session->session->Checkpoint(directory);
  });
}

int signpost_checkpoint_step(const char* directory, uint64_t* step, char* error,
                             size_t error_size) {
  return Guard(error, error_size, [&] {
    if (absl::Status status = CheckDirectory(directory); !status.ok()) return status;
    const absl::StatusOr<uint64_t> newest = signpost::CheckpointStep(directory);
    if (newest.ok()) *step = *newest;
    return newest.status();
  });
}

int signpost_save_state(signpost_session* session, signpost_state** state, char* error,
                        size_t error_size) {
  return GuardOn(session, error, error_size, [&] {
    absl::StatusOr<std::string> saved = session->session->SaveState();
    if (!saved.ok()) return saved.status();
    *state = new signpost_state{*std::move(saved)};
    return absl::OkStatus();
  });
}

const void* signpost_state_data(const signpost_state* state, size_t* bytes) {
  *bytes = state->bytes.size();
  return state->bytes.data();
}

void signpost_free_state(signpost_state* state) { delete state; }

int signpost_state_description(signpost_state* state, const char** json, char* error,
                               size_t error_size) {
  return Guard(error, error_size, [&] {
    const absl::StatusOr<const SavedState*> parts = PartsOf(*state);
    if (!parts.ok()) return parts.status();
    if (state->description.empty()) state->description = (*parts)->Description();
    *json = state->description.c_str();
    return absl::OkStatus();
  });
}

int signpost_state_field(signpost_state* state, size_t tensor, uint32_t field, float* values,
                         size_t* elements, char* error, size_t error_size) {
  return Guard(error, error_size, [&] {
    const absl::StatusOr<const SavedState*> parts = PartsOf(*state);
    if (!parts.ok()) return parts.status();
    if (tensor >= (*parts)->tensors() || field > SIGNPOST_FIELD_PLACED_AGGREGATOR_ERROR) {
      return absl::InvalidArgumentError(
          absl::StrCat("there is no field ", field, " of tensor ", tensor, ": the state has ",
                       (*parts)->tensors(), " tensors with ",
                       SIGNPOST_FIELD_PLACED_AGGREGATOR_ERROR + 1, " fields each"));
    }
    const size_t wanted = (*parts)->FieldElements(tensor, static_cast<StateField>(field));
    if (values != nullptr && *elements < wanted) {
      return absl::InvalidArgumentError(
          absl::StrCat("there is room for ", *elements, " numbers, wanted ", wanted));
    }
    *elements = wanted;
    if (values == nullptr) return absl::OkStatus();
    const std::vector<float> numbers = (*parts)->Field(tensor, static_cast<StateField>(field));
    std::copy(numbers.begin(), numbers.end(), values);
    return absl::OkStatus();
  });
}

int signpost_state_make(const char* description, uint32_t rank, uint32_t world_size,
                        const signpost_parameter* parameters, size_t parameter_count,
                        const signpost_numbers* numbers, signpost_state** state, char* error,
                        size_t error_size) {
  return Guard(error, error_size, [&]() -> absl::Status {
    std::vector<signpost::Tensor> tensors(parameter_count);
    std::vector<signpost::TensorFields> fields(parameter_count);
    for (size_t t = 0; t < parameter_count; ++t) {
      if (parameters[t].name == nullptr) {
        return absl::InvalidArgumentError(absl::StrCat("parameter ", t, " has no name"));
      }
      tensors[t].set_name(parameters[t].name);
      tensors[t].mutable_shape()->Add(parameters[t].shape,
                                      parameters[t].shape + parameters[t].dimensions);
      for (size_t f = 0; f < SIGNPOST_FIELDS; ++f) {
        const signpost_numbers& field = numbers[t * SIGNPOST_FIELDS + f];
        if (field.values != nullptr) fields[t][f] = {field.values, field.elements};
      }
    }
    absl::StatusOr<std::string> made = signpost::MakeState(
        description, {.rank = rank, .world_size = world_size, .tensors = tensors}, fields);
    if (!made.ok()) return made.status();
    *state = new signpost_state{*std::move(made)};
    return absl::OkStatus();
  });
}

uint64_t signpost_steps(const signpost_session* session) { return session->session->steps(); }

const char* signpost_resume_warnings(const signpost_session* session) {
  return session->resume_warnings.c_str();
}

int signpost_returned(const signpost_session* session, double* lost_error_norm) {
  const std::optional<signpost::Returned>& returned = session->session->returned();
  if (!returned) return 0;
  if (lost_error_norm != nullptr) {
    *lost_error_norm = returned->lost_error_norm.value_or(std::numeric_limits<double>::quiet_NaN());
  }
  return 1;
}

int signpost_is_synchronised(const signpost_session* session) {
  return session->session->is_synchronised() ? 1 : 0;
}

uint32_t signpost_parameters_crc32c(const signpost_session* session) {
  return session->session->ParametersCrc32c();
}

int signpost_leave(signpost_session* session, char* error, size_t error_size) {
  return GuardOn(session, error, error_size, [&] { return session->session->Leave(); });
}

void signpost_close(signpost_session* session) { Close(session); }

int signpost_reduction_join(const signpost_options* options, const char* name, uint32_t codec,
                            uint8_t sum, const signpost_parameter* tensors, size_t tensor_count,
                            signpost_reduction** reduction, char* error, size_t error_size) {
  return Guard(error, error_size, [&] {
    if (absl::Status status = CheckHasJob(*options); !status.ok()) return status;
    const absl::StatusOr<SessionOptions> session_options = SessionOptionsOf(*options);
    if (!session_options.ok()) return session_options.status();
    absl::StatusOr<Tensors> of_caller = TensorsOf(tensors, tensor_count);
    if (!of_caller.ok()) return of_caller.status();
    const ReductionOptions reduction_options = {.codec = static_cast<signpost::Codec>(codec),
                                                .sum = sum != 0};
    auto joined = ReductionSession::Join(*session_options, name == nullptr ? "" : name,
                                         reduction_options, std::move(of_caller->tensors));
    if (!joined.ok()) return joined.status();
    *reduction = new signpost_reduction{*std::move(joined), std::move(of_caller->sizes)};
    return absl::OkStatus();
  });
}

int signpost_reduction_set_stream(signpost_reduction* reduction, void* stream, char* error,
                                  size_t error_size) {
  return GuardOn(reduction, error, error_size,
                 [&] { return reduction->session->SetStream(static_cast<CUstream_st*>(stream)); });
}

int signpost_reduce(signpost_reduction* reduction, float* const* values, size_t value_count,
                    signpost_report* report, char* error, size_t error_size) {
  return GuardOn(reduction, error, error_size, [&] {
    const std::vector<size_t>& sizes = reduction->sizes;
    std::vector<absl::Span<float>> spans;
    for (size_t i = 0; i < value_count; ++i) {
      spans.emplace_back(values[i], i < sizes.size() ? sizes[i] : 0);
    }
    absl::StatusOr<StepReport> reduced = reduction->session->Reduce(spans);
    if (!reduced.ok()) return reduced.status();
    if (report != nullptr) *report = ReportOf(*reduced, reduction->session->wire_bytes());
    return absl::OkStatus();
  });
}

int signpost_reduction_leave(signpost_reduction* reduction, char* error, size_t error_size) {
  return GuardOn(reduction, error, error_size, [&] { return reduction->session->Leave(); });
}

void signpost_reduction_close(signpost_reduction* reduction) { Close(reduction); }
