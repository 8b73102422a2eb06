#include "bench/line_process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace signpost::bench {
namespace {

using ::testing::HasSubstr;

absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

std::unique_ptr<LineProcess> Shell(const std::string& script) {
  auto process = LineProcess::Start({"sh", "-c", script}, {{"GREETING", "hello"}});
  EXPECT_TRUE(process.ok()) << process.status();
  return *std::move(process);
}

TEST(LineProcess, AnswersWhatItIsTold) {
  auto process = Shell("while read line; do echo $GREETING $line; echo; done");
  for (const char* name : {"Ada", "Grace"}) {
    ASSERT_TRUE(process->Write(name).ok());
    EXPECT_EQ(*process->ReadLine(Soon()), std::string("hello ") + name);
    EXPECT_EQ(*process->ReadLine(Soon()), "");
  }
}

TEST(LineProcess, OneThatHasEndedSaysHow) {
  auto process = Shell("echo one; exit 7");
  EXPECT_EQ(*process->ReadLine(Soon()), "one");
  const absl::Status status = process->ReadLine(Soon()).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("exit 7' ended with exit code 7"));
  EXPECT_TRUE(absl::IsUnavailable(process->Write("more")));
  EXPECT_THAT(std::string(Shell("kill -9 $$")->ReadLine(Soon()).status().message()),
              HasSubstr("was killed by SIGKILL"));
}

TEST(LineProcess, OneThatSaysNothingIsNotWaitedForLonger) {
  auto process = Shell("sleep 60");
  const absl::Status status = process->ReadLine(absl::Now() + absl::Milliseconds(50)).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
}

TEST(LineProcess, ManyThatDoNotEndAreWaitedForTogether) {
  std::vector<std::unique_ptr<LineProcess>> processes;
  for (int i = 0; i < 20; ++i) {
    processes.push_back(Shell("trap '' TERM; echo; sleep 60"));
    ASSERT_TRUE(processes.back()->ReadLine(Soon()).ok());
  }
  const absl::Time start = absl::Now();
  for (const auto& process : processes) process->AskToEnd();
  EXPECT_FALSE(processes[0]->Write("more").ok());
  processes.clear();
  EXPECT_LT(absl::Now() - start, absl::Seconds(20)) << "a second each";
}

TEST(LineProcess, IsKnownToHaveEndedBeforeItIsReadFrom) {
  auto process = Shell("echo; sleep 60 & read line; exit 3");  // its output stays open
  ASSERT_TRUE(process->ReadLine(Soon()).ok());
  EXPECT_TRUE(process->CheckRuns().ok());
  ASSERT_TRUE(process->Write("").ok());
  absl::Status status;
  for (const absl::Time deadline = Soon(); status.ok() && absl::Now() < deadline;) {
    status = process->CheckRuns();
  }
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("exit 3' ended with exit code 3"));
  EXPECT_TRUE(absl::IsUnavailable(process->CheckRuns())) << "still";
}

TEST(LineProcess, IsKnownToBeStopped) {
  auto process = Shell("echo; kill -STOP $$; echo; read line");
  ASSERT_TRUE(process->ReadLine(Soon()).ok());
  for (const absl::Time deadline = Soon(); !process->is_stopped() && absl::Now() < deadline;) {
  }
  EXPECT_TRUE(process->is_stopped());
  EXPECT_TRUE(process->CheckRuns().ok());
  kill(process->pid(), SIGCONT);
  ASSERT_TRUE(process->ReadLine(Soon()).ok());
  EXPECT_FALSE(process->is_stopped());
}

TEST(LineProcess, IsAskedToEndByItsSignalAndHasItsGrace) {
  const std::string file = ::testing::TempDir() + "/signalled";
  unlink(file.c_str());
  {
    auto process = LineProcess::Start(
        {"sh", "-c",
         "trap 'sleep 2; echo $$ >" + file + "; exit' TERM; echo; while :; do sleep 0.1; done"},
        {}, {.end_signal = SIGTERM, .grace = absl::Seconds(20)});
    ASSERT_TRUE(process.ok()) << process.status();
    ASSERT_TRUE((*process)->ReadLine(Soon()).ok());
  }
  EXPECT_EQ(access(file.c_str(), F_OK), 0) << "killed before it was ready";
}

TEST(LineProcess, ItsErrorsGoWhereTheyAreToldTo) {
  auto reader = Shell("read line; echo heard $line");
  const auto process =
      LineProcess::Start({"sh", "-c", "echo wrong >&2"}, {}, {.error = reader->in()});
  ASSERT_TRUE(process.ok()) << process.status();
  EXPECT_EQ(*reader->ReadLine(Soon()), "heard wrong");
}

TEST(LineProcess, AnInterruptEndsTheWaiting) {
  const InterruptScope interrupts;
  auto process = Shell("kill -INT $PPID; sleep 60");
  EXPECT_TRUE(absl::IsCancelled(process->ReadLine(Soon()).status()));
}

TEST(LineProcess, CountsProcessorTime) {
  auto process = Shell("i=0; while [ $i -lt 300000 ]; do i=$((i + 1)); done; echo; read line");
  ASSERT_TRUE(process->ReadLine(Soon()).ok());
  EXPECT_GT(process->cpu_time(), absl::Milliseconds(20));
  EXPECT_LT(process->cpu_time(), absl::Seconds(20));
}

TEST(LineProcess, KnowsTheMostMemoryThatItHad) {
  const std::string fill = "v=$(head -c 30000000 /dev/zero | tr '\\0' x)";
  auto process = Shell(absl::StrCat(fill, "; v=; echo; read line"));
  ASSERT_TRUE(process->ReadLine(Soon()).ok());
  EXPECT_GT(process->peak_memory_bytes(), 30e6);
  EXPECT_LT(process->peak_memory_bytes(), 3e9);
}

}  // namespace
}  // namespace signpost::bench
