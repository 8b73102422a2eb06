#include "cli/codec_command.h"

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "proto/codec_check.h"
#include "proto/exit_code.h"

namespace signpost::cli {
namespace {

struct Flags {
  std::string library;
  std::string options;
  CodecTrials trials;
};

absl::StatusOr<int> Check(const Flags& flags) {
  const absl::StatusOr<CodecReport> report =
      CheckCodecLibrary(flags.library, flags.options, flags.trials);
  if (!report.ok()) return report.status();
  std::printf("codec '%s', version %s: %.2f bits per parameter each way\n", report->name.c_str(),
              report->version.c_str(), report->bits_per_parameter);
  for (const CodecFinding& finding : report->findings) {
    std::printf("  %-4s %s%s\n", finding.trouble.empty() ? "ok" : "NO", finding.what.c_str(),
                finding.trouble.empty() ? "" : (": " + finding.trouble).c_str());
  }
  if (report->is_good()) {
    std::printf("what waits in the error settles at %.2f times the input\n", report->error_ratio);
    return kExitOk;
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s does not keep what signpost_codec.h asks for", flags.library));
}

}  // namespace

Command AddCodecCommand(CLI::App& program) {
  // Shared by the flags' and the command's closures.
  auto flags = std::make_shared<Flags>();
  CLI::App& app =
      *program.add_subcommand("codec", "Try a codec from outside, before jobs are trained with it");
  app.require_subcommand(1);
  app.footer(
      "Example:\n"
      "  signpost codec check ./libtopk.so --options ratio=0.05");
  CLI::App& check = *app.add_subcommand(
      "check", "Tell whether a shared object keeps what signpost_codec.h asks of a codec");
  check.footer(
      "Numbers of many kinds and lengths go through it, and bytes that nobody has packed. A codec\n"
      "that writes where it must not may end the process.\n\n"
      "Example:\n"
      "  signpost codec check ./libtopk.so --options ratio=0.05");
  check.add_option("library", flags->library, "The shared object")->type_name("FILE")->required();
  check.add_option("--options", flags->options, "The codec's own options");
  check
      .add_option("--block-elements", flags->trials.block_elements,
                  "Numbers in a block, as in the job that it is for")
      ->type_name("N")
      ->capture_default_str();
  check.add_option("--seed", flags->trials.seed, "The same seed tries the same numbers")
      ->capture_default_str();
  return {&app, [flags] { return Check(*flags); }};
}

}  // namespace signpost::cli
