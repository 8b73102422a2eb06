#include "config/document.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/small_file.h"

namespace signpost::config {
namespace {

// How many bytes the UTF-8 character at the beginning of `text` has; 0: it is none. Surrogates,
// what is beyond Unicode, and longer forms than need be are none.
size_t CharacterBytes(absl::string_view text) {
  const auto byte = [&text](size_t i) { return static_cast<uint8_t>(text[i]); };
  const size_t bytes = byte(0) < 0x80   ? 1
                       : byte(0) < 0xC2 ? 0
                       : byte(0) < 0xE0 ? 2
                       : byte(0) < 0xF0 ? 3
                       : byte(0) < 0xF5 ? 4
                                        : 0;
  if (bytes > text.size()) return 0;
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  if (byte(0) == 0xE0 && byte(1) < 0xA0) return 0;
  if (byte(0) == 0xED && byte(1) > 0x9F) return 0;
  if (byte(0) == 0xF0 && byte(1) < 0x90) return 0;
  if (byte(0) == 0xF4 && byte(1) > 0x8F) return 0;
  return bytes;
}

bool IsText(absl::string_view character) {
  const auto first = static_cast<uint8_t>(character[0]);
  if (first >= 0x20) return first != 0x7F;
  return first == '\t' || first == '\n' || first == '\r';
}

// Why the file is refused, as an exception: yaml-cpp tells what it reads by callbacks.
struct Refusal {
  int line;
  std::string message;
};

int LineOf(const YAML::Mark& mark) { return mark.line + 1; }

// Builds the tree of one document.
class TreeBuilder final : public YAML::EventHandler {
 public:
  Node TakeRoot() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    Add({.kind = Node::Kind::kNothing, .line = LineOf(mark)}, "", anchor);
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    throw Refusal{LineOf(mark), "an alias (*): write the value out"};
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    for (size_t i = 0; i < value.size(); ++i) {
      if (value[i] != '\r' && IsText(absl::string_view(value).substr(i))) continue;
      throw Refusal{LineOf(mark), "a control character in a value or key"};
    }
    Add({.kind = Node::Kind::kScalar, .line = LineOf(mark), .text = value}, tag, anchor);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    Open({.kind = Node::Kind::kList, .line = LineOf(mark)}, tag, anchor);
  }
  void OnSequenceEnd() override { open_.pop_back(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    Open({.kind = Node::Kind::kSection, .line = LineOf(mark)}, tag, anchor);
  }
  void OnMapEnd() override { open_.pop_back(); }

 private:
  void Open(Node node, const std::string& tag, YAML::anchor_t anchor) {
    const int line = node.line;
    if (open_.size() == Document::kMaxDepth) {
      throw Refusal{line, absl::StrCat("more than ", Document::kMaxDepth,
                                       " lists and sections inside each other")};
    }
    open_.push_back(&Add(std::move(node), tag, anchor));
  }

  // Returns where it now is. What is open stays there while something is added to its inside.
  Node& Add(Node node, const std::string& tag, YAML::anchor_t anchor) {
    if (anchor != YAML::NullAnchor) {
      throw Refusal{node.line, "an anchor (&): there are no aliases to it either"};
    }
    // "?" and "!" stand for none, of a plain and of a quoted value.
    if (!tag.empty() && tag != "?" && tag != "!") {
      throw Refusal{node.line, absl::StrCat("a tag, ", Quoted(tag), ": values need none")};
    }
    if (open_.empty()) return root_ = std::move(node);
    Node& parent = *open_.back();
    if (parent.kind == Node::Kind::kList) return parent.items.emplace_back(std::move(node));
    if (key_.has_value()) {
      parent.entries.push_back({*std::exchange(key_, std::nullopt), key_line_, std::move(node)});
      return parent.entries.back().value;
    }
    TakeKey(parent, node);
    return parent;  // nothing is inside a key
  }

  void TakeKey(const Node& section, const Node& node) {
    // yaml-cpp takes what does not end for the first half of a key.
    if (node.kind != Node::Kind::kScalar) {
      throw Refusal{
          node.line,
          absl::StrCat(node.Describe(), " where a key should be; does it end, with a bracket?")};
    }
    if (node.text.size() > Document::kMaxKeyBytes) {
      throw Refusal{node.line,
                    absl::StrCat("a key of more than ", Document::kMaxKeyBytes, " bytes")};
    }
    if (node.text.find('\n') != std::string::npos) {
      throw Refusal{node.line, "a newline in a key"};
    }
    if (section.entries.size() == Document::kMaxEntries) {
      throw Refusal{node.line,
                    absl::StrCat("more than ", Document::kMaxEntries, " keys in a section")};
    }
    if (const Entry* const before = section.Find(node.text); before != nullptr) {
      throw Refusal{node.line, absl::StrCat(Quoted(node.text), " is given twice, in line ",
                                            before->line, " before")};
    }
    key_ = node.text;
    key_line_ = node.line;
  }

  Node root_ = {.kind = Node::Kind::kNothing};
  std::vector<Node*> open_;         // from the outside in
  std::optional<std::string> key_;  // of the innermost section, whose value comes next
  int key_line_ = 0;
};

Node BuildTree(absl::string_view text) {
  std::istringstream stream{std::string(text)};
  YAML::Parser parser(stream);
  TreeBuilder builder;
  const bool is_empty = !parser.HandleNextDocument(builder);
  Node root = builder.TakeRoot();
  TreeBuilder rest;
  if (!is_empty && parser.HandleNextDocument(rest)) {
    throw Refusal{rest.TakeRoot().line, "a second document begins here: there is room for one"};
  }
  if (root.kind == Node::Kind::kNothing) return {.kind = Node::Kind::kSection};
  if (root.kind == Node::Kind::kSection) return root;
  // Which is not shown: it may be a key or a token.
  const std::string found = root.kind == Node::Kind::kScalar ? "one text" : root.Describe();
  throw Refusal{root.line, absl::StrCat("the file is ", found, ", wanted keys and values")};
}

}  // namespace

std::string Quoted(absl::string_view text) {
  if (text.size() <= kMostQuotedBytes) return absl::StrCat("'", text, "'");
  size_t bytes = kMostQuotedBytes;
  while (bytes > 0 && (static_cast<uint8_t>(text[bytes]) & 0xC0) == 0x80) --bytes;
  return absl::StrCat("'", text.substr(0, bytes), "...'");
}

const Entry* Node::Find(absl::string_view key) const {
  for (const Entry& entry : entries) {
    if (entry.key == key) return &entry;
  }
  return nullptr;
}

std::string Node::Describe() const {
  switch (kind) {
    case Kind::kNothing:
      return "nothing";
    case Kind::kScalar:
      return Quoted(text);
    case Kind::kList:
      return "a list";
    case Kind::kSection:
      return "a section";
  }
  return "";
}

std::string Document::Place(int line) const { return absl::StrCat(name, ":", line); }

absl::Status Document::Error(int line, absl::string_view message) const {
  return absl::InvalidArgumentError(absl::StrCat(Place(line), ": ", message));
}

absl::StatusOr<Document> Document::Parse(absl::string_view name, absl::string_view text) {
  Document document = {.name = std::string(name)};
  if (text.size() > kMaxBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": more than ", kMaxBytes, " bytes; is it a configuration file?"));
  }
  int line = 1;
  for (absl::string_view rest = text; !rest.empty();) {
    const size_t bytes = CharacterBytes(rest);
    if (bytes == 0 || !IsText(rest)) {
      return document.Error(line, "a byte that is not text, in UTF-8");
    }
    if (rest[0] == '\n') ++line;
    rest.remove_prefix(bytes);
  }
  try {
    document.root = BuildTree(text);
  } catch (const Refusal& refusal) {
    return document.Error(refusal.line, refusal.message);
  } catch (const YAML::Exception& error) {
    return document.Error(LineOf(error.mark), absl::StrCat("not YAML: ", error.msg));
  }
  return document;
}

absl::StatusOr<Document> Document::Read(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadSmallFile(path, kMaxBytes);
  if (text.ok()) return Parse(path, *text);
  if (absl::IsNotFound(text.status())) {
    return absl::NotFoundError(absl::StrCat("the configuration file ", path, " is not there"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("cannot read the configuration file ", text.status().message()));
}

}  // namespace signpost::config
