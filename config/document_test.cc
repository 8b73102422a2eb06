#include "config/document.h"

#include <sys/stat.h>

#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::config {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Node ParseGood(absl::string_view text) {
  const absl::StatusOr<Document> document = Document::Parse("job.yaml", text);
  EXPECT_TRUE(document.ok()) << document.status();
  return document.ok() ? document->root : Node();
}

std::string Error(absl::string_view text) {
  const absl::Status status = Document::Parse("job.yaml", text).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return std::string(status.message());
}

TEST(Document, KnowsScalarsListsAndSectionsByTheirLines) {
  const Node root = ParseGood(
      "# a job\n"
      "job: nightly\n"
      "aggregators:\n"
      "  - 10.0.0.1:4000\n"
      "  - \"10.0.0.2:4000\"\n"
      "optimizer:\n"
      "  params: {lr: 1e-3}\n"
      "node:\n");
  EXPECT_EQ(root.Find("job")->value.text, "nightly");
  EXPECT_EQ(root.Find("job")->line, 2);
  const Node& aggregators = root.Find("aggregators")->value;
  ASSERT_EQ(aggregators.kind, Node::Kind::kList);
  EXPECT_EQ(aggregators.items[0].text, "10.0.0.1:4000");
  EXPECT_EQ(aggregators.items[1].text, "10.0.0.2:4000");
  EXPECT_EQ(aggregators.items[1].line, 5);
  const Entry* const rate = root.Find("optimizer")->value.Find("params")->value.Find("lr");
  EXPECT_EQ(rate->value.text, "1e-3");
  EXPECT_EQ(rate->line, 7);
  EXPECT_EQ(root.Find("node")->value.kind, Node::Kind::kNothing);
  EXPECT_EQ(root.Find("params"), nullptr);
}

TEST(Document, OfJsonIsTheSame) {
  const Node root = ParseGood(
      "{\n"
      "  \"train_batch_size\": 8,\n"
      "  \"optimizer\": {\"params\": {\"betas\": [0.9, 0.999], \"cuda_aware\": false}}\n"
      "}\n");
  EXPECT_EQ(root.Find("train_batch_size")->value.text, "8");
  const Node& params = root.Find("optimizer")->value.Find("params")->value;
  EXPECT_EQ(params.Find("betas")->value.items[1].text, "0.999");
  EXPECT_EQ(params.Find("cuda_aware")->line, 3);
}

TEST(Document, MayBeEmpty) {
  EXPECT_EQ(ParseGood("").kind, Node::Kind::kSection);
  EXPECT_EQ(ParseGood("# nothing yet\n").entries.size(), 0);
}

TEST(Document, RefusesAKeyThatIsGivenTwiceAndNamesBothLines) {
  EXPECT_EQ(Error("job: a\nrank: 0\njob: b\n"),
            "job.yaml:3: 'job' is given twice, in line 1 before");
  EXPECT_THAT(Error("session: {rank: 0, rank: 1}"), HasSubstr("'rank' is given twice"));
}

TEST(Document, RefusesAliasesSoThatASmallFileStaysSmall) {
  EXPECT_THAT(Error("a: &x [1, 2]\nb: *x\n"), StartsWith("job.yaml:1: an anchor (&)"));
  EXPECT_THAT(Error("a: &x [lol]\nb: &y [*x, *x, *x]\nc: &z [*y, *y, *y]\n"), HasSubstr("anchor"));
  EXPECT_THAT(Error("<<: *x\n"), HasSubstr("job.yaml:1"));
}

TEST(Document, RefusesTags) {
  EXPECT_THAT(Error("a: 1\njob: !!python/object/apply:os.system [ls]\n"),
              AllOf(StartsWith("job.yaml:2: a tag"), HasSubstr("python")));
}

TEST(Document, RefusesWhatIsTooMuchBeforeItCosts) {
  EXPECT_THAT(Error(std::string(Document::kMaxBytes + 1, ' ')), HasSubstr("65536 bytes"));
  std::string deep = "a: ";
  deep.append(Document::kMaxDepth, '[');
  deep.append(Document::kMaxDepth, ']');
  EXPECT_THAT(Error(deep), HasSubstr("more than 16 lists and sections"));
  EXPECT_THAT(Error(std::string(60'000, '[')), HasSubstr("job.yaml:1"));
  EXPECT_THAT(Error(std::string(Document::kMaxKeyBytes + 1, 'k') + ": 1"), HasSubstr("100 bytes"));
  std::string many;
  for (size_t i = 0; i <= Document::kMaxEntries; ++i) many += "k" + std::to_string(i) + ":\n";
  EXPECT_THAT(Error(many), HasSubstr("job.yaml:1025: more than 1024 keys"));
}

TEST(Document, GoesAsDeepAsItSays) {
  std::string deep = "a: ";
  deep.append(Document::kMaxDepth - 1, '[');
  deep.append(Document::kMaxDepth - 1, ']');
  ParseGood(deep);
}

TEST(Document, RefusesWhatIsNotUtf8AndNamesTheLine) {
  EXPECT_THAT(Error("job: a\nnode: \xFF\n"), StartsWith("job.yaml:2: a byte that is not text"));
  for (const char* bytes : {"\xC0\x80", "\xE0\x80\x80", "\xED\xA0\x80", "\xF0\x80\x80\x80",
                            "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\x80", "\xE2\x82", "\x01"}) {
    EXPECT_THAT(Error(std::string("a: ") + bytes), HasSubstr("not text"));
  }
  EXPECT_THAT(Error(std::string("a: b\0c", 6)), HasSubstr("not text"));
  for (const char* escape : {"\\0", "\\x1b", "\\u001B", "\\r", "\\x7f"}) {
    EXPECT_THAT(Error("\na: \"b" + std::string(escape) + "c\""),
                StartsWith("job.yaml:2: a control character"));
    EXPECT_THAT(Error("\"b" + std::string(escape) + "c\": 1"), HasSubstr("control character"));
  }
  EXPECT_THAT(Error("\"a\\nb\": 1"), HasSubstr("a newline in a key"));
  EXPECT_EQ(ParseGood("a: \"b\\t\\nc\"").Find("a")->value.text, "b\t\nc");
  EXPECT_EQ(ParseGood("a: \xC3\xA9\xE2\x82\xAC\xF0\x9F\x9A\xA6").Find("a")->value.text,
            "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x9A\xA6");
}

TEST(Document, RefusesHalfAFileAndNamesTheLine) {
  EXPECT_THAT(Error("{\n  \"job\": \"nightly\",\n  \"rank\": "),
              HasSubstr("does it end, with a bracket?"));
  EXPECT_THAT(Error("job: nightly\nrank: ["), StartsWith("job.yaml:2"));
  EXPECT_THAT(Error("job: \"night"), HasSubstr("not YAML"));
}

TEST(Document, RefusesWhatHasNoKeys) {
  EXPECT_THAT(Error("nightly"), HasSubstr("the file is one text, wanted keys and values"));
  EXPECT_THAT(Error("- a\n- b\n"), HasSubstr("the file is a list"));
  EXPECT_THAT(Error("? [a, b]\n: 1\n"), HasSubstr("a list where a key should be"));
  EXPECT_THAT(Error("job: a\n---\njob: b\n"), HasSubstr("a second document"));
}

TEST(Document, ShowsNothingOfAPrivateKeyThatIsTakenForAFile) {
  const std::string error = Error(
      "-----BEGIN PRIVATE KEY-----\n"
      "MC4CAQAwBQYDK2VwBCIEIHhQ\n"
      "-----END PRIVATE KEY-----\n");
  EXPECT_EQ(error, "job.yaml:1: the file is one text, wanted keys and values");
}

TEST(Node, IsDescribedByTheBeginningOfItsText) {
  const auto describe = [](const std::string& text) {
    return Node{.kind = Node::Kind::kScalar, .text = text}.Describe();
  };
  const std::string text(kMostQuotedBytes, 'a');
  EXPECT_EQ(describe(text), "'" + text + "'");
  EXPECT_EQ(describe(text + "b"), "'" + text + "...'");
  const std::string shorter(kMostQuotedBytes - 1, 'a');
  EXPECT_EQ(describe(shorter + "\xE2\x82\xAC"), "'" + shorter + "...'");  // no half character
}

TEST(Document, IsReadFromAFileWhoseNameIsInMessages) {
  const std::string directory = testing::TempDir();
  const std::string path = directory + "/job.yaml";
  EXPECT_TRUE(absl::IsNotFound(Document::Read(path).status()));
  EXPECT_THAT(Document::Read(directory).status().message(), HasSubstr(directory));
  std::ofstream(path) << "job: nightly\nrank: [\n";
  EXPECT_THAT(Document::Read(path).status().message(), HasSubstr(path + ":"));
  std::ofstream(path) << "job: nightly\n";
  EXPECT_EQ(Document::Read(path)->root.Find("job")->value.text, "nightly");
  std::ofstream(path) << std::string(2 * Document::kMaxBytes, '#');
  EXPECT_THAT(Document::Read(path).status().message(), HasSubstr("more than"));
}

TEST(Document, IsNotReadFromAPipe) {
  const std::string path = testing::TempDir() + "/pipe";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  const absl::Status status = Document::Read(path).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(path + ": it is no regular file"));
}

TEST(Document, SaysWhyAFileCannotBeRead) {
  const absl::Status status = Document::Read(std::string(300, 'x')).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("File name too long"));
  EXPECT_THAT(std::string(Document::Read("/nowhere").status().message()),
              HasSubstr("is not there"));
}

}  // namespace
}  // namespace signpost::config
