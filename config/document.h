// A configuration file as it is written: YAML, of which JSON is a part. Everything knows its line;
// what it means is for others to say.

#ifndef SIGNPOST_CONFIG_DOCUMENT_H_
#define SIGNPOST_CONFIG_DOCUMENT_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace signpost::config {

struct Entry;

// 'text' for messages, of which they show the beginning: somebody may have taken a key's file, or a
// token's, for a configuration.
std::string Quoted(absl::string_view text);
constexpr size_t kMostQuotedBytes = 40;

// A value: a scalar, which is text until somebody wants a number, a list, a section, or nothing
// ("key:" and no more, or null).
struct Node {
  enum class Kind { kNothing, kScalar, kList, kSection };

  Kind kind = Kind::kNothing;
  int line = 1;                // where it begins
  std::string text;            // of a scalar
  std::vector<Node> items;     // of a list
  std::vector<Entry> entries;  // of a section, in the file's order, no key twice

  // Of a section; null if it has no such key, or is no section.
  const Entry* Find(absl::string_view key) const;
  // "a list", for messages.
  std::string Describe() const;
};

struct Entry {
  std::string key;
  int line = 1;
  Node value;
};

struct Document {
  // What is more than a person writes is refused before it costs anything.
  static constexpr size_t kMaxBytes = 64 << 10;
  static constexpr int kMaxDepth = 16;
  static constexpr size_t kMaxEntries = 1024;  // of one section
  static constexpr size_t kMaxKeyBytes = 100;

  std::string name;  // in messages: the file's
  Node root;         // a section, perhaps without entries

  // "job.yaml:7"
  std::string Place(int line) const;
  // INVALID_ARGUMENT "job.yaml:7: ...".
  absl::Status Error(int line, absl::string_view message) const;

  // INVALID_ARGUMENT, with the line, for what is not YAML or not UTF-8, a key that is given twice,
  // too much of it, a second document, and for what YAML has beyond scalars, lists and sections:
  // anchors and aliases, which could make much of little, and tags.
  static absl::StatusOr<Document> Parse(absl::string_view name, absl::string_view text);

  // The same of a file. With the path: NOT_FOUND, or INVALID_ARGUMENT when it cannot be read.
  static absl::StatusOr<Document> Read(const std::string& path);
};

}  // namespace signpost::config

#endif  // SIGNPOST_CONFIG_DOCUMENT_H_
