#include "kernels/simulated_gpu.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/block.h"
#include "kernels/test_inputs.h"

namespace signpost::kernels::cuda {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

// Enough that each of two streams overtakes the other.
constexpr uint32_t kSeeds = 200;

// Bytes of a GPU's memory, and as many pinned, which are all `value`.
struct Bytes {
  static constexpr size_t kSize = 1000;

  Bytes(Gpu& gpu, uint8_t value)
      : here(Take(gpu.Allocate(kSize))), pinned(Take(gpu.AllocatePinned(kSize))) {
    std::memset(pinned.get(), value, kSize);
  }

  Owned<uint8_t> here, pinned;
};

// What comes out when one stream copies in and another out, which waits for it or not.
uint8_t CopiedThrough(uint32_t seed, bool waits) {
  SimulatedGpu gpu(seed);
  const Bytes sent(gpu, 1), received(gpu, 2);
  const auto in = Take(gpu.NewStream()), out = Take(gpu.NewStream());
  const auto is_in = Take(gpu.NewEvent()), is_out = Take(gpu.NewEvent());
  Succeeds(gpu.CopyIn(sent.here.get(), sent.pinned.get(), Bytes::kSize, in.get()));
  Succeeds(gpu.Record(is_in.get(), in.get()));
  if (waits) Succeeds(gpu.Wait(out.get(), is_in.get()));
  Succeeds(gpu.CopyOut(received.pinned.get(), sent.here.get(), Bytes::kSize, out.get()));
  Succeeds(gpu.Record(is_out.get(), out.get()));
  Succeeds(gpu.Await(is_out.get()));
  return received.pinned.get()[Bytes::kSize - 1];
}

TEST(SimulatedGpu, AMissingWaitShows) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "it is a data race";
#endif
  int wrong = 0;
  for (uint32_t seed = 0; seed < kSeeds; ++seed) wrong += CopiedThrough(seed, false) != 1;
  EXPECT_GT(wrong, 0);
}

TEST(SimulatedGpu, AWaitOrdersStreams) {
  for (uint32_t seed = 0; seed < kSeeds; ++seed) ASSERT_EQ(CopiedThrough(seed, true), 1) << seed;
}

TEST(SimulatedGpu, TheHostDoesNotWaitForAStream) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "it is a data race";
#endif
  // A copy reads when it happens, not when it is put on the stream.
  int late = 0;
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    SimulatedGpu gpu(seed);
    const Bytes bytes(gpu, 1);
    Succeeds(gpu.CopyIn(bytes.here.get(), bytes.pinned.get(), Bytes::kSize, nullptr));
    std::memset(bytes.pinned.get(), 2, Bytes::kSize);
    std::vector<uint8_t> read(Bytes::kSize);
    Succeeds(gpu.Read(read.data(), bytes.here.get(), Bytes::kSize, nullptr));
    late += read.back() == 2;
  }
  EXPECT_GT(late, 0);
}

TEST(SimulatedGpu, FreshMemoryIsNotZero) {
  SimulatedGpu gpu(TestSeed());
  const auto memory = Take(gpu.Allocate(3)), pinned = Take(gpu.AllocatePinned(3));
  std::vector<uint8_t> read(3);
  Succeeds(gpu.Read(read.data(), memory.get(), 3, nullptr));
  EXPECT_THAT(read, Each(0xff));
  EXPECT_EQ(pinned.get()[2], 0xff);
}

TEST(SimulatedGpu, MemoryIsGivenBackWhenStreamsAreDoneWithIt) {
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    SimulatedGpu gpu(seed);
    Bytes sent(gpu, 1);
    const Bytes received(gpu, 2);
    const auto stream = Take(gpu.NewStream());
    Succeeds(gpu.CopyIn(sent.here.get(), sent.pinned.get(), Bytes::kSize, stream.get()));
    Succeeds(gpu.CopyOut(received.pinned.get(), sent.here.get(), Bytes::kSize, stream.get()));
    sent.here = nullptr;
    ASSERT_EQ(received.pinned.get()[0], 1);
  }
}

TEST(SimulatedGpu, AStreamThatIsGivenBackFinishes) {
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    SimulatedGpu gpu(seed);
    const Bytes sent(gpu, 1), received(gpu, 2);
    auto stream = Take(gpu.NewStream());
    auto is_done = Take(gpu.NewEvent());
    Succeeds(gpu.CopyIn(sent.here.get(), sent.pinned.get(), Bytes::kSize, stream.get()));
    Succeeds(gpu.CopyOut(received.pinned.get(), sent.here.get(), Bytes::kSize, stream.get()));
    Succeeds(gpu.Record(is_done.get(), stream.get()));
    stream = nullptr;
    Succeeds(gpu.Await(is_done.get()));
    ASSERT_EQ(received.pinned.get()[0], 1);
  }
}

TEST(SimulatedGpu, MemoryIsLimited) {
  SimulatedGpu gpu(TestSeed());
  gpu.LimitMemory(1000);
  auto memory = Take(gpu.Allocate(600));
  const absl::Status status = gpu.Allocate(600).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("GPU 0 (simulated) has no room for another 600 bytes: 400 bytes of 1000 "
                        "bytes are free"));
  memory = nullptr;
  Succeeds(gpu.Allocate(600).status());
}

TEST(SimulatedGpu, UsesWhatItHasImportedAndOnlyThat) {
  SimulatedGpu gpu(TestSeed()), other(TestSeed() + 1);
  const Bytes bytes(gpu, 7);
  const ExportedMemory theirs = Take(other.AllocateExported(Bytes::kSize));
  Succeeds(other.Write(theirs.memory.get(), bytes.pinned.get(), Bytes::kSize, nullptr));
  const auto copy = [&](size_t size) {
    return gpu.Copy(bytes.here.get(), theirs.memory.get(), size, nullptr);
  };
  EXPECT_EQ(copy(1).code(), absl::StatusCode::kUnavailable);
  auto imported = Take(gpu.Import(theirs.handle)), again = Take(gpu.Import(theirs.handle));
  EXPECT_EQ(imported.get(), theirs.memory.get());
  EXPECT_EQ(gpu.CheckIsHere(imported.get()).code(), absl::StatusCode::kInvalidArgument);
  imported = nullptr;
  EXPECT_EQ(copy(Bytes::kSize + 1).code(), absl::StatusCode::kUnavailable);
  Succeeds(copy(Bytes::kSize));
  uint8_t read = 0;
  Succeeds(gpu.Read(&read, bytes.here.get(), 1, nullptr));
  EXPECT_EQ(read, 7);
  again = nullptr;
  EXPECT_EQ(copy(1).code(), absl::StatusCode::kUnavailable);

  gpu.RefuseImports();
  EXPECT_EQ(gpu.Import(theirs.handle).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(SimulatedGpu, ImportsWhatAnotherProcessHas) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "threads after a fork";
#endif
  SimulatedGpu gpu(TestSeed());
  const ExportedMemory exported = Take(gpu.AllocateExported(5000));
  const uint8_t three = 3;
  Succeeds(gpu.Write(exported.memory.get() + 4999, &three, 1, nullptr));
  const pid_t child = fork();
  if (child == 0) {
    SimulatedGpu of_child(TestSeed());
    const auto imported = of_child.Import(exported.handle);
    if (!imported.ok() || imported->get() == exported.memory.get()) _exit(1);
    uint8_t read = 0;
    if (!of_child.Read(&read, imported->get() + 4999, 1, nullptr).ok() || read != 3) _exit(2);
    const uint8_t four = 4;
    _exit(of_child.Write(imported->get(), &four, 1, nullptr).ok() ? 0 : 3);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  uint8_t read = 0;
  Succeeds(gpu.Read(&read, exported.memory.get(), 1, nullptr));
  EXPECT_EQ(read, 4);

  std::string of_nobody = exported.handle;
  std::memcpy(of_nobody.data(), &child, sizeof child);  // it begins with whose it is
  EXPECT_EQ(gpu.Import(of_nobody).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(SimulatedGpu, AFaultComesBackFromAllCallsAfterIt) {
  SimulatedGpu gpu(TestSeed());
  const Bytes bytes(gpu, 1), other(gpu, 2);
  const auto stream = Take(gpu.NewStream());
  const auto event = Take(gpu.NewEvent());
  gpu.FailOperationAfter(1);
  Succeeds(gpu.CopyIn(bytes.here.get(), bytes.pinned.get(), Bytes::kSize, stream.get()));
  // To put it on the stream works.
  Succeeds(gpu.CopyOut(other.pinned.get(), bytes.here.get(), Bytes::kSize, stream.get()));
  const absl::Status fault = gpu.Read(bytes.pinned.get(), bytes.here.get(), 1, stream.get());
  EXPECT_EQ(fault,
            absl::UnavailableError("GPU 0 (simulated): an illegal memory access was encountered"));
  EXPECT_EQ(other.pinned.get()[0], 2) << "it has no effect";

  EXPECT_EQ(gpu.Allocate(1).status(), fault);
  EXPECT_EQ(gpu.AllocatePinned(1).status(), fault);
  EXPECT_EQ(gpu.Pin(bytes.pinned.get(), 1).status(), fault);
  EXPECT_EQ(gpu.AllocateExported(1).status(), fault);
  EXPECT_EQ(gpu.Import("").status(), fault);
  EXPECT_EQ(gpu.NewStream().status(), fault);
  EXPECT_EQ(gpu.NewEvent().status(), fault);
  EXPECT_EQ(gpu.Record(event.get(), stream.get()), fault);
  EXPECT_EQ(gpu.Wait(stream.get(), event.get()), fault);
  EXPECT_EQ(gpu.Await(event.get()), fault);
  EXPECT_EQ(gpu.CopyIn(bytes.here.get(), bytes.pinned.get(), 1, nullptr), fault);
  EXPECT_EQ(gpu.CopyOut(bytes.pinned.get(), bytes.here.get(), 1, nullptr), fault);
  EXPECT_EQ(gpu.Copy(bytes.here.get(), other.here.get(), 1, nullptr), fault);
  EXPECT_EQ(gpu.SetToZero(bytes.here.get(), 1, nullptr), fault);
  EXPECT_EQ(gpu.Scale({}, nullptr, 0, 0, nullptr), fault);
  EXPECT_EQ(gpu.CheckIsHere(bytes.here.get()), fault);
}

TEST(SimulatedGpu, AFaultHoldsUpNobody) {
  SimulatedGpu gpu(TestSeed());
  const Bytes bytes(gpu, 1);
  const auto failing = Take(gpu.NewStream()), waiting = Take(gpu.NewStream());
  const auto behind = Take(gpu.NewEvent()), last = Take(gpu.NewEvent());
  gpu.FailOperationAfter(0);
  Succeeds(gpu.SetToZero(bytes.here.get(), 1, failing.get()));
  // They may say so already.
  absl::Status status = gpu.Record(behind.get(), failing.get());
  status.Update(gpu.Wait(waiting.get(), behind.get()));
  status.Update(gpu.Record(last.get(), waiting.get()));
  status.Update(gpu.Await(last.get()));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
}

TEST(SimulatedGpu, KernelsFaultOnMemoryOfTheHosts) {
  for (const bool is_here : {true, false}) {
    SimulatedGpu gpu(TestSeed());
    const Bytes bytes(gpu, 0);
    float on_host = 0;
    const ScaleSegment segment = {
        2, is_here ? reinterpret_cast<float*>(bytes.here.get()) : &on_host, 1};
    const auto segments = Take(gpu.Allocate(sizeof segment));
    Succeeds(gpu.Write(segments.get(), &segment, sizeof segment, nullptr));
    Succeeds(gpu.Scale({}, reinterpret_cast<const ScaleSegment*>(segments.get()), 1, 1, nullptr));
    uint8_t read;
    EXPECT_EQ(gpu.Read(&read, bytes.here.get(), 1, nullptr).ok(), is_here);
  }
}

TEST(SimulatedGpu, CopiesAreOfWhatIsAllocated) {
  SimulatedGpu gpu(TestSeed());
  const Bytes bytes(gpu, 1);
  const auto copy_in = [&](void* to, const void* from, size_t size) {
    return gpu.CopyIn(to, from, size, nullptr).code();
  };
  const auto refused = absl::StatusCode::kUnavailable;
  std::vector<uint8_t> on_host(Bytes::kSize);
  EXPECT_EQ(copy_in(bytes.here.get() + 1, bytes.pinned.get() + 1, 999), absl::StatusCode::kOk);
  EXPECT_EQ(copy_in(bytes.here.get() + 1, bytes.pinned.get(), 1000), refused);
  EXPECT_EQ(copy_in(bytes.here.get(), bytes.pinned.get() + 1, 1000), refused);
  EXPECT_EQ(copy_in(bytes.here.get(), on_host.data(), 1), refused) << "it is not pinned";
  EXPECT_EQ(copy_in(on_host.data(), bytes.pinned.get(), 1), refused) << "it is not the GPU's";

  const Bytes other(gpu, 2);
  const auto copy = [&](void* to, const void* from, size_t size) {
    return gpu.Copy(to, from, size, nullptr).code();
  };
  EXPECT_EQ(copy(other.here.get() + 1, bytes.here.get() + 1, 999), absl::StatusCode::kOk);
  EXPECT_EQ(copy(other.here.get() + 1, bytes.here.get(), 1000), refused);
  EXPECT_EQ(copy(other.here.get(), bytes.here.get() + 1, 1000), refused);
  EXPECT_EQ(copy(other.here.get(), bytes.pinned.get(), 1), refused);
}

TEST(SimulatedGpu, PinsNoMoreThanItIsLet) {
  SimulatedGpu gpu(TestSeed());
  const Bytes bytes(gpu, 1);
  uint8_t host[100] = {};
  gpu.LimitPins(Bytes::kSize + sizeof host - 1);
  const absl::Status refused = gpu.Pin(host, sizeof host).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(
      std::string(refused.message()),
      HasSubstr("GPU 0 (simulated) cannot have 100 bytes of the host's memory pinned for its "
                "copies (simulated): give the host"));
  const auto copies = [&] { return gpu.CopyOut(host, bytes.here.get(), 1, nullptr).ok(); };
  EXPECT_FALSE(copies());
  {
    const auto pinned = Take(gpu.Pin(host, sizeof host - 1));
    EXPECT_TRUE(copies());
  }
  EXPECT_FALSE(copies()) << "it is pinned no more";
}

TEST(SimulatedGpu, CountsWhatItIsAskedFor) {
  SimulatedGpu gpu(TestSeed());
  const Bytes bytes(gpu, 1);  // one of each
  const auto memory = Take(gpu.Allocate(8));
  const auto stream = Take(gpu.NewStream());
  const auto event = Take(gpu.NewEvent()), other_event = Take(gpu.NewEvent());
  uint8_t host[100] = {};
  Succeeds(gpu.CopyIn(bytes.here.get(), bytes.pinned.get(), 1, nullptr));
  Succeeds(gpu.Write(bytes.here.get(), host, 2, nullptr));
  Succeeds(gpu.CopyOut(bytes.pinned.get(), bytes.here.get(), 10, nullptr));
  Succeeds(gpu.Read(host, bytes.here.get(), 20, nullptr));
  Succeeds(gpu.SetToZero(memory.get(), 8, nullptr));
  Succeeds(gpu.Copy(memory.get(), bytes.here.get(), 8, nullptr));
  Succeeds(gpu.Sum(nullptr, 0, nullptr, reinterpret_cast<double*>(memory.get()), nullptr));
  Succeeds(gpu.Record(event.get(), nullptr));
  Succeeds(gpu.Pin(host, sizeof host).status());
  const SimulatedGpu::Counts counts = gpu.counts();
  EXPECT_EQ(counts.allocations, 2);
  EXPECT_EQ(counts.pinned_allocations, 1);
  EXPECT_EQ(counts.pins, 1);
  EXPECT_EQ(counts.streams, 1);
  EXPECT_EQ(counts.events, 2);
  EXPECT_EQ(counts.operations, 7);
  EXPECT_EQ(counts.bytes_in, 3);
  EXPECT_EQ(counts.bytes_out, 30);
}

}  // namespace
}  // namespace signpost::kernels::cuda
