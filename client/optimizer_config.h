// The section `optimizer` of a configuration file, in the form that DeepSpeed's files have:
//
//   optimizer: {type: OneBitAdam, params: {lr: 1e-3, betas: [0.9, 0.999], freeze_step: 400}}
//
// Types are Adam (or AdamW), OneBitAdam, OneBitLamb and ZeroOneAdam, in any case. Params are those
// of the Python classes of these names and DeepSpeed's; docs/configuration.md lists them. What has
// no meaning here, such as cuda_aware, is accepted and said to be ignored. A codec from outside is
// named as its shared object, with or without options of its own: [./libtopk.so, ratio=0.05].

#ifndef SIGNPOST_CLIENT_OPTIMIZER_CONFIG_H_
#define SIGNPOST_CLIENT_OPTIMIZER_CONFIG_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "config/file.h"
#include "config/setting.h"
#include "worker/onebit_adam.h"
#include "worker/worker.h"

namespace signpost {

struct OptimizerConfig {
  std::string type;  // "OneBitAdam"
  OptimizerOptions options;
  GroupRates rates;                     // of every group
  float gamma = WorkerOptions().gamma;  // for SessionOptions::worker
  std::string codec_library;            // CUSTOM's, likewise, as is
  std::string codec_options;            // this
  bool as_deepspeed = false;            // compat: deepspeed; for SetAsDeepSpeed (session.h)
  // For those who clip, as the Python SDK does: gradients' greatest norm; 0: any.
  double max_grad_norm = 0;

  // What was given, for other languages: {"type": "OneBitAdam", "params": {"lr": 0.001, ...}},
  // without what is ignored.
  std::string json;
  std::vector<config::Key> keys;  // type and params, for people
  std::string missing;            // a param that the type cannot do without

  // INVALID_ARGUMENT, with the line, for an unknown type or param, with a suggestion, or a value
  // that is none. Whether the options fit together is for Check.
  static absl::StatusOr<OptimizerConfig> Read(const config::File& file);
  // Of the file that SIGNPOST_CONFIG names; checked.
  static absl::StatusOr<OptimizerConfig> FromEnvironment();

  // INVALID_ARGUMENT for what is missing, and as CheckOptions and CheckRates.
  absl::Status Check() const;
};

// A param of one or more types.
struct OptimizerParam {
  std::string name, types, kind, standard, meaning;
};

// All of them, for docs/configuration.md.
std::vector<OptimizerParam> OptimizerParams();

}  // namespace signpost

#endif  // SIGNPOST_CLIENT_OPTIMIZER_CONFIG_H_
