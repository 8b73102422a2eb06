#include "cli/training_flags.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/demo/text.h"

namespace signpost::cli {

void AddTrainingFlags(CLI::App& app, demo::TrainingOptions& options) {
  app.add_option("--text", options.text,
                 absl::StrCat("Files to learn from [the licences in ", demo::kLicenceDirectory,
                              " and the modules of Debian's Python]"))
      ->type_name("FILE");
  const CLI::Validator not_negative = CLI::NonNegativeNumber.description("");
  app.add_option("--steps", options.steps, "Steps of each training")
      ->check(not_negative)
      ->capture_default_str();
  app.add_option(
         "--freeze-step", options.freeze_step,
         "Steps of warm-up in fp32, after which 1-bit Adam's variance stays as it is [found "
         "by the job]")
      ->check(not_negative);
  app.add_option("--seed", options.seed, "Seed of the initial parameters and the batches")
      ->check(not_negative)
      ->capture_default_str();
  app.add_option("--batch", options.batch, "Windows of text per worker and step")
      ->check(not_negative)
      ->capture_default_str();
  app.add_option("--learning-rate", options.learning_rate,
                 "The highest learning rate, after its warm-up")
      ->capture_default_str();
  app.add_option("--context", options.model.context, "Bytes of text that the model sees at a time")
      ->check(not_negative)
      ->capture_default_str();
  app.add_option("--embedding", options.model.embedding, "Numbers that stand for each byte of text")
      ->check(not_negative)
      ->capture_default_str();
  app.add_option("--hidden", options.model.hidden, "Units per hidden layer")
      ->check(not_negative)
      ->capture_default_str();
  app.add_option("--layers", options.model.layers, "Hidden layers")
      ->check(not_negative)
      ->capture_default_str();
}

std::vector<std::string> TrainingArguments(const demo::TrainingOptions& options) {
  std::vector<std::string> arguments = {
      absl::StrCat("--steps=", options.steps),
      absl::StrCat("--seed=", options.seed),
      absl::StrCat("--batch=", options.batch),
      absl::StrFormat("--learning-rate=%.17g", options.learning_rate),
      absl::StrCat("--context=", options.model.context),
      absl::StrCat("--embedding=", options.model.embedding),
      absl::StrCat("--hidden=", options.model.hidden),
      absl::StrCat("--layers=", options.model.layers),
  };
  if (options.freeze_step != OptimizerOptions::kAuto) {
    arguments.push_back(absl::StrCat("--freeze-step=", options.freeze_step));
  }
  for (const std::string& file : options.text) arguments.push_back(absl::StrCat("--text=", file));
  return arguments;
}

}  // namespace signpost::cli
