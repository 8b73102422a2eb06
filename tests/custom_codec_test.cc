// Codecs from outside: the example in client/examples, and some that are wrong.

#include "proto/custom_codec.h"

#include <dlfcn.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/simulated_gpu.h"
#include "proto/codec_check.h"
#include "proto/frame.h"
#include "proto/signpost_codec.h"
#include "tests/job.h"
#include "worker/worker.h"

namespace signpost::testing {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr char kTopK[] = "client/examples/libtopk.so";
constexpr char kFaulty[] = "tests/libfaulty_codec.so";
constexpr const char* kLacking[] = {"tests/libtopk_without_compress.so",
                                    "tests/libtopk_without_open_topk.so"};
constexpr char kLater[] = "tests/liblater_topk.so";

// What the check finds wrong, one line for each.
std::string TroubleOf(const std::string& fault, uint32_t block_elements = 4096) {
  const absl::StatusOr<CodecReport> report =
      CheckCodecLibrary(kFaulty, fault, {.block_elements = block_elements});
  if (!report.ok()) return std::string(report.status().message());
  std::string trouble;
  for (const CodecFinding& finding : report->findings) {
    if (!finding.trouble.empty()) trouble += finding.what + ": " + finding.trouble + "\n";
  }
  return trouble;
}

TEST(CodecCheck, FindsNothingWrongWithTheExample) {
  for (const char* options : {"", "ratio=0.001", "ratio=0.05", "ratio=1"}) {
    const absl::StatusOr<CodecReport> report = CheckCodecLibrary(kTopK, options);
    ASSERT_TRUE(report.ok()) << report.status();
    for (const CodecFinding& finding : report->findings) {
      EXPECT_EQ(finding.trouble, "") << finding.what << ", " << options;
    }
  }
  const absl::StatusOr<CodecReport> report = CheckCodecLibrary(kTopK, "ratio=0.05");
  EXPECT_EQ(report->name, "topk");
  EXPECT_NEAR(report->bits_per_parameter, 0.05 * 6 * 8, 0.01);
  EXPECT_GT(report->error_ratio, 5) << "a number waits for some 20 rounds";
}

TEST(CodecCheck, TriesBlocksAsLongAsTheJobs) {
  for (const uint32_t block : {8u, 104u, 65536u}) {
    const absl::StatusOr<CodecReport> report =
        CheckCodecLibrary(kTopK, "ratio=0.5", {.block_elements = block});
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_TRUE(report->is_good()) << block;
    EXPECT_NEAR(report->bits_per_parameter, 8 * (1 + 6 * std::ceil(block / 2.0)) / block, 1e-9);
  }
  EXPECT_THAT(CheckCodecLibrary(kTopK, "", {.block_elements = 100}).status().message(),
              HasSubstr("block_elements is 100; it must be a positive multiple of 8"));
  EXPECT_THAT(CheckCodecLibrary(kTopK, "", {.block_elements = 65537}).status().message(),
              HasSubstr("a codec takes 1 to 65536"));
}

TEST(CodecCheck, FindsWhatIsWrongWithOthers) {
  EXPECT_EQ(TroubleOf(""), "");
  EXPECT_THAT(TroubleOf("cannot unpack"), HasSubstr("what it packs it unpacks"));
  EXPECT_THAT(TroubleOf("not finite"), HasSubstr("what it packs it unpacks"));
  EXPECT_THAT(TroubleOf("leaves bytes"), HasSubstr("the same numbers give the same bytes"));
  EXPECT_THAT(TroubleOf("chance"), HasSubstr("the same numbers give the same bytes"));
  for (const uint32_t block : {8u, 4096u}) {
    EXPECT_THAT(TroubleOf("one scratch for all", block),
                HasSubstr("threads do not disturb each other"));
  }
  EXPECT_THAT(TroubleOf("writes behind"),
              HasSubstr("compress writes outside of its block, of 4096"));
  EXPECT_THAT(TroubleOf("unpacks behind"),
              HasSubstr("decompress writes outside of its values, of 4096"));
  EXPECT_THAT(TroubleOf("needs alignment"), HasSubstr("decompress writes outside of its values"));
  EXPECT_THAT(TroubleOf("sends nothing"), HasSubstr("error feedback keeps the error down"));
  EXPECT_THAT(
      TroubleOf("sends nothing of few"),
      AllOf(HasSubstr("error feedback keeps the error down"), HasSubstr("a tensor of 1\n")));
  EXPECT_THAT(TroubleOf("no bytes for one"), HasSubstr("wants 0 bytes for a block of 1 numbers"));
  EXPECT_THAT(TroubleOf("large"), HasSubstr("wants 1099511627776 bytes for a block of 4096"));
  EXPECT_THAT(TroubleOf("shrinks"),
              HasSubstr("wants 69999 bytes for a block of 1 numbers, and 65904 for one of 4096"));
  EXPECT_THAT(TroubleOf("refuses"), HasSubstr("does not take the options 'refuses': not today"));
  EXPECT_THAT(TroubleOf("refuses silently"), HasSubstr("'refuses silently': it does not say why"));
}

// How often the faulty codec has been opened, and closed, by this process.
class FaultyCodec {
 public:
  FaultyCodec() {
    EXPECT_TRUE(LoadCodecLibrary(kFaulty).ok());
    void* const library = dlopen(kFaulty, RTLD_NOW | RTLD_NOLOAD);
    opened_ = reinterpret_cast<int (*)()>(dlsym(library, "faulty_opened"));
    closed_ = reinterpret_cast<int (*)()>(dlsym(library, "faulty_closed"));
    end_ = reinterpret_cast<void (*)()>(dlsym(library, "faulty_end"));
    set_thrower_ = reinterpret_cast<void (*)(void (*)())>(dlsym(library, "faulty_set_thrower"));
  }
  int opened() const { return opened_(); }
  int open() const { return opened_() - closed_(); }
  // Those that "ends" and are open.
  void End() const { end_(); }
  void Throw(void (*thrower)()) const { set_thrower_(thrower); }

 private:
  int (*opened_)() = nullptr;
  int (*closed_)() = nullptr;
  void (*end_)() = nullptr;
  void (*set_thrower_)(void (*)()) = nullptr;
};

TEST(CustomCodec, IsOpenOnceForAllWhoHaveItAndClosedByTheLast) {
  const FaultyCodec codec;
  const int before = codec.opened();
  auto first = OpenCodec("faulty", "", 24);
  ASSERT_TRUE(first.ok());
  auto second = OpenCodecOf(first->description, 24);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(codec.opened(), before + 1);
  first->codec.reset();
  EXPECT_EQ(codec.open(), 1);
  second->reset();
  EXPECT_EQ(codec.open(), 0);
  EXPECT_TRUE(OpenCodec("faulty", "", 24).ok());
  EXPECT_EQ(codec.opened(), before + 2);
}

TEST(CustomCodec, IsClosedAgainWhenItIsRefused) {
  const FaultyCodec codec;
  for (const char* options : {"large", "shrinks"}) {
    const int before = codec.opened();
    EXPECT_FALSE(OpenCodec("faulty", options, 24).ok());
    EXPECT_EQ(codec.opened(), before + 1);
    EXPECT_EQ(codec.open(), 0) << options;
  }
}

TEST(CustomCodec, IsOpenedAnewOnceItHasEnded) {
  const FaultyCodec codec;
  const int before = codec.opened();
  const auto ended = OpenCodec("faulty", "ends", 24);
  ASSERT_TRUE(ended.ok());
  codec.End();
  for (int round = 0; round < 2; ++round) {
    const auto anew = OpenCodecOf(ended->description, 24);
    EXPECT_TRUE(anew.ok()) << anew.status();
    EXPECT_EQ(codec.opened(), before + 2 + round);
    const auto shared = OpenCodecOf(ended->description, 24);
    EXPECT_EQ(codec.opened(), before + 2 + round) << "that one is good";
  }
  EXPECT_EQ(codec.open(), 1);
}

TEST(CustomCodec, WhatItThrowsIsItsError) {
  const FaultyCodec codec;
  codec.Throw([] { throw std::runtime_error("not today"); });
  EXPECT_THAT(OpenCodec("faulty", "throws open", 24).status().message(),
              HasSubstr("codec 'faulty': open has thrown an exception: not today"));
  for (const char* function : {"block_bytes", "compress", "decompress"}) {
    EXPECT_THAT(OpenCodec("faulty", absl::StrCat("throws ", function), 24).status().message(),
                HasSubstr(absl::StrCat(function, " has thrown an exception: not today")));
  }
  codec.Throw([] { throw 1; });
  EXPECT_THAT(OpenCodec("faulty", "throws compress", 24).status().message(),
              HasSubstr("compress has thrown an exception that is no std::exception"));
  codec.Throw(nullptr);
  EXPECT_TRUE(OpenCodec("faulty", "throws compress", 24).ok());
  EXPECT_EQ(codec.open(), 0);
}

TEST(LoadCodecLibrary, NamesTheFileThatIsNone) {
  for (const char* path : {"no/such/file.so", "tests/custom_codec_test"}) {
    const absl::Status status = LoadCodecLibrary(path).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(path));
  }
  EXPECT_EQ(LoadCodecLibrary(kTopK).value(), "topk");
  EXPECT_EQ(LoadCodecLibrary(kTopK).value(), "topk") << "once more does nothing";
}

TEST(LoadCodecLibrary, RefusesOneForAnotherVersionOfTheHeader) {
  const absl::Status status = LoadCodecLibrary(kLater).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            absl::StrFormat("codec library %s is for another version of signpost_codec.h: %d, "
                            "wanted %d",
                            kLater, SIGNPOST_CODEC_ABI + 1, SIGNPOST_CODEC_ABI));
}

TEST(LoadCodecLibrary, RefusesOneThatLacksAFunction) {
  for (const char* path : kLacking) {
    const absl::Status status = LoadCodecLibrary(path).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << path;
    EXPECT_THAT(status.message(),
                HasSubstr("open, block_bytes, compress and decompress are wanted"));
  }
}

TEST(OpenCodecOf, ComparesWhatTheJobWantsWithWhatIsHere) {
  ASSERT_TRUE(LoadCodecLibrary(kTopK).ok());
  ASSERT_TRUE(LoadCodecLibrary(kFaulty).ok());
  const CustomCodec good = OpenCodec("topk", "ratio=0.5", 16)->description;
  EXPECT_TRUE(OpenCodecOf(good, 16).ok());
  CustomCodec other = good;
  other.set_version("2");
  const absl::Status version = OpenCodecOf(other, 16).status();
  EXPECT_EQ(version.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(version.message(),
              HasSubstr("wants codec 'topk' of version 2; codecs loaded here: "));
  EXPECT_THAT(version.message(), HasSubstr("topk 1"));
  other = good;
  other.set_name("bottomk");
  EXPECT_THAT(OpenCodecOf(other, 16).status().message(), HasSubstr("wants codec 'bottomk'"));
  other = good;
  other.set_options("ratio=2");
  EXPECT_THAT(OpenCodecOf(other, 16).status().message(),
              HasSubstr("ratio is 2, wanted a number in (0"));
  other = good;
  other.set_block_bytes(1);
  EXPECT_THAT(OpenCodecOf(other, 16).status().message(),
              HasSubstr("48 bytes for a block of 16 here"));
  other = good;
  other.set_digest(good.digest() + 1);
  const absl::Status digest = OpenCodecOf(other, 16).status();
  EXPECT_EQ(digest.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(digest.message(), HasSubstr("codec 'topk' of version 1 makes something else"));
  EXPECT_FALSE(OpenCodecOf(good, 32).ok());
  EXPECT_FALSE(OpenCodec("topk", "", 0).ok());
  EXPECT_FALSE(OpenCodec("topk", "", 65537).ok());
  EXPECT_FALSE(OpenCodec("topk", std::string("ratio=1\0", 8), 16).ok());
  EXPECT_THAT(OpenCodec("faulty", "\xff", 16).status().message(),
              HasSubstr("(codec_options) must be UTF-8"));
}

TEST(CustomCodecDigest, IsOfWhatTheCodecDoes) {
  ASSERT_TRUE(LoadCodecLibrary(kFaulty).ok());
  const auto digest_of = [](const std::string& fault) {
    return OpenCodec("faulty", fault, 16)->description.digest();
  };
  // By the bytes of a block, and by what it stands for.
  std::set<uint32_t> digests;
  for (const char* fault : {"", "sends nothing", "overshoots", "cannot unpack"}) {
    EXPECT_TRUE(digests.insert(digest_of(fault)).second) << fault;
  }
  EXPECT_EQ(digest_of("one scratch for all"), digest_of("")) << "alone it does the same";
}

// Checkpoints have it: with another one of the same codec they could not be resumed.
TEST(CustomCodecDigest, StaysWhatItIsFromOneSignpostToTheNext) {
  ASSERT_TRUE(LoadCodecLibrary(kTopK).ok());
  EXPECT_EQ(OpenCodec("topk", "ratio=0.5", 4096)->description.digest(), 0x9eb0b18cu);
}

JobOptionsForTest TopKJob() {
  JobOptionsForTest job;
  UseExampleCodec(job.worker);
  job.optimizer.codec = CUSTOM;
  return job;
}

TEST(CustomCodecJob, TrainsToTheSameBitsWhateverHappensOnTheWay) {
  for (const bool in_warm_up : {false, true}) {
    JobOptionsForTest job = TopKJob();
    if (in_warm_up) job.optimizer.warm_up_codec = CUSTOM;
    Cluster loopback({});
    const auto expected = Train(loopback, job);
    for (const std::vector<float>& replica : expected) EXPECT_EQ(replica, expected[0]);
    Cluster cluster({.transport = Transport::kGrpc, .aggregators = 3, .fault_seed = 7});
    EXPECT_EQ(Train(cluster, job), expected);
    job.worker.codec_options = "ratio=0.5";
    Cluster other({});
    EXPECT_NE(Train(other, job), expected) << "the options were not used";
  }
}

// The worker's and the aggregator's are the same one here.
TEST(CustomCodecJob, HasItsCodecOpenUntilItIsOver) {
  const FaultyCodec codec;
  WorkerOptions options = TopKJob().worker;
  options.job = "job";
  options.codec_library = kFaulty;
  options.codec_options = "";
  Cluster cluster({});
  const auto join = [&] {
    return Worker::JoinReduction(options, {.codec = CUSTOM}, {{.name = "tensor", .shape = {8}}},
                                 cluster.Connect());
  };
  for (int round = 0; round < 2; ++round) {
    auto worker = join();
    ASSERT_TRUE(worker.ok()) << worker.status();
    EXPECT_EQ(codec.open(), 1);
    ASSERT_TRUE((*worker)->Leave().ok());
    worker->reset();
    EXPECT_EQ(codec.open(), 0);
  }
}

// A tensor's numbers, a share at a time: in the long run all of them.
TEST(CustomCodecJob, ReducesToTheMeanInTheLongRun) {
  Cluster cluster({});
  WorkerOptions options = TopKJob().worker;
  options.job = "reduction";
  const auto worker = Worker::JoinReduction(options, {.codec = CUSTOM},
                                            {{.name = "tensor", .shape = {8}}}, cluster.Connect());
  ASSERT_TRUE(worker.ok()) << worker.status();
  std::vector<double> sum(8);
  constexpr int kCalls = 400;
  for (int call = 0; call < kCalls; ++call) {
    std::vector<float> values = {1, -2, 3, -4, 0.5, 0.25, 0, 8};
    const absl::Span<float> tensor = absl::MakeSpan(values);
    ASSERT_TRUE((*worker)->Reduce({tensor}).ok());
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += values[i] / kCalls;
  }
  const double wanted[] = {1, -2, 3, -4, 0.5, 0.25, 0, 8};
  for (size_t i = 0; i < sum.size(); ++i) EXPECT_NEAR(sum[i], wanted[i], 0.1) << i;
}

TEST(CustomCodecJob, ARankWithOtherOptionsIsToldWhichDiffer) {
  Cluster cluster({});
  std::vector<float> values(8);
  OnEachRank(2, [&](uint32_t rank) {
    WorkerOptions options = TopKJob().worker;
    options.job = "job";
    options.rank = rank;
    options.world_size = 2;
    const auto join = [&] {
      return Worker::JoinReduction(options, {.codec = CUSTOM}, {{.name = "tensor", .shape = {8}}},
                                   cluster.Connect());
    };
    if (rank == 1) {
      const auto channel = std::move(cluster.Connect()[0]);
      const auto jobs = [&] { return channel->Status({}, absl::InfiniteFuture())->jobs_size(); };
      while (jobs() == 0) std::this_thread::yield();  // until rank 0 has begun it
      options.codec_options = "ratio=0.75";
      EXPECT_THAT(join().status().message(),
                  AllOf(HasSubstr("option custom_codec"), HasSubstr("ratio=0.25"),
                        HasSubstr("ratio=0.75")));
      options.codec_options = TopKJob().worker.codec_options;
    }
    EXPECT_TRUE(join().ok());
  });
}

TEST(CustomCodecJob, IsRefusedWithoutALibrary) {
  Cluster cluster({});
  WorkerOptions options = TopKJob().worker;
  options.codec_library.clear();
  const std::vector<Parameter> tensors = {{.name = "tensor", .shape = {8}}};
  const auto join = [&] {
    return Worker::JoinReduction(options, {.codec = CUSTOM}, tensors, cluster.Connect()).status();
  };
  EXPECT_EQ(join().message(), "a codec is custom, and there is no codec_library");
  options.codec_library = "no/such/file.so";
  EXPECT_THAT(join().message(), HasSubstr("no/such/file.so"));
}

// It is no rank's gradient that is wrong then, and no later step would be better.
TEST(CustomCodecJob, ACodecThatFailsFailsTheStepWhereverThatIs) {
  const auto reduce = [](Cluster& cluster, uint32_t rank, uint32_t ranks, const std::string& fault,
                         float value) {
    WorkerOptions options = TopKJob().worker;
    options.job = fault;
    options.codec_library = kFaulty;
    options.codec_options = fault;
    options.rank = rank;
    options.world_size = ranks;
    const auto worker = Worker::JoinReduction(
        options, {.codec = CUSTOM}, {{.name = "tensor", .shape = {8}}}, cluster.Connect());
    if (!worker.ok()) return worker.status();
    std::vector<float> values(8, value);
    const absl::Span<float> tensor = absl::MakeSpan(values);
    return (*worker)->Reduce({tensor}).status();
  };
  const auto expect_failure = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(status.message(), HasSubstr("codec 'faulty' cannot decompress what it made of "
                                            "finite numbers in block 0 (tensor 'tensor'"));
  };
  Cluster cluster({});
  expect_failure(reduce(cluster, 0, 1, "cannot unpack", 1));
  // Numbers too large to travel are nobody's fault but the gradient's.
  EXPECT_EQ(reduce(cluster, 0, 1, "overshoots", 0x1p60f), absl::OkStatus());
  // Of 0 and 1 the aggregator makes a half.
  OnEachRank(2, [&](uint32_t rank) {
    expect_failure(reduce(cluster, rank, 2, "cannot unpack halves", static_cast<float>(rank)));
  });
}

TEST(CustomCodecJob, AlsoOfAWorkerOnAGpu) {
  kernels::cuda::SimulatedGpu gpu(/*seed=*/1);
  for (const uint64_t freeze_step : {1, 2}) {
    JobOptionsForTest job = TopKJob();
    job.workers = 1;
    job.worker.codec_library = kFaulty;
    job.worker.codec_options = "cannot unpack";
    job.optimizer = {.freeze_step = freeze_step, .codec = CUSTOM};
    if (freeze_step == 2) job.optimizer.warm_up_codec = CUSTOM;
    job.gpu_of = [&](uint32_t) { return &gpu; };
    Cluster cluster({});
    Replica replica(job, 0);
    auto worker =
        Worker::Join(replica.Options(), job.optimizer, replica.Parameters(), cluster.Connect());
    ASSERT_TRUE(worker.ok()) << worker.status();
    absl::Status status;
    for (int step = 0; status.ok() && step < 2; ++step) {
      replica.gradient = GradientOf(0, step, replica.gradient.size());
      replica.BeforeStep(**worker);
      status = (*worker)->Step(replica.Gradients(), {job.rates}).status();
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_THAT(status.message(), HasSubstr("cannot decompress what it made of finite numbers"));
  }
}

// A chunk of 20 numbers in blocks of 16, the second of which is short.
class PackedFrame {
 public:
  PackedFrame(const std::string& name, const std::string& options) {
    Tensor tensor;
    tensor.set_name("tensor");
    tensor.add_shape(20);
    JobOptions job;
    job.set_block_elements(16);
    job.set_chunk_elements(64);
    job.set_gamma(1.35f);
    const OpenCustomCodec codec = OpenCodec(name, options, 16).value();
    *job.mutable_custom_codec() = codec.description;
    layout_ = Layout::Create({tensor}, job).value();
    layout_->set_custom_codec(codec.codec);
  }

  size_t bytes() const { return layout_->PayloadBytes(CUSTOM, 0); }

  Payload Pack() const {
    Payload payload(bytes());
    PackInto(payload);
    return payload;
  }

  // How many blocks are before the first that is not packed.
  size_t PackInto(Payload& payload) const {
    const Chunk& chunk = layout_->chunks()[0];
    std::vector<float> values(20, 1), error(20);
    return NumberCodecOf(CUSTOM, *layout_)
        .Compress({.block_elements = 16}, chunk, chunk.segments[0], values, absl::MakeSpan(error),
                  payload.data());
  }

  absl::Status Check(const Payload& payload) const {
    FrameHeader header;
    header.set_codec(CUSTOM);
    header.set_payload_crc32c(Crc32c(payload.span()));
    return CheckFrame(header, payload.span(), /*world_size=*/1, *layout_);
  }

  absl::Status CheckCodecItself(const Payload& payload) const {
    return NumberCodecOf(CUSTOM, *layout_)
        .CheckCodecItself(*layout_, /*chunk=*/0, /*block=*/0, payload.data());
  }

 private:
  std::optional<Layout> layout_;
};

// The trust boundary: what the example says no to, and what is behind a short block.
TEST(CustomCodecFrame, WhatTheCodecCannotHaveMadeIsRefused) {
  ASSERT_TRUE(LoadCodecLibrary(kTopK).ok());
  const PackedFrame frame("topk", "ratio=0.25");
  ASSERT_EQ(frame.bytes(), 2 * (1 + 4 * 6));
  EXPECT_EQ(frame.Check(frame.Pack()), absl::OkStatus());
  // The mark of the second block; an index that does not ascend; a number that is none; and what is
  // behind the second block, which is short.
  for (const size_t byte : {25u, 3u, 12u, 49u}) {
    Payload payload = frame.Pack();
    payload.data()[byte] = 0xff;
    if (byte == 12) std::memset(payload.data() + 9, 0xff, 4);
    const absl::Status status = frame.Check(payload);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << byte;
    EXPECT_THAT(status.message(), HasSubstr("codec 'topk' can have made no such block")) << byte;
  }
}

// It is not the frame that is wrong then, nor the gradient.
TEST(CustomCodecFrame, ACodecThatHasEndedOrThrownIsToBlameItself) {
  const FaultyCodec codec;
  const auto expect_blame = [](const PackedFrame& frame, const Payload& good,
                               const std::string& why) {
    for (const absl::Status& status : {frame.Check(good), frame.CheckCodecItself(frame.Pack())}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
      EXPECT_THAT(status.message(), HasSubstr(why));
    }
  };
  const PackedFrame ended("faulty", "ends"), thrown("faulty", "throws decompress");
  const Payload packed = ended.Pack();
  EXPECT_EQ(ended.Check(packed), absl::OkStatus());
  EXPECT_EQ(ended.CheckCodecItself(packed), absl::OkStatus());
  EXPECT_EQ(thrown.Check(packed), absl::OkStatus());
  const PackedFrame lost("faulty", "throws compress");
  Payload memory = lost.Pack();
  EXPECT_EQ(lost.Check(memory), absl::OkStatus());
  codec.End();
  expect_blame(ended, packed, "codec 'faulty' has ended, and can do nothing more for this job");
  codec.Throw([] { throw std::runtime_error("not today"); });
  expect_blame(thrown, packed,
               "codec 'faulty': decompress has thrown an exception: not today, as it may not");
  // What was in the memory before would be a good block.
  EXPECT_EQ(lost.PackInto(memory), 0);
  EXPECT_THAT(memory.span().subspan(1, 16 * sizeof(float)), Each(0));
  expect_blame(lost, memory,
               "codec 'faulty': compress has thrown an exception: not today, as it may not");
  codec.Throw(nullptr);
}

TEST(OpenCodec, OpensSoManyAtATimeAndNoMore) {
  ASSERT_TRUE(LoadCodecLibrary(kTopK).ok());
  const auto open = [](int i) { return OpenCodec("topk", absl::StrFormat("ratio=0.%04d", i), 8); };
  std::vector<OpenCustomCodec> all;
  for (int i = 1; i <= 64; ++i) all.push_back(open(i).value());
  EXPECT_TRUE(open(1).ok()) << "it is open";
  EXPECT_EQ(open(65).status().code(), absl::StatusCode::kResourceExhausted);
  all.pop_back();
  EXPECT_TRUE(open(65).ok());
}

}  // namespace
}  // namespace signpost::testing
