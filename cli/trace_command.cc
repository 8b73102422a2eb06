#include "cli/trace_command.h"

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "log/log.h"
#include "proto/exit_code.h"
#include "trace/merge.h"
#include "trace/summary.h"

namespace signpost::cli {
namespace {

constexpr char kMerge[] = "merge";
constexpr char kSummary[] = "summary";

struct Flags {
  std::string action;
  std::vector<std::string> files;
  bool steps = false;
};

// What it has merged.
absl::StatusOr<trace::Timeline> Merge(const std::vector<std::string>& inputs,
                                      const std::string& output) {
  absl::StatusOr<trace::Timeline> timeline = trace::ReadRecordings(inputs);
  if (!timeline.ok()) return timeline.status();
  if (absl::Status status = trace::WriteTrace(*timeline, output); !status.ok()) return status;
  for (const std::string& line : trace::Describe(*timeline)) {
    log::Write(log::Level::kInfo, "signpost", absl::StrCat("trace ", output, ": ", line));
  }
  return timeline;
}

absl::StatusOr<int> PrintSummary(const Flags& flags) {
  const absl::StatusOr<trace::Timeline> timeline = trace::ReadTrace(flags.files);
  if (!timeline.ok()) return timeline.status();
  for (const std::string& line : timeline->left_out) {
    log::Write(log::Level::kWarning, "signpost", line);
  }
  std::fputs(trace::Format(trace::Summarise(*timeline), flags.steps).c_str(), stdout);
  return kExitOk;
}

absl::StatusOr<int> Run(const Flags& flags) {
  if (flags.action == kSummary) return PrintSummary(flags);
  if (flags.files.size() < 2) {
    return absl::InvalidArgumentError(
        "merge takes the file to write, and then what to merge: signpost trace merge OUT IN...");
  }
  const std::vector<std::string> inputs(flags.files.begin() + 1, flags.files.end());
  if (absl::Status status = trace::CheckOutput(flags.files[0], inputs); !status.ok()) {
    return absl::Status(status.code(),
                        absl::StrCat(status.message(),
                                     "; name the file to write first: signpost trace merge OUT "
                                     "IN..."));
  }
  const absl::StatusOr<trace::Timeline> merged = Merge(inputs, flags.files[0]);
  if (!merged.ok()) return merged.status();
  return kExitOk;
}

}  // namespace

absl::Status MergeTraceOfRun(const std::string& directory, const std::string& file) {
  const absl::StatusOr<trace::Timeline> merged = Merge({directory}, file);
  if (!merged.ok()) return merged.status();
  std::error_code error;
  if (merged->left_out.empty()) std::filesystem::remove_all(directory, error);
  return absl::OkStatus();
}

void AddTraceFlag(CLI::App& app, std::string& directory) {
  app.add_option("--trace", directory,
                 "Record what this process does, and when, in a file of its own in here, of 16 MiB "
                 "with the newest events; `signpost trace merge` makes one trace of all files")
      ->type_name("DIR")
      ->envname("SIGNPOST_TRACE");
}

Command AddTraceCommand(CLI::App& program) {
  // Shared by the flags' and the command's closures.
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *program.add_subcommand(
      "trace", "Merge what processes have recorded into one trace, or sum up where time has gone");
  app.footer(
      "merge OUT IN...: makes one file of the recordings IN, or of all in a directory IN. Clocks\n"
      "of different hosts are compared by the frames and answers that went between them.\n\n"
      "summary FILE: of a merged trace, or of recordings, how long each worker's steps took and\n"
      "what of; which rank the others waited for, which chunks took longest, how long frames and\n"
      "answers were on the way, and which connections were lost.\n\n"
      "Processes record when SIGNPOST_TRACE, or --trace of `signpost aggregator` and `signpost\n"
      "worker`, names a directory; `signpost run --trace FILE` does all of it by itself.\n\n"
      "Examples, the first after copying the directories of two hosts:\n"
      "  signpost trace merge job.json traces-of-a traces-of-b\n"
      "  signpost trace summary job.json");
  app.add_option("ACTION", flags->action, "What to do")
      ->required()
      ->check(CLI::IsMember({kMerge, kSummary}).description(""))
      ->type_name("merge|summary");
  app.add_option("FILES", flags->files,
                 "merge: OUT IN..., the file to write and what it is made of; summary: FILE...")
      ->required()
      ->type_name("");
  app.add_flag("--steps", flags->steps, "With summary: each step too");
  return {&app, [flags] { return Run(*flags); }};
}

}  // namespace signpost::cli
