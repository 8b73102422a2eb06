#include "client/optimizer_config.h"

#include <cstdlib>
#include <cstdint>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

absl::StatusOr<OptimizerConfig> Read(const std::string& text) {
  const absl::StatusOr<config::File> file = config::File::Parse("ds.json", text);
  EXPECT_TRUE(file.ok()) << file.status();
  return OptimizerConfig::Read(*file);
}

OptimizerConfig ReadGood(const std::string& text) {
  const absl::StatusOr<OptimizerConfig> config = Read(text);
  EXPECT_TRUE(config.ok()) << config.status();
  EXPECT_TRUE(config->Check().ok()) << config->Check();
  return config.value_or(OptimizerConfig());
}

std::string Error(const std::string& type, const std::string& params) {
  const absl::Status status =
      Read("optimizer:\n  type: " + type + "\n  params:\n    " + params + "\n").status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return std::string(status.message());
}

TEST(OptimizerConfig, TakesAWholeFileOfDeepSpeedsWithOneBitAdam) {
  const OptimizerConfig config = ReadGood(R"({
    "train_batch_size": 4096,
    "train_micro_batch_size_per_gpu": 16,
    "gradient_clipping": 1.0,
    "optimizer": {
      "type": "OneBitAdam",
      "params": {
        "lr": 4e-4,
        "betas": [0.8, 0.99],
        "eps": 1e-6,
        "weight_decay": 3e-7,
        "freeze_step": 23000,
        "bias_correction": false,
        "cuda_aware": false,
        "comm_backend_name": "nccl"
      }
    },
    "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16}
  })");
  EXPECT_EQ(config.type, "OneBitAdam");
  EXPECT_EQ(config.rates.learning_rate, 4e-4);
  EXPECT_EQ(config.rates.beta1, 0.8);
  EXPECT_EQ(config.rates.beta2, 0.99);
  EXPECT_EQ(config.rates.epsilon, 1e-6);
  EXPECT_EQ(config.rates.weight_decay, 3e-7);
  EXPECT_EQ(config.options.freeze_step, 23000);
  EXPECT_FALSE(config.options.bias_correction);
  EXPECT_FALSE(config.options.lamb);
  EXPECT_FALSE(config.options.zero_one);
  EXPECT_FALSE(config.as_deepspeed);
}

TEST(OptimizerConfig, TakesDeepSpeedsOneBitLamb) {
  const OptimizerConfig config = ReadGood(R"({
    "train_batch_size": 65536,
    "optimizer": {
      "type": "OneBitLamb",
      "params": {
        "lr": 11e-3, "weight_decay": 0.01, "bias_correction": false, "max_coeff": 0.3,
        "min_coeff": 0.02, "freeze_step": 1000, "cuda_aware": false, "comm_backend_name": "nccl",
        "coeff_beta": 0.8, "factor_max": 3.0, "factor_min": 0.25, "factor_threshold": 0.2,
        "max_grad_norm": 0.0, "amsgrad": false, "eps_inside_sqrt": false
      },
      "legacy_fusion": false
    }
  })");
  EXPECT_EQ(config.options.freeze_step, 1000);
  ASSERT_TRUE(config.options.lamb);
  EXPECT_EQ(config.options.lamb->max_coeff, 0.3);
  EXPECT_EQ(config.options.lamb->min_coeff, 0.02);
  EXPECT_EQ(config.options.lamb->coeff_beta, 0.8);
  EXPECT_EQ(config.options.lamb->factor_max, 3);
  EXPECT_EQ(config.options.lamb->factor_min, 0.25);
  EXPECT_EQ(config.options.lamb->factor_threshold, 0.2);
  EXPECT_EQ(config.max_grad_norm, 0);
}

TEST(OptimizerConfig, TakesDeepSpeedsZeroOneAdam) {
  const std::string params =
      "{lr: 1e-3, var_freeze_step: 1000, var_update_scaler: 8, local_step_scaler: 500, "
      "local_step_clipper: 4";
  const OptimizerConfig config =
      ReadGood("optimizer: {type: ZeroOneAdam, params: " + params + "}}");
  EXPECT_EQ(config.options.freeze_step, 1000);
  ASSERT_TRUE(config.options.zero_one);
  EXPECT_EQ(config.options.zero_one->var_update_scaler, 8);
  EXPECT_EQ(config.options.zero_one->local_step_scaler, 500);
  EXPECT_EQ(config.options.zero_one->local_step_clipper, 4);
  const OptimizerConfig as_deepspeed =
      ReadGood("optimizer: {type: zerooneadam, params: " + params + ", compat: deepspeed}}");
  EXPECT_TRUE(as_deepspeed.as_deepspeed);
  EXPECT_EQ(as_deepspeed.options.freeze_step, 1001);
  const OptimizerConfig without_scaler =
      ReadGood("optimizer: {type: ZeroOneAdam, params: {var_freeze_step: 7, compat: deepspeed}}");
  EXPECT_EQ(without_scaler.options.zero_one->local_step_scaler, 0) << "the schedule's to say";
}

TEST(OptimizerConfig, TakesWhatSignpostHasBesides) {
  const OptimizerConfig config = ReadGood(
      "optimizer:\n"
      "  type: OneBitAdam\n"
      "  params: {freeze-step: auto, variance_refresh_interval: 50, variance_floor: 0.02,\n"
      "           gamma: 1.25, codec: int4, warm_up_codec: bf16, variance_codec: int8,\n"
      "           max_grad_norm: 2}\n");
  EXPECT_EQ(config.options.freeze_step, OptimizerOptions::kAuto);
  EXPECT_EQ(config.options.variance_refresh_interval, 50);
  EXPECT_EQ(config.options.variance_floor, 0.02);
  EXPECT_EQ(config.gamma, 1.25f);
  EXPECT_EQ(config.options.codec, INT4);
  EXPECT_EQ(config.options.warm_up_codec, BFLOAT16);
  EXPECT_EQ(config.options.variance_codec, INT8);
  EXPECT_EQ(config.max_grad_norm, 2);
  const OptimizerConfig lamb =
      ReadGood("optimizer: {type: OneBitLamb, params: {freeze_step: 2, codec: fp16}}");
  EXPECT_EQ(lamb.options.codec, FLOAT16);
  const OptimizerConfig adam = ReadGood("optimizer: {type: AdamW, params: {adam_w_mode: true}}");
  EXPECT_EQ(adam.options.freeze_step, OptimizerOptions::kNever);
  // All of its steps are the warm-up.
  const OptimizerConfig in_bytes = ReadGood("optimizer: {type: Adam, params: {codec: int8}}");
  EXPECT_EQ(in_bytes.options.warm_up_codec, INT8);
  EXPECT_EQ(in_bytes.options.freeze_step, OptimizerOptions::kNever);
}

TEST(OptimizerConfig, TakesACodecFromOutsideAsItsSharedObject) {
  const OptimizerConfig with_options = ReadGood(
      "optimizer: {type: OneBitAdam, params: {freeze_step: 2, codec: int8,\n"
      "  warm_up_codec: [\"/a \\\"b\\\"/libtopk.so\", ratio=0.05]}}");
  EXPECT_EQ(with_options.options.codec, INT8);
  EXPECT_EQ(with_options.options.warm_up_codec, CUSTOM);
  EXPECT_EQ(with_options.codec_library, "/a \"b\"/libtopk.so");
  EXPECT_EQ(with_options.codec_options, "ratio=0.05");
  EXPECT_THAT(with_options.json,
              HasSubstr("\"warm_up_codec\": [\"/a \\\"b\\\"/libtopk.so\",\"ratio=0.05\"]"));
  const OptimizerConfig twice = ReadGood(
      "optimizer: {type: ZeroOneAdam, params: {var_freeze_step: 2, codec: libtopk.so, "
      "variance_codec: [libtopk.so]}}");
  EXPECT_EQ(twice.options.codec, CUSTOM);
  EXPECT_EQ(twice.options.variance_codec, CUSTOM);
  EXPECT_EQ(twice.codec_library, "libtopk.so");
  EXPECT_EQ(twice.codec_options, "");
  EXPECT_THAT(twice.json, HasSubstr("\"codec\": [\"libtopk.so\",\"\"]"));
}

TEST(OptimizerConfig, RefusesASecondCodecFromOutside) {
  EXPECT_THAT(Error("OneBitAdam", "codec: [./a.so, k=1]\n    warm_up_codec: [./a.so, k=2]"),
              AllOf(StartsWith("ds.json:5: warm_up_codec is a list"),
                    HasSubstr("'./a.so' with options 'k=1': a job has one")));
  EXPECT_THAT(Error("OneBitAdam", "codec: ./a.so\n    variance_codec: ./b.so"),
              StartsWith("ds.json:5: variance_codec is './b.so'"));
}

TEST(OptimizerConfig, TellsOtherLanguagesInJsonWhatWasGivenAndCounts) {
  EXPECT_EQ(ReadGood("optimizer: {type: onebitadam, params: {lr: .5, betas: [0.5, 0.25], "
                     "freeze-step: auto, codec: int8, cuda_aware: true, amsgrad: false, "
                     "bias_correction: false, max_grad_norm: 0, compat: deepspeed}}")
                .json,
            "{\"type\": \"OneBitAdam\", \"params\": {\"lr\": 0.5, \"betas\": [0.5, 0.25], "
            "\"bias_correction\": false, \"freeze_step\": \"auto\", \"codec\": \"int8\", "
            "\"compat\": \"deepspeed\"}}");
}

TEST(OptimizerConfig, TakesNullForAParamThatIsNotGiven) {
  const OptimizerConfig config = ReadGood(
      "optimizer: {type: OneBitAdam, params: {lr: null, freeze_step: 7, max_grad_norm: ~, "
      "betas: null, compat: null, comm_backend_name: null, cuda_aware: [{a: 1}]}}");
  EXPECT_EQ(config.rates.learning_rate, GroupRates().learning_rate);
  EXPECT_EQ(config.json, "{\"type\": \"OneBitAdam\", \"params\": {\"freeze_step\": 7}}");
  EXPECT_THAT(
      std::string(
          Read("optimizer: {type: OneBitLamb, params: {freeze_step: null}}")->Check().message()),
      HasSubstr("needs freeze_step"));
}

TEST(OptimizerConfig, RefusesWhatCompatDecides) {
  EXPECT_THAT(Error("OneBitAdam", "gamma: 1.25\n    compat: deepspeed"),
              StartsWith("ds.json:4: gamma is '1.25': with compat: deepspeed there is no choice"));
  EXPECT_THAT(Error("OneBitLamb", "compat: deepspeed\n    variance-floor: 0.1"),
              StartsWith("ds.json:5: variance-floor"));
  EXPECT_THAT(Error("ZeroOneAdam", "compat: deepspeed\n    bias_correction: true"),
              StartsWith("ds.json:5: bias_correction"));
  ReadGood(
      "optimizer: {type: OneBitAdam, params: {freeze_step: 7, bias_correction: false, "
      "gamma: null, compat: deepspeed}}");
}

TEST(OptimizerConfig, RefusesAnUnknownParamWithLineAndSuggestion) {
  EXPECT_THAT(
      Error("OneBitAdam", "freze_step: 400"),
      StartsWith("ds.json:4: unknown key 'freze_step' in params of OneBitAdam; did you mean "
                 "'freeze_step'?"));
  EXPECT_THAT(Error("ZeroOneAdam", "freeze_step: 400"), HasSubstr("unknown key 'freeze_step'"));
  EXPECT_THAT(Error("Adam", "gamma: 1.2"), HasSubstr("unknown key 'gamma' in params of Adam"));
}

TEST(OptimizerConfig, RefusesAnUnknownTypeWithASuggestion) {
  EXPECT_THAT(Error("OneBitAdm", "lr: 1"),
              AllOf(StartsWith("ds.json:2: the optimizer's type is 'OneBitAdm'"),
                    HasSubstr("did you mean 'OneBitAdam'?")));
  EXPECT_THAT(std::string(Read("optimizer: {params: {}}").status().message()),
              HasSubstr("has no type, wanted one of Adam, AdamW, OneBitAdam"));
  EXPECT_THAT(std::string(Read("job: a").status().message()), HasSubstr("no section 'optimizer'"));
  EXPECT_THAT(std::string(Read("optimizer: {type: Adam, parms: {}}").status().message()),
              HasSubstr("did you mean 'params'?"));
  EXPECT_THAT(std::string(Read("optimizer: {type: Adam, params: 3}").status().message()),
              HasSubstr("params are '3', wanted a section"));
}

TEST(OptimizerConfig, RefusesValuesOfTheWrongType) {
  EXPECT_THAT(Error("Adam", "lr: fast"), StartsWith("ds.json:4: lr is 'fast', wanted a number"));
  EXPECT_THAT(Error("Adam", "lr: .inf"), HasSubstr("wanted a number"));
  EXPECT_THAT(Error("Adam", "lr: nan"), HasSubstr("wanted a number"));
  EXPECT_THAT(Error("Adam", "lr: [1]"), HasSubstr("lr is a list"));
  EXPECT_THAT(Error("Adam", "lr: {a: 1}"), HasSubstr("lr has a section"));
  EXPECT_THAT(Error("Adam", "betas: 0.9"), HasSubstr("wanted two numbers"));
  EXPECT_THAT(Error("Adam", "betas: [0.9, b]"), HasSubstr("wanted two numbers"));
  EXPECT_THAT(Error("OneBitAdam", "freeze_step: -1"), HasSubstr("wanted a whole number"));
  EXPECT_THAT(Error("OneBitAdam", "freeze_step: 1.5"), HasSubstr("wanted a whole number"));
  EXPECT_THAT(Error("OneBitAdam", "codec: int2"), HasSubstr("wanted fp32, bf16"));
  EXPECT_THAT(Error("OneBitAdam", "codec: [int8]"), HasSubstr("or a shared object"));
  EXPECT_THAT(Error("OneBitAdam", "codec: [./a.so, b, c]"), HasSubstr("or a shared object"));
  EXPECT_THAT(Error("OneBitAdam", "codec: []"), HasSubstr("or a shared object"));
  EXPECT_THAT(Error("OneBitAdam", "bias_correction: 2"), HasSubstr("wanted true or false"));
  EXPECT_THAT(Error("OneBitAdam", "compat: torch"), HasSubstr("wanted deepspeed"));
  EXPECT_THAT(Error("OneBitAdam", "max_grad_norm: -1"), HasSubstr("positive"));
}

TEST(OptimizerConfig, RefusesWhatDeepSpeedCanAndSignpostCannot) {
  EXPECT_THAT(Error("OneBitAdam", "amsgrad: true"), HasSubstr("no AMSGrad variant"));
  EXPECT_THAT(Error("OneBitAdam", "eps_inside_sqrt: true"), HasSubstr("wanted false"));
  EXPECT_THAT(Error("Adam", "adam_w_mode: false"), HasSubstr("decoupled"));
  EXPECT_THAT(Error("Adam", "lr: auto"), HasSubstr("Hugging Face"));
}

TEST(OptimizerConfig, ChecksWhatIsMissingAndOutOfRange) {
  const auto check = [](const std::string& section) {
    return std::string(Read("optimizer: " + section)->Check().message());
  };
  EXPECT_EQ(check("{type: OneBitAdam}"), "");
  EXPECT_THAT(check("{type: OneBitLamb}"), HasSubstr("OneBitLamb needs freeze_step"));
  EXPECT_THAT(check("{type: OneBitLamb}"), HasSubstr("frozen: about 30% of all"));
  EXPECT_THAT(check("{type: ZeroOneAdam, params:}"), HasSubstr("needs var_freeze_step"));
  EXPECT_THAT(check("{type: ZeroOneAdam}"), HasSubstr("frozen: about 20% of all"));
  EXPECT_THAT(check("{type: OneBitAdam, params: {freeze_step: 0}}"), HasSubstr("freeze_step"));
  EXPECT_THAT(check("{type: Adam, params: {betas: [1, 0]}}"), HasSubstr("beta1"));
}

TEST(OptimizerConfig, OneBitAdamsDefaultsDependOnEachOther) {
  const auto options = [](const std::string& params) {
    const OptimizerConfig config =
        ReadGood("optimizer: {type: OneBitAdam, params: {" + params + "}}");
    EXPECT_TRUE(config.Check().ok()) << config.Check();
    return config.options;
  };
  constexpr uint64_t kAuto = OptimizerOptions::kAuto;
  EXPECT_EQ(options("").freeze_step, kAuto);
  EXPECT_EQ(options("").variance_refresh_interval, kAuto);
  EXPECT_EQ(options("").warm_up_codec, INT8);
  EXPECT_EQ(options("").variance_codec, INT8);
  EXPECT_EQ(options("variance_refresh_interval: auto").variance_codec, INT8);
  EXPECT_EQ(options("variance_refresh_interval: 5").variance_codec, INT8);
  EXPECT_EQ(options("variance_refresh_interval: 0").variance_codec, FLOAT32);
  EXPECT_EQ(options("bias_correction: false").variance_refresh_interval, 0);
  EXPECT_EQ(options("warm_up_codec: fp32").warm_up_codec, FLOAT32);
  const OptimizerConfig as_deepspeed =
      ReadGood("optimizer: {type: OneBitAdam, params: {compat: deepspeed, freeze_step: 9}}");
  EXPECT_EQ(as_deepspeed.options.variance_refresh_interval, 0);
  EXPECT_EQ(as_deepspeed.options.warm_up_codec, FLOAT32);
  EXPECT_EQ(as_deepspeed.options.freeze_step, 9);
}

TEST(OptimizerConfig, VariancesTravelInInt8AndFollowWhereTheyCan) {
  for (const char* optimizer :
       {"OneBitLamb, params: {freeze_step: 9}", "ZeroOneAdam, params: {var_freeze_step: 9}"}) {
    const OptimizerConfig config = ReadGood(absl::StrCat("optimizer: {type: ", optimizer, "}"));
    EXPECT_TRUE(config.Check().ok()) << config.Check();
    EXPECT_EQ(config.options.VarianceFollows(), !config.options.zero_one) << optimizer;
    EXPECT_EQ(config.options.freeze_step, 9);
    EXPECT_EQ(config.options.warm_up_codec, config.options.zero_one ? FLOAT32 : INT8);
    EXPECT_EQ(config.options.variance_codec, INT8);
  }
}

TEST(OptimizerConfig, SaysWhereEachParamCameFrom) {
  const OptimizerConfig config = ReadGood(
      "optimizer:\n"
      "  type: OneBitAdam\n"
      "  params:\n"
      "    freeze_step: 400\n"
      "    cuda_aware: true\n");
  const auto rows = config::Explain(config.keys);
  EXPECT_THAT(rows[1], ElementsAre("type", "OneBitAdam", "ds.json:2", ""));
  EXPECT_THAT(rows[2], ElementsAre("lr", "0.001", "default", ""));
  EXPECT_THAT(rows, testing::Contains(ElementsAre("freeze_step", "400", "ds.json:4", "")));
  EXPECT_THAT(rows.back(), ElementsAre("cuda_aware", "true", "ds.json:5, ignored", ""));
}

TEST(OptimizerConfig, SaysTheDefaultsThatTheLibraryHas) {
  for (const OptimizerParam& param : OptimizerParams()) {
    if (param.kind != "number" && param.kind != "codec") continue;
    if (param.standard.empty() || param.name == "max_grad_norm") continue;
    if (param.name == "local_step_scaler") continue;
    const std::string type = param.types == "all" ? "Adam" : param.types.substr(0, 11);
    const std::string name = type.substr(0, type.find(','));
    const std::string freeze =
        name == "Adam" ? "" : (name == "ZeroOneAdam" ? "var_freeze_step: 9" : "freeze_step: 9");
    const auto with = [&](const std::string& params) {
      const OptimizerConfig config =
          ReadGood("optimizer: {type: " + name + ", params: {" + params + "}}");
      return DescribeOptions(config.options) + std::to_string(config.gamma) +
             std::to_string(config.rates.learning_rate) +
             std::to_string(config.rates.epsilon * 1e9) + std::to_string(config.rates.weight_decay);
    };
    const std::string given = param.name + ": " + param.standard;
    EXPECT_EQ(with(freeze), with(freeze.empty() ? given : freeze + ", " + given)) << given;
  }
}

TEST(OptimizerConfig, IsReadFromTheFileThatTheEnvironmentNames) {
  unsetenv("SIGNPOST_CONFIG");
  EXPECT_THAT(std::string(OptimizerConfig::FromEnvironment().status().message()),
              HasSubstr("SIGNPOST_CONFIG is not set"));
  const std::string path = testing::TempDir() + "/optimizer.yaml";
  std::ofstream(path) << "optimizer: {type: OneBitAdam, params: {freeze_step: 7}}\n";
  setenv("SIGNPOST_CONFIG", path.c_str(), 1);
  const absl::StatusOr<OptimizerConfig> config = OptimizerConfig::FromEnvironment();
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->options.freeze_step, 7);
  std::ofstream(path) << "optimizer: {type: OneBitLamb}\n";
  EXPECT_FALSE(OptimizerConfig::FromEnvironment().ok());
}

}  // namespace
}  // namespace signpost
