// A configuration file for all processes of a job: what its top level means. docs/configuration.md
// has all of its keys.
//
//   job: nightly                  # what all processes share: the keys of session_keys.h
//   failure-timeout: 20s
//   aggregator: {shard: 0/2}      # the flags of a command of `signpost`; commands in commands nest
//   session: {threads: 4}         # what training processes read, before what is shared
//   optimizer: {type: OneBitAdam, params: {lr: 1e-3, freeze_step: 400}}
//
// Words in a key are joined by '-' or by '_', which are the same.
//
// A file with train_batch_size, fp16 or some other key that only DeepSpeed has is DeepSpeed's. Of
// it only `optimizer` is read, and every other key may stand there that is not one of ours.

#ifndef SIGNPOST_CONFIG_FILE_H_
#define SIGNPOST_CONFIG_FILE_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "config/document.h"
#include "config/setting.h"

namespace signpost::config {

// The sections that commands of `signpost` have.
absl::Span<const absl::string_view> CommandSections();

// As keys are compared: "failure-timeout" of "failure_timeout".
std::string Canonical(absl::string_view key);

class File {
 public:
  File(File&&) = default;  // a copy's not_read() would be of the first one
  File& operator=(File&&) = default;

  // Errors as Document's; and INVALID_ARGUMENT, with line and suggestion, for a key that is not
  // known on the top level or in `session`. What is in other sections is for those to check who
  // know their keys.
  static absl::StatusOr<File> Parse(absl::string_view name, absl::string_view text);
  static absl::StatusOr<File> Read(const std::string& path);

  // $SIGNPOST_CONFIG; none if it is not set, or empty.
  static absl::StatusOr<std::optional<File>> FromEnvironment();

  const Document& document() const { return document_; }

  // "optimizer", say; null where there is none.
  const Node* Section(absl::string_view name) const;
  // An entry of what all processes share, or null.
  const Entry* Shared(absl::string_view key) const;

  // Of a file of DeepSpeed's, all but the optimizer: the entries that mean nothing here.
  const std::vector<const Entry*>& not_read() const { return not_read_; }

  // OK if all keys of the section, `where` in messages, are among those that are known, and none is
  // there in both spellings. Otherwise INVALID_ARGUMENT with the line and the nearest one.
  absl::Status CheckKeys(const Node& section, absl::string_view where,
                         const std::vector<std::string>& known) const;

 private:
  File() = default;

  absl::Status Check();
  absl::Status CheckOurs() const;
  absl::Status CheckSessionKey(const Entry& entry) const;
  absl::Status CheckDeepSpeeds();

  Document document_;
  std::vector<const Entry*> not_read_;
};

// The section's entry of that key, in either spelling; null if there is none.
const Entry* FindKey(const Node& section, absl::string_view key);

}  // namespace signpost::config

#endif  // SIGNPOST_CONFIG_FILE_H_
