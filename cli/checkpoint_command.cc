#include "cli/checkpoint_command.h"

#include <cstdint>
#include <cstdio>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "cli/table.h"
#include "proto/exit_code.h"
#include "proto/layout.h"
#include "storage/disk.h"

namespace signpost::cli {
namespace {

constexpr char kInspect[] = "inspect";
constexpr char kVerify[] = "verify";

struct Flags {
  std::string action;
  std::string directory;
};

uint64_t CountParameters(const CheckpointManifest& manifest) {
  uint64_t elements = 0;
  for (const Tensor& tensor : manifest.tensors()) elements += ElementCount(tensor);
  return elements;
}

uint64_t CountBytes(const CheckpointManifest& manifest) {
  uint64_t bytes = 0;
  for (const CheckpointFile& file : manifest.files()) bytes += file.bytes();
  return bytes;
}

std::string FormatTime(int64_t unix_micros) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", absl::FromUnixMicros(unix_micros),
                          absl::UTCTimeZone());
}

std::string Describe(const std::string& name, const CheckpointManifest& manifest) {
  const JobOptions& options = manifest.options();
  std::string text = absl::StrFormat(
      "\n%s\n  optimizer  %s\n  layout     %d tensors, blocks of %d, chunks of %d, gamma %g\n"
      "  values     CRC-32C %08x\n",
      name, options.optimizer(), manifest.tensors_size(), options.block_elements(),
      options.chunk_elements(), options.gamma(), options.parameters_crc32c());
  for (const CheckpointFile& file : manifest.files()) {
    absl::StrAppendFormat(&text, "  %-10s %s, CRC-32C %08x\n", file.name(),
                          FormatBytes(file.bytes()), file.crc32c());
  }
  return text;
}

// A line for each checkpoint on standard output. The first that is damaged, as the error.
absl::Status Verify(const CheckpointDir& dir, const std::vector<CheckpointEntry>& entries) {
  absl::Status first_error;
  for (const CheckpointEntry& entry : entries) {
    absl::Status status = entry.manifest.status();
    if (status.ok()) status = dir.Verify(entry.name, *entry.manifest);
    first_error.Update(status);
    const std::string line = status.ok() ? absl::StrFormat("%s is whole: %d files, %s", entry.name,
                                                           entry.manifest->files_size() + 1,
                                                           FormatBytes(CountBytes(*entry.manifest)))
                                         : std::string(status.message());
    std::puts(line.c_str());
  }
  return first_error;
}

// A file or directory that cannot be read is to be mended here: no other machine keeps it back.
absl::Status AsMistake(const absl::Status& status) {
  const bool is_of_disk = absl::IsUnavailable(status) || absl::IsFailedPrecondition(status);
  return is_of_disk ? absl::InvalidArgumentError(status.message()) : status;
}

absl::StatusOr<int> Examine(const Flags& flags) {
  const std::unique_ptr<Disk> disk = OpenDirectory(flags.directory);
  const CheckpointDir dir(*disk);
  const absl::StatusOr<std::vector<CheckpointEntry>> entries = dir.List();
  if (!entries.ok()) return AsMistake(entries.status());
  if (entries->empty()) {
    return absl::NotFoundError(
        absl::StrCat("there is no committed checkpoint in ", flags.directory));
  }
  if (flags.action == kVerify) return ExitCodeOf(AsMistake(Verify(dir, *entries)));
  std::fputs(FormatCheckpoints(*entries).c_str(), stdout);
  return kExitOk;
}

}  // namespace

std::string FormatCheckpoints(const std::vector<CheckpointEntry>& entries) {
  std::vector<std::vector<std::string>> rows = {
      {"CHECKPOINT", "STEP", "JOB", "WORKERS", "PARAMETERS", "FILES", "SIZE", "COMMITTED"}};
  std::string details;
  for (const CheckpointEntry& entry : entries) {
    if (!entry.manifest.ok()) {
      absl::StrAppend(&details, "\n", entry.manifest.status().message(), "\n");
      continue;
    }
    const CheckpointManifest& manifest = *entry.manifest;
    const bool is_newest = rows.size() == 1;
    rows.push_back(
        {entry.name, absl::StrCat(manifest.step()), manifest.job(),
         absl::StrCat(manifest.world_size()), absl::StrCat(CountParameters(manifest)),
         absl::StrCat(manifest.files_size() + 1), FormatBytes(CountBytes(manifest)),
         absl::StrCat(FormatTime(manifest.committed_us()), is_newest ? "  (newest)" : "")});
    absl::StrAppend(&details, Describe(entry.name, manifest));
  }
  return absl::StrCat(Align(rows), details);
}

Command AddCheckpointCommand(CLI::App& program) {
  // Shared by the flags' and the command's closures.
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *program.add_subcommand(
      "checkpoint", "Tell what is in a directory of checkpoints, and whether it is whole");
  app.footer(
      "inspect: each committed checkpoint's job, step, workers, sizes and time; the newest first.\n"
      "verify: reads all of them, and names the file and section that is damaged; exit code 65.\n\n"
      "Examples:\n"
      "  signpost checkpoint inspect /mnt/shared/bert\n"
      "  signpost checkpoint verify /mnt/shared/bert");
  app.add_option("ACTION", flags->action, "What to do")
      ->required()
      ->check(CLI::IsMember({kInspect, kVerify}).description(""))
      ->type_name("inspect|verify");
  app.add_option("DIR", flags->directory, "Where the checkpoints are")->required()->type_name("");
  return {&app, [flags] { return Examine(*flags); }};
}

}  // namespace signpost::cli
