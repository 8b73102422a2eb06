#include "node/definition.h"

#include <cstdint>
#include <filesystem>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "google/protobuf/util/message_differencer.h"

namespace signpost::node {
namespace {

template <class Message>
absl::Status Compare(const Message& theirs, const Message& job) {
  std::string differences;
  google::protobuf::util::MessageDifferencer differencer;
  differencer.ReportDifferencesToString(&differences);
  if (differencer.Compare(job, theirs)) return absl::OkStatus();
  // "modified: freeze_step: 400 -> 500"
  return absl::FailedPreconditionError(
      absl::StrCat("an option is not the job's (there -> here): ",
                   absl::StripTrailingAsciiWhitespace(differences)));
}

}  // namespace

Definition DefinitionOf(const SessionOptions& options, const OptimizerOptions& optimizer,
                        absl::Span<const Parameter> parameters) {
  Definition definition;
  for (const Parameter& parameter : parameters) {
    *definition.add_tensors() = TensorOf(parameter);
    definition.add_groups(parameter.group);
  }
  const WorkerOptions& worker = options.worker;
  Options& to = *definition.mutable_options();
  to.set_block_elements(worker.block_elements);
  to.set_chunk_elements(worker.chunk_elements);
  to.set_gamma(worker.gamma);
  to.set_join_timeout_us(absl::ToInt64Microseconds(worker.join_timeout));
  to.set_exchange_timeout_us(absl::ToInt64Microseconds(worker.exchange_timeout));
  to.set_round_deadline_us(absl::ToInt64Microseconds(worker.round_deadline));
  to.set_min_workers(worker.min_workers);
  if (!worker.codec_library.empty()) {
    to.set_codec_library(std::filesystem::absolute(worker.codec_library).string());
  }
  to.set_codec_options(worker.codec_options);
  // By name, so that an option that is new does not compile before it is here too.
  const auto& [bias_correction, freeze_step, warm_up_codec, codec, variance_codec, variance_floor,
               variance_refresh_interval, lamb, zero_one, as_deepspeed] = optimizer;
  to.set_as_deepspeed(as_deepspeed);
  to.set_bias_correction(bias_correction);
  to.set_freeze_step(freeze_step);
  to.set_warm_up_codec(warm_up_codec);
  to.set_codec(codec);
  to.set_variance_codec(variance_codec);
  to.set_variance_floor(variance_floor);
  to.set_variance_refresh_interval(variance_refresh_interval);
  if (lamb) {
    const auto& [max_coeff, min_coeff, coeff_beta, factor_max, factor_min, factor_threshold] =
        *lamb;
    Lamb& to_lamb = *to.mutable_lamb();
    to_lamb.set_max_coeff(max_coeff);
    to_lamb.set_min_coeff(min_coeff);
    to_lamb.set_coeff_beta(coeff_beta);
    to_lamb.set_factor_max(factor_max);
    to_lamb.set_factor_min(factor_min);
    to_lamb.set_factor_threshold(factor_threshold);
  }
  if (zero_one) {
    const auto& [var_update_scaler, local_step_scaler, local_step_clipper] = *zero_one;
    ZeroOne& to_zero_one = *to.mutable_zero_one();
    to_zero_one.set_var_update_scaler(var_update_scaler);
    to_zero_one.set_local_step_scaler(local_step_scaler);
    to_zero_one.set_local_step_clipper(local_step_clipper);
  }
  return definition;
}

void SetWorkerOptions(const Options& from, WorkerOptions& options) {
  options.block_elements = from.block_elements();
  options.chunk_elements = from.chunk_elements();
  options.gamma = from.gamma();
  options.join_timeout = absl::Microseconds(from.join_timeout_us());
  options.exchange_timeout = absl::Microseconds(from.exchange_timeout_us());
  options.round_deadline = absl::Microseconds(from.round_deadline_us());
  options.min_workers = from.min_workers();
  options.codec_library = from.codec_library();
  options.codec_options = from.codec_options();
}

OptimizerOptions OptimizerOptionsOf(const Options& options) {
  OptimizerOptions optimizer = {
      .bias_correction = options.bias_correction(),
      .freeze_step = options.freeze_step(),
      .warm_up_codec = options.warm_up_codec(),
      .codec = options.codec(),
      .variance_codec = options.variance_codec(),
      .variance_floor = options.variance_floor(),
      .variance_refresh_interval = options.variance_refresh_interval(),
      .as_deepspeed = options.as_deepspeed(),
  };
  if (options.has_lamb()) {
    const Lamb& lamb = options.lamb();
    optimizer.lamb = {.max_coeff = lamb.max_coeff(),
                      .min_coeff = lamb.min_coeff(),
                      .coeff_beta = lamb.coeff_beta(),
                      .factor_max = lamb.factor_max(),
                      .factor_min = lamb.factor_min(),
                      .factor_threshold = lamb.factor_threshold()};
  }
  if (options.has_zero_one()) {
    const ZeroOne& zero_one = options.zero_one();
    optimizer.zero_one = {.var_update_scaler = zero_one.var_update_scaler(),
                          .local_step_scaler = zero_one.local_step_scaler(),
                          .local_step_clipper = zero_one.local_step_clipper()};
  }
  return optimizer;
}

std::vector<Parameter> ParametersOf(const Definition& definition, absl::Span<float> values) {
  std::vector<Parameter> parameters;
  size_t first = 0;
  for (int i = 0; i < definition.tensors_size(); ++i) {
    const Tensor& tensor = definition.tensors(i);
    const size_t elements = ElementCount(tensor);
    parameters.push_back({tensor.name(),
                          {tensor.shape().begin(), tensor.shape().end()},
                          values.subspan(first, elements),
                          definition.groups(i)});
    first += elements;
  }
  return parameters;
}

absl::StatusOr<Layout> LayOut(const Definition& definition) {
  if (definition.groups_size() != definition.tensors_size()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "groups of %d tensors, of %d", definition.groups_size(), definition.tensors_size()));
  }
  const std::vector<Tensor> tensors(definition.tensors().begin(), definition.tensors().end());
  JobOptions options;
  options.set_block_elements(definition.options().block_elements());
  options.set_chunk_elements(definition.options().chunk_elements());
  options.set_gamma(definition.options().gamma());
  if (options.chunk_elements() == 0) {
    uint64_t elements = 0;
    for (const Tensor& tensor : tensors) elements += ElementCount(tensor);
    // These chunks are for the means over a node's processes. The worker's exchange has its own.
    options.set_chunk_elements(
        SuitableChunkElements(elements, options.block_elements(), /*workers=*/2));
  }
  return Layout::Create(tensors, options);
}

absl::Status CheckSame(const Definition& theirs, const Definition& job, const Layout& layout) {
  const std::vector<Tensor> tensors(theirs.tensors().begin(), theirs.tensors().end());
  absl::Status status = CheckSameJob(tensors, layout.options(), layout);
  if (!status.ok()) return status;
  for (int i = 0; i < job.groups_size(); ++i) {
    if (i < theirs.groups_size() && theirs.groups(i) == job.groups(i)) continue;
    return absl::FailedPreconditionError(
        absl::StrFormat("tensor %d, %s, is in another parameter group than in the job, %d", i,
                        DescribeTensor(tensors[i]), job.groups(i)));
  }
  return Compare(theirs.options(), job.options());
}

absl::Status CheckSame(const Start& theirs, const Start& job) {
  if (theirs.has_resume_state() != job.has_resume_state()) {
    return absl::FailedPreconditionError(
        "some processes of the node resume from a state of their own, and others do not");
  }
  Start here = theirs, there = job;
  here.clear_resume_state();
  there.clear_resume_state();
  return Compare(here, there);
}

}  // namespace signpost::node
