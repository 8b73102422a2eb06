#include "trace/recorder.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/temporary_directory.h"
#include "trace/recording.h"

namespace signpost::trace {
namespace {

class RecorderTest : public ::testing::Test {
 protected:
  std::string path() const { return absl::StrCat(directory_.path(), "/recording"); }

  std::unique_ptr<Recorder> NewRecorder(uint32_t events) const {
    absl::StatusOr<std::unique_ptr<Recorder>> recorder = Recorder::Create(path(), "rank 3", events);
    EXPECT_TRUE(recorder.ok()) << recorder.status();
    return *std::move(recorder);
  }

  Recording Read() const {
    absl::StatusOr<Recording> recording = ReadRecording(path());
    EXPECT_TRUE(recording.ok()) << recording.status();
    return *std::move(recording);
  }

  static Event At(int64_t begin) { return {.kind = Kind::kWire, .begin = begin, .end = begin + 1}; }

 private:
  const TemporaryDirectory directory_{testing::TempDir() + "/recorder"};
};

TEST_F(RecorderTest, WritesDownAllOfAnEvent) {
  const std::unique_ptr<Recorder> recorder = NewRecorder(4);
  recorder->Record({.kind = Kind::kRound,
                    .begin = 5,
                    .end = 70,
                    .epoch = 1ull << 60,
                    .step = 1ull << 40,
                    .chunk = 77,
                    .rank = 8,
                    .bytes = 1ull << 33,
                    .job = recorder->LabelOf("job"),
                    .codec = recorder->LabelOf("one-bit")});
  const Recording recording = Read();
  EXPECT_EQ(recording.process, "rank 3");
  EXPECT_EQ(recording.pid, static_cast<uint64_t>(getpid()));
  EXPECT_EQ(recording.dropped, 0);
  ASSERT_EQ(recording.events.size(), 1);
  const Event& event = recording.events[0];
  EXPECT_EQ(event.kind, Kind::kRound);
  EXPECT_EQ(event.begin, 5);
  EXPECT_EQ(event.end, 70);
  EXPECT_EQ(event.epoch, 1ull << 60);
  EXPECT_EQ(event.step, 1ull << 40);
  EXPECT_EQ(event.chunk, 77);
  EXPECT_EQ(event.rank, 8);
  EXPECT_EQ(event.bytes, 1ull << 33);
  EXPECT_EQ(recording.Label(event.job), "job");
  EXPECT_EQ(recording.Label(event.codec), "one-bit");
}

TEST_F(RecorderTest, KeepsTheNewestEventsAndCountsTheOthers) {
  const std::unique_ptr<Recorder> recorder = NewRecorder(8);
  for (int64_t i = 0; i < 20; ++i) recorder->Record(At(i));
  const Recording recording = Read();
  EXPECT_EQ(recording.dropped, 12);
  std::vector<int64_t> begins;
  for (const Event& event : recording.events) begins.push_back(event.begin);
  EXPECT_THAT(begins, testing::ElementsAre(12, 13, 14, 15, 16, 17, 18, 19));
}

TEST_F(RecorderTest, GivesEachTextOneLabelAndNoneWhenThereAreTooMany) {
  const std::unique_ptr<Recorder> recorder = NewRecorder(8);
  std::set<uint16_t> labels;
  for (uint32_t i = 1; i < kMostLabels; ++i) labels.insert(recorder->LabelOf(absl::StrCat("l", i)));
  EXPECT_EQ(labels.size(), kMostLabels - 1);
  EXPECT_FALSE(labels.contains(0));
  EXPECT_EQ(Read().refused_labels, 0);
  EXPECT_EQ(recorder->LabelOf("one more"), 0);
  EXPECT_EQ(recorder->LabelOf("another"), 0);
  EXPECT_EQ(Read().refused_labels, 2);
  EXPECT_EQ(Read().Label(recorder->LabelOf("l200")), "l200");
}

TEST_F(RecorderTest, LosesNothingWithItsProcess) {
  const pid_t child = fork();
  if (child == 0) {
    const std::unique_ptr<Recorder> recorder = NewRecorder(8);
    recorder->Record(At(7));
    kill(getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  ASSERT_EQ(Read().events.size(), 1);
  EXPECT_EQ(Read().events[0].begin, 7);
}

TEST_F(RecorderTest, HasNoFileOfItsNameBeforeThatIsWhole) {
  const pid_t child = fork();
  if (child == 0) {
    // As it takes its space.
    const rlimit limit = {.rlim_cur = 4096, .rlim_max = 4096};
    setrlimit(RLIMIT_FSIZE, &limit);
    signal(SIGXFSZ, SIG_DFL);
    Recorder::Create(path(), "rank 3", 8).IgnoreError();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGXFSZ);
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(RecorderTest, DropsAnEventThatIsOverwrittenAsItIsRead) {
  const std::unique_ptr<Recorder> recorder = NewRecorder(4);
  const auto bytes = [&] {
    std::ifstream file(path(), std::ios::binary);
    return std::string((std::istreambuf_iterator<char>(file)), {});
  };
  for (int64_t i = 0; i < 4; ++i) recorder->Record(At(i));
  std::string torn = bytes();
  recorder->Record(At(4));
  const std::string later = bytes();
  // Half of the slot's bytes were read before the event, and half after it.
  const size_t end = RecordingBytes(0) + offsetof(RecordingSlot, end);
  torn.replace(end, sizeof(int64_t), later, end, sizeof(int64_t));
  const absl::StatusOr<Recording> recording = ParseRecording(torn, "x", later);
  ASSERT_TRUE(recording.ok()) << recording.status();
  EXPECT_EQ(recording->dropped, 1);
  std::vector<int64_t> begins;
  for (const Event& event : recording->events) begins.push_back(event.begin);
  EXPECT_THAT(begins, testing::ElementsAre(1, 2, 3));
}

TEST_F(RecorderTest, CountsWhatIsLostBeforeSlotsThatAreNewerThanTheHeader) {
  const std::unique_ptr<Recorder> recorder = NewRecorder(4);
  for (int64_t i = 0; i < 7; ++i) recorder->Record(At(i));
  std::ifstream file(path(), std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), {});
  const uint64_t tickets = 4;
  std::memcpy(bytes.data() + offsetof(RecordingHeader, tickets), &tickets, sizeof tickets);
  EXPECT_EQ(ParseRecording(bytes, "x")->dropped, 3);
}

TEST_F(RecorderTest, TakesEventsFromManyThreads) {
  constexpr int kThreads = 4, kEach = 1000;
  const std::unique_ptr<Recorder> recorder = NewRecorder(kThreads * kEach);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int64_t i = 0; i < kEach; ++i) recorder->Record(At(thread * kEach + i));
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Recording recording = Read();
  EXPECT_EQ(recording.dropped, 0);
  std::set<int64_t> begins;
  for (const Event& event : recording.events) begins.insert(event.begin);
  EXPECT_EQ(begins.size(), kThreads * kEach);
}

// Which two threads meet in a slot then is up to them.
TEST_F(RecorderTest, HasWholeEventsWhenThreadsGoAroundTheRing) {
  const std::unique_ptr<Recorder> recorder = NewRecorder(64);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int64_t i = 0; i < 10000; ++i) recorder->Record(At(i));
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Recording recording = Read();
  EXPECT_EQ(recording.events.size() + recording.dropped, 40000);
  EXPECT_LE(recording.events.size(), 64);
}

TEST_F(RecorderTest, LeavesAFileAloneThatIsThere) {
  const std::unique_ptr<Recorder> first = NewRecorder(8);
  EXPECT_TRUE(absl::IsAlreadyExists(Recorder::Create(path(), "rank 4").status()));
  EXPECT_EQ(Read().process, "rank 3");
}

TEST_F(RecorderTest, SaysThatADiskIsFullBeforeAnythingBegins) {
  EXPECT_FALSE(Recorder::Create("/dev/full/recording", "rank 3").ok());
}

TEST_F(RecorderTest, RefusesFilesThatAreNone) {
  EXPECT_TRUE(absl::IsNotFound(ReadRecording(path()).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ParseRecording("", "x").status()));
  NewRecorder(8).reset();
  std::string bytes(RecordingBytes(8), 'x');
  EXPECT_THAT(ParseRecording(bytes, "x").status().message(),
              testing::HasSubstr("x is no trace of a process"));
}

}  // namespace
}  // namespace signpost::trace
