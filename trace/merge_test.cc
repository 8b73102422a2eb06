#include "trace/merge.h"

#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/temporary_directory.h"
#include "trace/recorder.h"
#include "trace/recording.h"

namespace signpost::trace {
namespace {

using ::testing::_;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class MergeTest : public ::testing::Test {
 protected:
  const std::string& directory() const { return directory_.path(); }
  std::string PathOf(const std::string& name) const { return absl::StrCat(directory(), "/", name); }

  // Of one event.
  std::string Record(const std::string& name) const {
    const std::string path = PathOf(name);
    absl::StatusOr<std::unique_ptr<Recorder>> recorder = Recorder::Create(path, "rank 3", 8);
    EXPECT_TRUE(recorder.ok()) << recorder.status();
    (*recorder)->Record({.kind = Kind::kStep, .begin = 1, .end = 2});
    return path;
  }

  std::string Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(PathOf(name), std::ios::binary) << bytes;
    return PathOf(name);
  }

 private:
  const TemporaryDirectory directory_{testing::TempDir() + "/merge"};
};

TEST_F(MergeTest, LeavesOutOfADirectoryWhatCannotBeReadAndSaysSo) {
  Record("a.signpost-trace");
  const std::string empty = Write("b.signpost-trace", "");
  const std::string zeroed = Write("c.signpost-trace", std::string(RecordingBytes(8), '\0'));
  const absl::StatusOr<Timeline> timeline = ReadRecordings({directory()});
  ASSERT_TRUE(timeline.ok()) << timeline.status();
  EXPECT_EQ(timeline->processes.size(), 1);
  for (const std::string& path : {empty, zeroed}) {
    EXPECT_THAT(Describe(*timeline), Contains(AllOf(HasSubstr("left out"), HasSubstr(path))));
  }
}

TEST_F(MergeTest, FailsWhenAFileThatWasNamedCannotBeRead) {
  const std::string whole = Record("a.signpost-trace");
  const std::string empty = Write("b.signpost-trace", "");
  const absl::Status status = ReadRecordings({whole, empty}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(empty));
}

TEST_F(MergeTest, FailsWhenNothingOfADirectoryCanBeRead) {
  const std::string empty = Write("a.signpost-trace", "");
  const absl::Status status = ReadRecordings({directory()}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(empty));
}

TEST_F(MergeTest, SaysWhyItCannotRead) {
  const std::string long_name(300, 'x');
  for (const auto& status : {ReadRecordings({long_name}).status(), ReadTrace({long_name}).status(),
                             ReadRecordings({PathOf("none")}).status()}) {
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("cannot read "));
  }
}

TEST_F(MergeTest, WritesOverNoRecordingWhateverItsName) {
  const std::string recording = Record("a.signpost-trace");
  const std::string renamed = PathOf("b");
  std::filesystem::copy_file(recording, renamed);
  for (const std::string& path : {recording, renamed, PathOf("none.signpost-trace")}) {
    const absl::Status status = CheckOutput(path, {PathOf("another")});
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
  }
}

TEST_F(MergeTest, WritesOverNoInputAndNoDirectory) {
  const std::string input = Write("input", "what is no recording");
  const std::string by_another_name = absl::StrCat(directory(), "/./input");
  EXPECT_TRUE(absl::IsInvalidArgument(CheckOutput(by_another_name, {directory(), input})));
  EXPECT_TRUE(absl::IsInvalidArgument(CheckOutput(directory(), {input})));
}

TEST_F(MergeTest, WritesOverAnEarlierTrace) {
  EXPECT_TRUE(CheckOutput(PathOf("trace.json"), {directory()}).ok());
  Write("trace.json", "{}");
  EXPECT_TRUE(CheckOutput(PathOf("trace.json"), {directory()}).ok());
}

TEST_F(MergeTest, WritesOverNothingThatIsNoFile) {
  ASSERT_EQ(mkfifo(PathOf("fifo").c_str(), 0600), 0);
  for (const char* target : {"fifo", "nothing"}) {
    const std::string link = PathOf("link");
    std::filesystem::remove(link);
    std::filesystem::create_symlink(target, link);
    EXPECT_TRUE(absl::IsInvalidArgument(CheckOutput(link, {}))) << target;
    EXPECT_TRUE(absl::IsInvalidArgument(WriteTrace(Timeline(), link))) << target;
    EXPECT_EQ(std::filesystem::read_symlink(link), target);
  }
  EXPECT_TRUE(absl::IsInvalidArgument(CheckOutput(PathOf("fifo"), {})));  // and does not wait
  EXPECT_TRUE(absl::IsInvalidArgument(CheckOutput("/dev/full", {})));
}

TEST_F(MergeTest, WritesOverNothingButTheTrace) {
  Write("victim", "precious");
  std::filesystem::create_symlink("victim", PathOf("trace.json.tmp"));
  EXPECT_TRUE(WriteTrace(Timeline(), PathOf("trace.json")).ok());
  EXPECT_FALSE(std::filesystem::is_symlink(PathOf("trace.json")));
  EXPECT_EQ(std::filesystem::file_size(PathOf("victim")), 8);
}

TEST_F(MergeTest, WritesThroughALink) {
  Write("trace.json", "{}");
  std::filesystem::create_symlink("trace.json", PathOf("link"));
  const absl::Status status = WriteTrace(Timeline(), PathOf("link"));
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(std::filesystem::read_symlink(PathOf("link")), "trace.json");
  EXPECT_GT(std::filesystem::file_size(PathOf("trace.json")), 2);
}

TEST_F(MergeTest, SaysWhyItCannotWrite) {
  const std::string path = PathOf("nowhere/trace.json");
  const absl::Status status = WriteTrace(Timeline(), path);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(path), HasSubstr("No such file or directory")));
}

TEST_F(MergeTest, SaysWhichProcessHadNoRoomForNames) {
  Recording full = {.process = "aggregator 0/1"};
  full.refused_labels = 7;
  const Timeline timeline = Join({{.process = "rank 0"}, full});
  EXPECT_THAT(Describe(timeline),
              Contains(AllOf(HasSubstr("aggregator 0/1"), HasSubstr("7 times"))));
  EXPECT_THAT(Describe(timeline), Each(Not(HasSubstr("rank 0"))));
}

TEST_F(MergeTest, SaysHowManyFramesHaveNoOtherEnd) {
  const auto event = [](Kind kind, uint64_t step) {
    return Event{.kind = kind, .begin = 1, .end = 9, .step = step, .chunk = 0, .rank = 0};
  };
  Recording rank = {.process = "rank 0"}, aggregator = {.process = "aggregator 0/1"};
  rank.events = {event(Kind::kExchange, 1)};
  aggregator.events = {event(Kind::kFrame, 1), event(Kind::kRound, 1)};
  EXPECT_THAT(Describe(Join({rank, aggregator})), Each(Not(HasSubstr("no arrows"))));
  // One whose round is not there, and one, with its answer, whose exchange is not; and two
  // exchanges without a frame.
  aggregator.events.push_back(event(Kind::kFrame, 2));
  for (const Kind kind : {Kind::kFrame, Kind::kAnswer, Kind::kRound}) {
    aggregator.events.push_back(event(kind, 3));
  }
  for (const uint64_t step : {2, 4}) rank.events.push_back(event(Kind::kExchange, step));
  EXPECT_THAT(Describe(Join({rank, aggregator})),
              Contains(HasSubstr("3 frames and answers of aggregators and 2 exchanges of workers "
                                 "have no arrows")));
}

// Or had to send an earlier one, which an aggregator that was started again wanted.
TEST_F(MergeTest, SaysHowManyFramesCameWhenTheirRoundsHadClosed) {
  const auto event = [](Kind kind, int64_t begin, int64_t end, uint32_t rank) {
    return Event{.kind = kind, .begin = begin, .end = end, .step = 1, .chunk = 0, .rank = rank};
  };
  Recording rank = {.process = "rank 0"}, late = {.process = "rank 1"};
  Recording aggregator = {.process = "aggregator 0/1"};
  rank.events = {event(Kind::kExchange, 1, 9, 0)};
  late.events = {event(Kind::kExchange, 10, 11, 1)};
  aggregator.events = {event(Kind::kFrame, 2, 2, 0), event(Kind::kRound, 2, 8, 1)};
  EXPECT_THAT(Describe(Join({rank, late, aggregator})),
              ElementsAre(_,
                          "1 exchanges of workers have no arrows: their rounds had closed "
                          "without them, an aggregator that was started again asked for "
                          "earlier frames, or they failed"));
}

}  // namespace
}  // namespace signpost::trace
