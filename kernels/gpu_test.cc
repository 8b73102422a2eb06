// What a Gpu promises, of whichever these tests have: simulated on the host, or real.

#include "kernels/gpu.h"

#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/run_cuda.h"
#include "kernels/test_inputs.h"

namespace signpost::kernels::cuda {
namespace {

using ::testing::HasSubstr;

Owned<uint8_t> Pinned(absl::Span<const uint8_t> bytes) {
  Owned<uint8_t> pinned = Take(TestGpu().AllocatePinned(bytes.size()));
  std::memcpy(pinned.get(), bytes.data(), bytes.size());
  return pinned;
}

TEST(Gpu, WhatIsCopiedInComesOut) {
  Random random;
  for (const size_t bytes : {1, 7, 4096, 100003}) {
    SCOPED_TRACE(bytes);
    const std::vector<uint8_t> sent = random.Bytes(bytes);
    const Owned<uint8_t> from = Pinned(sent);
    const Owned<uint8_t> memory = Take(TestGpu().Allocate(bytes));
    const Owned<uint8_t> to = Pinned(std::vector<uint8_t>(bytes));
    const Owned<CUstream_st> stream = Take(TestGpu().NewStream());
    const Owned<CUevent_st> event = Take(TestGpu().NewEvent());
    Succeeds(TestGpu().CopyIn(memory.get(), from.get(), bytes, stream.get()));
    Succeeds(TestGpu().CopyOut(to.get(), memory.get(), bytes, stream.get()));
    Succeeds(TestGpu().Record(event.get(), stream.get()));
    Succeeds(TestGpu().Await(event.get()));
    EXPECT_TRUE(SameBytes<uint8_t>({to.get(), bytes}, sent));
  }
}

TEST(Gpu, CopiesFromAndToMemoryThatIsPinnedLater) {
  constexpr size_t kBytes = 3 * 4096 + 5;
  Random random;
  const std::vector<uint8_t> sent = random.Bytes(kBytes);
  const Owned<uint8_t> memory = Take(TestGpu().Allocate(kBytes));
  const Owned<CUstream_st> stream = Take(TestGpu().NewStream());
  const Owned<CUevent_st> event = Take(TestGpu().NewEvent());
  for (int turn = 0; turn < 2; ++turn) {  // the second time it has been pinned before
    // As processes share it.
    void* const shared =
        mmap(nullptr, 2 * kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(shared, MAP_FAILED);
    auto* const from = static_cast<uint8_t*>(shared);
    std::memcpy(from, sent.data(), kBytes);
    {
      const Owned<uint8_t> pinned = Take(TestGpu().Pin(shared, 2 * kBytes));
      EXPECT_EQ(pinned.get(), from);
      Succeeds(TestGpu().CopyIn(memory.get(), from, kBytes, stream.get()));
      Succeeds(TestGpu().CopyOut(from + kBytes, memory.get(), kBytes, stream.get()));
      Succeeds(TestGpu().Record(event.get(), stream.get()));
      Succeeds(TestGpu().Await(event.get()));
    }
    EXPECT_TRUE(SameBytes<uint8_t>({from + kBytes, kBytes}, sent));
    munmap(shared, 2 * kBytes);
  }
}

TEST(Gpu, WritesAndReadsAnyMemoryOfTheHosts) {
  uint8_t there[] = {1, 2, 3, 4, 5}, back[5] = {};
  const Owned<uint8_t> memory = Take(TestGpu().Allocate(sizeof there));
  Succeeds(TestGpu().Write(memory.get(), there, sizeof there, nullptr));
  Succeeds(TestGpu().SetToZero(memory.get() + 1, 3, nullptr));
  Succeeds(TestGpu().Read(back, memory.get(), sizeof back, nullptr));
  EXPECT_THAT(back, testing::ElementsAre(1, 0, 0, 0, 5));
}

TEST(Gpu, CopiesWithinItsMemoryInTheOrderOfTheStream) {
  uint8_t there[] = {1, 2, 3, 4, 5}, back[5] = {};
  const Owned<uint8_t> from = Take(TestGpu().Allocate(5)), to = Take(TestGpu().Allocate(5));
  const Owned<CUstream_st> stream = Take(TestGpu().NewStream());
  Succeeds(TestGpu().Write(from.get(), there, sizeof there, stream.get()));
  Succeeds(TestGpu().SetToZero(to.get(), 5, stream.get()));
  Succeeds(TestGpu().Copy(to.get() + 1, from.get() + 2, 3, stream.get()));
  Succeeds(TestGpu().SetToZero(from.get(), 5, stream.get()));
  Succeeds(TestGpu().Copy(to.get(), from.get(), 0, stream.get()));
  Succeeds(TestGpu().Read(back, to.get(), sizeof back, stream.get()));
  EXPECT_THAT(back, testing::ElementsAre(0, 3, 4, 5, 0));
}

TEST(Gpu, ImportsWhatIsExported) {
  uint8_t there[] = {1, 2, 3, 4, 5}, back[5] = {};
  const ExportedMemory exported = Take(TestGpu().AllocateExported(5));
  const Owned<uint8_t> own = Take(TestGpu().Allocate(5));
  Succeeds(TestGpu().Write(exported.memory.get(), there, sizeof there, nullptr));
  {
    const Owned<uint8_t> imported = Take(TestGpu().Import(exported.handle));
    const Owned<uint8_t> again = Take(TestGpu().Import(exported.handle));
    Succeeds(TestGpu().Copy(own.get(), imported.get(), 5, nullptr));
    Succeeds(TestGpu().Copy(again.get() + 1, own.get(), 2, nullptr));
    Succeeds(TestGpu().SetToZero(own.get(), 5, nullptr));
  }
  Succeeds(TestGpu().Read(back, exported.memory.get(), sizeof back, nullptr));
  EXPECT_THAT(back, testing::ElementsAre(1, 1, 2, 4, 5));
}

constexpr char kHandles[] = "SIGNPOST_TEST_HANDLES";  // of two memories, in hex

// What the other process of the next test does.
TEST(Gpu, DISABLED_OtherProcess) {
  const std::vector<std::string> handles = absl::StrSplit(std::getenv(kHandles), ',');
  const auto import = [&](size_t i) {
    return Take(TestGpu().Import(absl::HexStringToBytes(handles[i])));
  };
  const Owned<uint8_t> five = import(0), again = import(0), one = import(1);
  uint8_t read[6] = {};
  Succeeds(TestGpu().Read(read, five.get(), 5, nullptr));
  Succeeds(TestGpu().Read(read + 5, one.get(), 1, nullptr));
  EXPECT_THAT(read, testing::ElementsAre(1, 2, 3, 4, 5, 6));
  Succeeds(TestGpu().Copy(again.get() + 4, one.get(), 1, nullptr));
  Succeeds(TestGpu().Copy(one.get(), five.get(), 1, nullptr));
  Succeeds(TestGpu().Read(read, one.get(), 1, nullptr));  // and waits
}

TEST(Gpu, AnotherProcessImportsWhatIsExported) {
  const uint8_t there[] = {1, 2, 3, 4, 5, 6};
  const ExportedMemory five = Take(TestGpu().AllocateExported(5));
  const ExportedMemory one = Take(TestGpu().AllocateExported(1));
  Succeeds(TestGpu().Write(five.memory.get(), there, 5, nullptr));
  Succeeds(TestGpu().Write(one.memory.get(), there + 5, 1, nullptr));
  setenv(kHandles,
         absl::StrCat(absl::BytesToHexString(five.handle), ",", absl::BytesToHexString(one.handle))
             .c_str(),
         /*overwrite=*/1);

  // This program, by way of whatever has started it, and not a part of its tests only.
  for (const char* variable : {"GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX"}) unsetenv(variable);
  std::ifstream file("/proc/self/cmdline");
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) arguments.push_back(argument);
  arguments.push_back("--gtest_also_run_disabled_tests");
  arguments.push_back("--gtest_filter=Gpu.DISABLED_OtherProcess");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_t other;
  ASSERT_EQ(posix_spawn(&other, "/proc/self/exe", nullptr, nullptr, argv.data(), environ), 0);
  int status = -1;
  ASSERT_EQ(waitpid(other, &status, 0), other);
  EXPECT_EQ(status, 0);

  uint8_t back[6] = {};
  Succeeds(TestGpu().Read(back, five.memory.get(), 5, nullptr));
  Succeeds(TestGpu().Read(back + 5, one.memory.get(), 1, nullptr));
  EXPECT_THAT(back, testing::ElementsAre(1, 2, 3, 4, 6, 1));
}

TEST(Gpu, ImportsNothingElse) {
  const ExportedMemory exported = Take(TestGpu().AllocateExported(5));
  const std::string& handle = exported.handle;
  for (const std::string& other : {std::string(), handle + "x", handle.substr(1)}) {
    EXPECT_EQ(TestGpu().Import(other).status().code(), absl::StatusCode::kInvalidArgument);
  }
  Succeeds(TestGpu().Allocate(1).status());  // nothing else has failed
}

TEST(Gpu, TellsItsStreams) {
  const Owned<CUstream_st> stream = Take(TestGpu().NewStream());
  Succeeds(TestGpu().CheckIsOurs(stream.get()));
  Succeeds(TestGpu().CheckIsOurs(nullptr));
  Succeeds(TestGpu().Allocate(1).status());  // and has this thread's context left as it was
}

// One stream copies in and scales what another copies out, each a part at a time.
TEST(Gpu, EventsOrderStreams) {
  constexpr size_t kParts = 8, kElements = 1 << 18, kBytes = 4 * kElements;
  const BlockRule rule;
  const Owned<uint8_t> memory = Take(TestGpu().Allocate(kBytes));
  const Owned<uint8_t> segments = Take(TestGpu().Allocate(sizeof(ScaleSegment)));
  const ScaleSegment segment = {2, reinterpret_cast<float*>(memory.get()), kElements};
  Succeeds(TestGpu().Write(segments.get(), &segment, sizeof segment, nullptr));
  const Owned<CUstream_st> in = Take(TestGpu().NewStream()), out = Take(TestGpu().NewStream());
  const Owned<CUevent_st> is_scaled = Take(TestGpu().NewEvent());
  const Owned<CUevent_st> is_out = Take(TestGpu().NewEvent());
  std::vector<Owned<uint8_t>> sent, received;
  for (size_t part = 0; part < kParts; ++part) {
    const std::vector<float> values(kElements, 1.0f + part);
    sent.push_back(Take(TestGpu().AllocatePinned(kBytes)));
    std::memcpy(sent.back().get(), values.data(), kBytes);
    received.push_back(Take(TestGpu().AllocatePinned(kBytes)));
  }
  for (size_t part = 0; part < kParts; ++part) {
    Succeeds(TestGpu().Wait(in.get(), is_out.get()));
    Succeeds(TestGpu().CopyIn(memory.get(), sent[part].get(), kBytes, in.get()));
    Succeeds(TestGpu().Scale(rule, reinterpret_cast<const ScaleSegment*>(segments.get()), 1,
                             BlockCount(kElements, rule.block_elements), in.get()));
    Succeeds(TestGpu().Record(is_scaled.get(), in.get()));
    Succeeds(TestGpu().Wait(out.get(), is_scaled.get()));
    Succeeds(TestGpu().CopyOut(received[part].get(), memory.get(), kBytes, out.get()));
    Succeeds(TestGpu().Record(is_out.get(), out.get()));
  }
  Succeeds(TestGpu().Await(is_out.get()));
  for (size_t part = 0; part < kParts; ++part) {
    const auto* const values = reinterpret_cast<const float*>(received[part].get());
    for (size_t i = 0; i < kElements; i += 1023) ASSERT_EQ(values[i], 2 * (1.0f + part)) << part;
  }
}

TEST(Gpu, AnEventThatWasNotRecordedHasHappened) {
  const Owned<CUstream_st> stream = Take(TestGpu().NewStream());
  const Owned<CUevent_st> event = Take(TestGpu().NewEvent());
  const Owned<CUevent_st> end = Take(TestGpu().NewEvent());
  Succeeds(TestGpu().Await(event.get()));
  EXPECT_TRUE(Take(TestGpu().HasHappened(event.get())));
  Succeeds(TestGpu().Wait(stream.get(), event.get()));
  Succeeds(TestGpu().Record(end.get(), stream.get()));
  Succeeds(TestGpu().Await(end.get()));
  EXPECT_TRUE(Take(TestGpu().HasHappened(end.get())));
}

// If the first wait were for the event's second record too, both streams would wait for ever.
TEST(Gpu, AWaitIsForTheRecordBeforeIt) {
  const Owned<CUstream_st> first = Take(TestGpu().NewStream());
  const Owned<CUstream_st> second = Take(TestGpu().NewStream());
  const Owned<CUevent_st> twice = Take(TestGpu().NewEvent()), once = Take(TestGpu().NewEvent());
  Succeeds(TestGpu().Record(twice.get(), first.get()));
  Succeeds(TestGpu().Wait(second.get(), twice.get()));
  Succeeds(TestGpu().Record(once.get(), second.get()));
  Succeeds(TestGpu().Wait(first.get(), once.get()));
  Succeeds(TestGpu().Record(twice.get(), first.get()));
  Succeeds(TestGpu().Await(twice.get()));
}

// The newest record is awaited.
TEST(Gpu, AnEventIsRecordedAgain) {
  constexpr size_t kElements = 1 << 16;
  const BlockRule rule;
  const std::vector<float> ones(kElements, 1.0f);
  const Owned<uint8_t> memory = Take(TestGpu().Allocate(4 * kElements));
  const Owned<uint8_t> segments = Take(TestGpu().Allocate(sizeof(ScaleSegment)));
  const Owned<uint8_t> out = Take(TestGpu().AllocatePinned(4 * kElements));
  const ScaleSegment segment = {2, reinterpret_cast<float*>(memory.get()), kElements};
  const Owned<CUstream_st> stream = Take(TestGpu().NewStream());
  const Owned<CUevent_st> event = Take(TestGpu().NewEvent());
  Succeeds(TestGpu().Write(segments.get(), &segment, sizeof segment, stream.get()));
  Succeeds(TestGpu().Write(memory.get(), ones.data(), 4 * kElements, stream.get()));
  for (int i = 0; i < 4; ++i) {
    Succeeds(TestGpu().Scale(rule, reinterpret_cast<const ScaleSegment*>(segments.get()), 1,
                             BlockCount(kElements, rule.block_elements), stream.get()));
    Succeeds(TestGpu().CopyOut(out.get(), memory.get(), 4 * kElements, stream.get()));
    Succeeds(TestGpu().Record(event.get(), stream.get()));
  }
  Succeeds(TestGpu().Await(event.get()));
  EXPECT_EQ(reinterpret_cast<const float*>(out.get())[kElements - 1], 16.0f);
}

TEST(Gpu, TellsItsMemoryFromTheHosts) {
  const Owned<uint8_t> memory = Take(TestGpu().Allocate(100));
  Succeeds(TestGpu().CheckIsHere(memory.get()));
  Succeeds(TestGpu().CheckIsHere(memory.get() + 99));

  const int on_stack = 0;
  absl::Status status = TestGpu().CheckIsHere(&on_stack);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(TestGpu().name()));
  EXPECT_THAT(std::string(status.message()), HasSubstr("the host's memory: "));

  const Owned<uint8_t> pinned = Take(TestGpu().AllocatePinned(100));
  status = TestGpu().CheckIsHere(pinned.get());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("(pinned)"));

  status = TestGpu().CheckIsHere(nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("a null pointer"));
}

TEST(Gpu, SaysHowMuchRoomThereIs) {
  const absl::Status status = TestGpu().Allocate(size_t{1} << 50).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no room for another 1048576.0 GiB"));
  // And goes on.
  Succeeds(TestGpu().Allocate(100).status());
}

TEST(Gpu, AllocatesNothingForNoBytes) {
  EXPECT_EQ(Take(TestGpu().Allocate(0)), nullptr);
  EXPECT_EQ(Take(TestGpu().AllocatePinned(0)), nullptr);
}

}  // namespace
}  // namespace signpost::kernels::cuda
