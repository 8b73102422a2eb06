#include "client/optimizer_config.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "config/document.h"
#include "config/suggestion.h"
#include "nlohmann/json.hpp"

namespace signpost {
namespace {

using config::Document;
using config::Entry;
using config::Node;

enum Types : unsigned { kAdam = 1, kOneBitAdam = 2, kOneBitLamb = 4, kZeroOneAdam = 8 };
constexpr unsigned kNotAdam = kOneBitAdam | kOneBitLamb | kZeroOneAdam;
constexpr unsigned kAll = kAdam | kNotAdam;

struct NamedType {
  const char* name;
  Types type;
};
constexpr NamedType kTypes[] = {{"Adam", kAdam},
                                {"AdamW", kAdam},
                                {"OneBitAdam", kOneBitAdam},
                                {"OneBitLamb", kOneBitLamb},
                                {"ZeroOneAdam", kZeroOneAdam}};

// A param's value in the file.
struct Value {
  const Document& document;
  const Entry& entry;

  absl::Status Wanted(absl::string_view wanted) const {
    const Node& node = entry.value;
    if (node.text == "auto") {
      return document.Error(node.line,
                            absl::StrCat(entry.key,
                                         " is 'auto', which is for Hugging Face's Trainer to "
                                         "fill in: write what it should be"));
    }
    return document.Error(node.line,
                          absl::StrCat(entry.key, " is ", node.Describe(), ", wanted ", wanted));
  }
};

// What a param's value is in JSON; empty: nothing that other languages need to know.
using Json = absl::StatusOr<std::string>;

std::optional<double> FiniteNumber(const Node& node) {
  double number;
  if (node.kind != Node::Kind::kScalar || !absl::SimpleAtod(node.text, &number) ||
      !std::isfinite(number)) {
    return std::nullopt;
  }
  return number;
}

Json Number(const Value& value, double& number) {
  const std::optional<double> parsed = FiniteNumber(value.entry.value);
  if (!parsed.has_value()) return value.Wanted("a number");
  number = *parsed;
  return absl::StrFormat("%.17g", number);
}

template <typename Integer>
Json Count(const Value& value, Integer& count) {
  const Node& node = value.entry.value;
  if (node.kind != Node::Kind::kScalar || !absl::SimpleAtoi(node.text, &count)) {
    return value.Wanted("a whole number from 0 on");
  }
  return absl::StrCat(count);
}

Json CountOrAuto(const Value& value, uint64_t& count) {
  if (value.entry.value.text != "auto") return Count(value, count);
  count = OptimizerOptions::kAuto;
  return "\"auto\"";
}

Json Switch(const Value& value, bool& on) {
  const std::optional<bool> parsed = config::ParseSwitch(value.entry.value.text);
  if (!parsed.has_value()) return value.Wanted("true or false");
  on = *parsed;
  return on ? "true" : "false";
}

// What DeepSpeed can be told to do, and Signpost cannot.
Json Only(const Value& value, bool wanted, absl::string_view why) {
  bool on;
  const Json json = Switch(value, on);
  if (!json.ok() || on == wanted) return json.ok() ? "" : json;
  return value.Wanted(absl::StrCat(wanted ? "true" : "false", ": ", why));
}

Json Betas(const Value& value, GroupRates& rates) {
  const Node& node = value.entry.value;
  constexpr char kWanted[] = "two numbers, such as [0.9, 0.999]";
  if (node.items.size() != 2) return value.Wanted(kWanted);
  const std::optional<double> beta1 = FiniteNumber(node.items[0]);
  const std::optional<double> beta2 = FiniteNumber(node.items[1]);
  if (!beta1.has_value() || !beta2.has_value()) return value.Wanted(kWanted);
  rates.beta1 = *beta1;
  rates.beta2 = *beta2;
  return absl::StrFormat("[%.17g, %.17g]", rates.beta1, rates.beta2);
}

// By its name, or, from outside, as its shared object: ./libtopk.so or [./libtopk.so, ratio=0.05].
Json CodecOf(const Value& value, Codec& codec, OptimizerConfig& config) {
  constexpr std::pair<const char*, Codec> kCodecs[] = {{"fp32", FLOAT32}, {"bf16", BFLOAT16},
                                                       {"fp16", FLOAT16}, {"int8", INT8},
                                                       {"int4", INT4},    {"onebit", ONE_BIT}};
  const Node& node = value.entry.value;
  for (const auto& [name, of_name] : kCodecs) {
    if (node.text != name) continue;
    codec = of_name;
    return absl::StrCat("\"", name, "\"");
  }
  const std::vector<Node>& items = node.items;
  const std::string& library = items.empty() ? node.text : items[0].text;
  const std::string options = items.size() == 2 ? items[1].text : "";
  if (items.size() > 2 || !(absl::StrContains(library, '/') || absl::EndsWith(library, ".so"))) {
    return value.Wanted(
        "fp32, bf16, fp16, int8, int4 or onebit, or a shared object, such as ./libtopk.so, or "
        "[./libtopk.so, ratio=0.05] with options of its own");
  }
  const bool is_another = config.codec_library != library || config.codec_options != options;
  if (!config.codec_library.empty() && is_another) {
    return value.Wanted(absl::StrCat("the same codec from outside as the param before, ",
                                     config::Quoted(config.codec_library), " with options ",
                                     config::Quoted(config.codec_options), ": a job has one"));
  }
  codec = CUSTOM;
  config.codec_library = library;
  config.codec_options = options;
  return nlohmann::json({library, options}).dump();
}

Json Gamma(const Value& value, float& gamma) {
  double number = 0;
  Json json = Number(value, number);
  if (json.ok()) gamma = static_cast<float>(number);
  return json;
}

Json MaxGradNorm(const Value& value, double& norm) {
  Json json = Number(value, norm);
  if (json.ok() && norm < 0) return value.Wanted("a positive number, or 0 for none");
  return json.ok() && norm == 0 ? "" : json;
}

Json Compat(const Value& value, bool& as_deepspeed) {
  if (value.entry.value.text != "deepspeed") return value.Wanted("deepspeed");
  as_deepspeed = true;
  return "\"deepspeed\"";
}

struct Param {
  const char* name;
  unsigned types;
  const char* kind;
  const char* standard;
  const char* meaning;
  Json (*read)(const Value& value, OptimizerConfig& config);  // null: it is ignored
};

constexpr char kIgnored[] = "DeepSpeed's; ignored";

constexpr Param kParams[] = {
    {"lr", kAll, "number", "0.001", "learning rate",
     [](const Value& v, OptimizerConfig& c) { return Number(v, c.rates.learning_rate); }},
    {"betas", kAll, "two numbers", "[0.9, 0.999]", "of momentum and variance",
     [](const Value& v, OptimizerConfig& c) { return Betas(v, c.rates); }},
    {"eps", kAll, "number", "1e-08", "is added to the variance's root",
     [](const Value& v, OptimizerConfig& c) { return Number(v, c.rates.epsilon); }},
    {"weight_decay", kAll, "number", "0", "decoupled",
     [](const Value& v, OptimizerConfig& c) { return Number(v, c.rates.weight_decay); }},
    {"bias_correction", kAll, "true or false", "true", "of the moments",
     [](const Value& v, OptimizerConfig& c) { return Switch(v, c.options.bias_correction); }},
    {"max_grad_norm", kAll, "number", "none", "gradients are clipped to this norm; in Python only",
     [](const Value& v, OptimizerConfig& c) { return MaxGradNorm(v, c.max_grad_norm); }},
    {"freeze_step", kOneBitAdam, "number or auto", "auto",
     "steps of dense warm-up; auto: until the variance fits the gradients",
     [](const Value& v, OptimizerConfig& c) { return CountOrAuto(v, c.options.freeze_step); }},
    {"freeze_step", kOneBitLamb, "number or auto", "",
     "steps of dense warm-up; auto: until the variance fits the gradients",
     [](const Value& v, OptimizerConfig& c) { return CountOrAuto(v, c.options.freeze_step); }},
    {"variance_refresh_interval", kOneBitAdam | kOneBitLamb, "number or auto", "auto",
     "after the freeze every so many steps one has variance_codec and refreshes the variance; 0: "
     "none; auto: the variance follows the gradients",
     [](const Value& v, OptimizerConfig& c) {
       return CountOrAuto(v, c.options.variance_refresh_interval);
     }},
    {"max_coeff", kOneBitLamb, "number", "10", "a trust ratio is at most this",
     [](const Value& v, OptimizerConfig& c) { return Number(v, c.options.lamb->max_coeff); }},
    {"min_coeff", kOneBitLamb, "number", "0.01", "and at least this",
     [](const Value& v, OptimizerConfig& c) { return Number(v, c.options.lamb->min_coeff); }},
    {"coeff_beta", kOneBitLamb, "number", "0.9", "of the mean of trust ratios that is frozen",
     [](const Value& v, OptimizerConfig& c) { return Number(v, c.options.lamb->coeff_beta); }},
    {"factor_max", kOneBitLamb, "number", "4", "its factor in one-bit steps is at most this",
     [](const Value& v, OptimizerConfig& c) { return Number(v, c.options.lamb->factor_max); }},
    {"factor_min", kOneBitLamb, "number", "0.5", "and at least this",
     [](const Value& v, OptimizerConfig& c) { return Number(v, c.options.lamb->factor_min); }},
    {"factor_threshold", kOneBitLamb, "number", "0.1", "and changes by this fraction in a step",
     [](const Value& v, OptimizerConfig& c) {
       return Number(v, c.options.lamb->factor_threshold);
     }},
    {"var_freeze_step", kZeroOneAdam, "number", "", "steps before local ones",
     [](const Value& v, OptimizerConfig& c) { return Count(v, c.options.freeze_step); }},
    {"var_update_scaler", kZeroOneAdam, "number", "16",
     "updates of the variance before they become half as frequent",
     [](const Value& v, OptimizerConfig& c) {
       return Count(v, c.options.zero_one->var_update_scaler);
     }},
    {"local_step_scaler", kZeroOneAdam, "number", "as many as var_freeze_step",
     "steps before synchronisations become half as frequent",
     [](const Value& v, OptimizerConfig& c) {
       return Count(v, c.options.zero_one->local_step_scaler);
     }},
    {"local_step_clipper", kZeroOneAdam, "number", "16",
     "most steps from one synchronisation to the next",
     [](const Value& v, OptimizerConfig& c) {
       return Count(v, c.options.zero_one->local_step_clipper);
     }},
    {"codec", kAdam, "codec", "fp32", "how gradients travel",
     [](const Value& v, OptimizerConfig& c) { return CodecOf(v, c.options.warm_up_codec, c); }},
    {"codec", kNotAdam, "codec", "onebit", "how the momentum travels",
     [](const Value& v, OptimizerConfig& c) { return CodecOf(v, c.options.codec, c); }},
    {"warm_up_codec", kOneBitAdam | kOneBitLamb, "codec", "int8",
     "how gradients travel in the warm-up",
     [](const Value& v, OptimizerConfig& c) { return CodecOf(v, c.options.warm_up_codec, c); }},
    {"variance_codec", kNotAdam, "codec", "int8",
     "how gradients travel that refresh the variance, or in 0/1 Adam update it",
     [](const Value& v, OptimizerConfig& c) { return CodecOf(v, c.options.variance_codec, c); }},
    {"variance_floor", kNotAdam, "number", "0.01",
     "the least variance at a freeze, as a fraction of its tensor's mean",
     [](const Value& v, OptimizerConfig& c) { return Number(v, c.options.variance_floor); }},
    {"gamma", kNotAdam, "number", "1.35", "a block's scale over its root mean square",
     [](const Value& v, OptimizerConfig& c) { return Gamma(v, c.gamma); }},
    {"compat", kNotAdam, "deepspeed", "none", "steps as DeepSpeed's, to compare with",
     [](const Value& v, OptimizerConfig& c) { return Compat(v, c.as_deepspeed); }},
    {"amsgrad", kAll, "false", "false", "DeepSpeed's; true is refused",
     [](const Value& v, OptimizerConfig&) {
       return Only(v, false, "there is no AMSGrad variant here");
     }},
    {"eps_inside_sqrt", kNotAdam, "false", "false", "DeepSpeed's; true is refused",
     [](const Value& v, OptimizerConfig&) {
       return Only(v, false, "eps is added to the root here");
     }},
    {"adam_w_mode", kAdam, "true", "true", "DeepSpeed's; false is refused",
     [](const Value& v, OptimizerConfig&) {
       return Only(v, true, "weight decay is decoupled here, not L2");
     }},
    {"torch_adam", kAdam, "anything", "", kIgnored, nullptr},
    {"cuda_aware", kNotAdam, "anything", "", kIgnored, nullptr},
    {"comm_backend_name", kNotAdam, "anything", "", kIgnored, nullptr},
};

absl::StatusOr<NamedType> TypeOf(const config::File& file, const Node& section) {
  const Document& document = file.document();
  std::vector<std::string> names;
  for (const NamedType& type : kTypes) names.emplace_back(type.name);
  const Entry* const entry = section.Find("type");
  if (entry == nullptr) {
    return document.Error(
        section.line,
        absl::StrCat("section optimizer has no type, wanted one of ", absl::StrJoin(names, ", ")));
  }
  for (const NamedType& type : kTypes) {
    if (absl::EqualsIgnoreCase(type.name, entry->value.text)) return type;
  }
  const std::string nearest = config::Nearest(entry->value.text, names);
  return document.Error(
      entry->line,
      absl::StrCat("the optimizer's type is ", entry->value.Describe(), ", wanted one of ",
                   absl::StrJoin(names, ", "),
                   nearest.empty() ? "" : absl::StrCat("; did you mean '", nearest, "'?")));
}

// Reads one param, where it is given, into `config` and the list of what goes to other languages.
absl::Status ReadParam(const config::File& file, const Param& param, const Node* params,
                       OptimizerConfig& config, std::vector<std::string>& given) {
  const Entry* const entry = params == nullptr ? nullptr : FindKey(*params, param.name);
  config::Key key = {.name = param.name, .standard = param.standard};
  const bool is_required = *param.standard == '\0' && param.read != nullptr;
  const bool is_null = entry != nullptr && entry->value.kind == Node::Kind::kNothing;
  if (is_null && param.read != nullptr) key.settings = {*SettingOf(file.document(), *entry)};
  if (entry == nullptr || is_null) {
    if (is_required) config.missing = param.name;
    if (param.read != nullptr) config.keys.push_back(std::move(key));
    return absl::OkStatus();
  }
  absl::StatusOr<config::Setting> setting = config::SettingOf(file.document(), *entry);
  if (param.read == nullptr) {
    if (!setting.ok()) setting = config::Setting{.values = {entry->value.Describe()}};
    setting->origin = absl::StrCat(file.document().Place(entry->line), ", ignored");
  } else {
    if (!setting.ok()) return setting.status();
    const Json json = param.read({file.document(), *entry}, config);
    if (!json.ok()) return json.status();
    if (!json->empty()) given.push_back(absl::StrCat("\"", param.name, "\": ", *json));
  }
  key.settings.push_back(*std::move(setting));
  config.keys.push_back(std::move(key));
  return absl::OkStatus();
}

// What compat: deepspeed decides, so that nobody believes that it counts. Its bias_correction is
// false, which its own files may say.
absl::Status CheckChoices(const config::File& file, const Node* params,
                          const OptimizerConfig& config) {
  if (!config.as_deepspeed) return absl::OkStatus();
  for (const char* const name : {"bias_correction", "gamma", "variance_floor"}) {
    const Entry* const entry = FindKey(*params, name);
    if (entry == nullptr || entry->value.kind == Node::Kind::kNothing) continue;
    if (absl::string_view(name) == "bias_correction" && !config.options.bias_correction) continue;
    return file.document().Error(
        entry->line,
        absl::StrCat(entry->key, " is ", entry->value.Describe(),
                     ": with compat: deepspeed there is no choice of it; leave it out"));
  }
  return absl::OkStatus();
}

// DeepSpeed's first stage has a step more than its option says.
void CountAsDeepSpeed(OptimizerConfig& config) {
  if (!config.as_deepspeed || !config.options.zero_one) return;
  if (config.options.freeze_step < OptimizerOptions::kAuto) ++config.options.freeze_step;
}

// What the runs of docs/convergence*.md support.
absl::string_view WarmUpShare(const OptimizerOptions& options) {
  return options.lamb ? "30%" : "20%";
}

bool IsGiven(const Node* params, const char* name) {
  const Entry* const entry = params == nullptr ? nullptr : FindKey(*params, name);
  return entry != nullptr && entry->value.kind != Node::Kind::kNothing;
}

// Gives the options that the file does not have the defaults that signpost.torch's optimizers have:
// they depend on others.
void SetDefaults(const Node* params, OptimizerConfig& config) {
  OptimizerOptions& options = config.options;
  const auto set = [params](const char* name, auto& option, auto value) {
    if (!IsGiven(params, name)) option = value;
  };
  const bool follows = options.bias_correction && !config.as_deepspeed;
  const Codec codec = config.as_deepspeed ? FLOAT32 : INT8;
  if (!options.lamb && !options.zero_one) {
    set("freeze_step", options.freeze_step, OptimizerOptions::kAuto);
  }
  if (!options.zero_one) {
    set("variance_refresh_interval", options.variance_refresh_interval,
        follows ? OptimizerOptions::kAuto : uint64_t{0});
    set("warm_up_codec", options.warm_up_codec, codec);
  }
  const bool needs_codec = options.zero_one || options.variance_refresh_interval != 0;
  set("variance_codec", options.variance_codec, needs_codec ? codec : FLOAT32);
}

absl::StatusOr<const Node*> ParamsOf(const config::File& file, const Node& section) {
  const Entry* const entry = section.Find("params");
  if (entry == nullptr || entry->value.kind == Node::Kind::kNothing) return nullptr;
  if (entry->value.kind == Node::Kind::kSection) return &entry->value;
  return file.document().Error(
      entry->line,
      absl::StrCat("the optimizer's params are ", entry->value.Describe(), ", wanted a section"));
}

}  // namespace

absl::StatusOr<OptimizerConfig> OptimizerConfig::Read(const config::File& file) {
  const Document& document = file.document();
  const Node* const section = file.Section("optimizer");
  if (section == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(document.name, " has no section 'optimizer': {type: ..., params: {...}}"));
  }
  absl::Status status =
      file.CheckKeys(*section, "in section optimizer", {"type", "params", "legacy_fusion"});
  if (!status.ok()) return status;
  const absl::StatusOr<NamedType> type = TypeOf(file, *section);
  if (!type.ok()) return type.status();
  const absl::StatusOr<const Node*> params = ParamsOf(file, *section);
  if (!params.ok()) return params.status();

  OptimizerConfig config = {.type = type->name};
  if (type->type == kOneBitLamb) config.options.lamb.emplace();
  if (type->type == kZeroOneAdam) config.options.zero_one.emplace();
  config.keys.push_back(
      {.name = "type", .settings = {*SettingOf(document, *section->Find("type"))}});
  std::vector<std::string> known, given;
  for (const Param& param : kParams) {
    if ((param.types & type->type) != 0) known.emplace_back(param.name);
  }
  if (*params != nullptr) {
    status = file.CheckKeys(**params, absl::StrCat("in params of ", config.type), known);
    if (!status.ok()) return status;
  }
  for (const Param& param : kParams) {
    if ((param.types & type->type) == 0) continue;
    status = ReadParam(file, param, *params, config, given);
    if (!status.ok()) return status;
  }
  if (status = CheckChoices(file, *params, config); !status.ok()) return status;
  if (type->type != kAdam) SetDefaults(*params, config);
  CountAsDeepSpeed(config);
  config.json = absl::StrCat("{\"type\": \"", config.type, "\", \"params\": {",
                             absl::StrJoin(given, ", "), "}}");
  return config;
}

absl::StatusOr<OptimizerConfig> OptimizerConfig::FromEnvironment() {
  const absl::StatusOr<std::optional<config::File>> file = config::File::FromEnvironment();
  if (!file.ok()) return file.status();
  if (!file->has_value()) {
    return absl::InvalidArgumentError(
        "environment variable SIGNPOST_CONFIG is not set: it names the file with the section "
        "'optimizer'");
  }
  absl::StatusOr<OptimizerConfig> config = Read(**file);
  if (!config.ok()) return config;
  if (absl::Status status = config->Check(); !status.ok()) return status;
  return config;
}

absl::Status OptimizerConfig::Check() const {
  if (!missing.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("optimizer: ", type, " needs ", missing,
                     ", the steps before the variance is frozen: about ", WarmUpShare(options),
                     " of all, and more than the learning rate's warm-up. DeepSpeed's default is "
                     "100000"));
  }
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  return CheckRates(options, {rates});
}

std::vector<OptimizerParam> OptimizerParams() {
  std::vector<OptimizerParam> all;
  for (const Param& param : kParams) {
    std::vector<std::string> types;
    for (const NamedType& type : kTypes) {
      if ((param.types & type.type) != 0 && type.name != std::string("AdamW")) {
        types.emplace_back(type.name);
      }
    }
    all.push_back({param.name, param.types == kAll ? "all" : absl::StrJoin(types, ", "), param.kind,
                   param.standard, param.meaning});
  }
  return all;
}

}  // namespace signpost
