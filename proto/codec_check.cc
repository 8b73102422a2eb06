#include "proto/codec_check.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"
#include "absl/types/span.h"
#include "kernels/block.h"
#include "proto/aggregator.pb.h"
#include "proto/custom_codec.h"
#include "proto/layout.h"
#include "proto/payload.h"

namespace signpost {
namespace {

using Floats = std::vector<float>;

// Of the tensors that are tried, and so of blocks.
std::vector<uint32_t> LengthsFor(const OpenCustomCodec& codec) {
  const uint32_t block = codec.description.block_elements();
  std::vector<uint32_t> lengths = {block, block + block / 4 + 1};
  for (const uint32_t length : {1u, 2u, 7u, 8u, 9u, 63u, 64u, 65u, 1000u, block - 1}) {
    if (length > 0 && length < block) lengths.push_back(length);
  }
  return lengths;
}

// Of one tensor.
absl::StatusOr<Layout> LayoutFor(const OpenCustomCodec& codec, uint32_t elements) {
  Tensor tensor;
  tensor.set_name("tensor");
  tensor.add_shape(elements);
  JobOptions options;
  options.set_block_elements(codec.description.block_elements());
  options.set_chunk_elements(16 * codec.description.block_elements());
  options.set_gamma(kernels::BlockRule().gamma);
  *options.mutable_custom_codec() = codec.description;
  absl::StatusOr<Layout> layout = Layout::Create({tensor}, options);
  if (layout.ok()) layout->set_custom_codec(codec.codec);
  return layout;
}

// A codec at work on one tensor.
class Trial {
 public:
  Trial(const OpenCustomCodec& codec, uint32_t elements)
      : layout_(*LayoutFor(codec, elements)),
        codec_(*layout_.custom_codec()),
        rule_{.block_elements = codec.description.block_elements()} {}

  uint32_t elements() const { return chunk().elements; }
  size_t bytes() const { return layout_.PayloadBytes(CUSTOM, 0); }

  // Whether all of it was packed. `fill` is what the payload has before.
  bool Compress(const Floats& values, Floats& error, Payload& payload, uint8_t fill = 0) const {
    payload = Payload(bytes());
    std::memset(payload.data(), fill, payload.size());
    return codec_.Compress(rule_, chunk(), chunk().segments[0], values, absl::MakeSpan(error),
                           payload.data()) == chunk().blocks;
  }

  bool IsGood(const Payload& payload) const {
    return codec_.Check(layout_, 0, payload.data()).ok();
  }

  Floats Decompress(const Payload& payload) const {
    Floats values(elements(), std::numeric_limits<float>::quiet_NaN());
    codec_.Decompress(rule_, chunk(), chunk().segments[0], payload.data(), absl::MakeSpan(values));
    return values;
  }

 private:
  const Chunk& chunk() const { return layout_.chunks()[0]; }

  const Layout layout_;
  const NumberCodec& codec_;
  const kernels::BlockRule rule_;
};

Floats NormalNumbers(std::mt19937& random, uint32_t elements, float size) {
  std::normal_distribution<float> normal(0, size);
  Floats numbers(elements);
  for (float& number : numbers) number = normal(random);
  return numbers;
}

double Norm(const Floats& numbers) {
  double squares = 0;
  for (const float number : numbers) squares += double{number} * number;
  return std::sqrt(squares);
}

// Of each length: normal numbers, zeros, one number among zeros, the smallest and the largest that
// there are. Returns where `is_right` says no.
std::string TryNumbers(const OpenCustomCodec& codec, uint32_t seed,
                       const std::function<bool(const Trial&, const Floats&)>& is_right) {
  std::mt19937 random(seed);
  for (const uint32_t elements : LengthsFor(codec)) {
    const Trial trial(codec, elements);
    Floats one(elements);
    one[elements / 2] = -3;
    const std::pair<const char*, Floats> inputs[] = {
        {"normal numbers", NormalNumbers(random, elements, 1)},
        {"zeros", Floats(elements)},
        {"one number among zeros", one},
        {"denormal numbers", Floats(elements, std::numeric_limits<float>::denorm_min())},
        {"numbers of 2^60", Floats(elements, kernels::kMaxDense)},
    };
    for (const auto& [name, values] : inputs) {
      if (!is_right(trial, values)) {
        return absl::StrFormat("%s, a tensor of %d", name, elements);
      }
    }
  }
  return "";
}

std::string TryGuards(const OpenCustomCodec& codec, uint32_t seed) {
  std::mt19937 random(seed);
  for (const uint32_t elements : LengthsFor(codec)) {
    if (elements > codec.description.block_elements()) continue;
    const std::string trouble = WhatItWritesOutside(codec, NormalNumbers(random, elements, 1));
    if (!trouble.empty()) return absl::StrFormat("%s, of %d numbers", trouble, elements);
  }
  return "";
}

bool SameBytes(const Floats& a, const Floats& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

bool PacksWhatItCanUnpack(const Trial& trial, const Floats& values) {
  Floats error(values.size());
  Payload payload;
  return trial.Compress(values, error, payload) && trial.IsGood(payload);
}

bool GivesTheSameBytes(const Trial& trial, const Floats& values) {
  Floats error(values.size()), error_again(values.size());
  Payload payload, again;
  trial.Compress(values, error, payload, /*fill=*/0x00);
  trial.Compress(values, error_again, again, /*fill=*/0xa5);
  return payload.span() == again.span() && SameBytes(error, error_again);
}

bool LosesNothing(const Trial& trial, const Floats& values) {
  Floats error(values.size());
  Payload payload;
  if (!trial.Compress(values, error, payload)) return false;
  const Floats sent = trial.Decompress(payload);
  for (size_t i = 0; i < values.size(); ++i) {
    if (error[i] != values[i] - sent[i]) return false;
  }
  return true;
}

// Bytes that nobody has packed: they are refused, or stand for numbers, always the same.
std::string TryRandomBytes(const OpenCustomCodec& codec, uint32_t seed) {
  std::mt19937 random(seed);
  for (const uint32_t elements : LengthsFor(codec)) {
    const Trial trial(codec, elements);
    for (int round = 0; round < 50; ++round) {
      Payload payload(trial.bytes());
      for (size_t i = 0; i < payload.size(); ++i) payload.data()[i] = random();
      const size_t stride =
          payload.size() / kernels::BlockCount(elements, codec.description.block_elements());
      for (size_t mark = 0; mark < payload.size(); mark += stride) payload.data()[mark] = 1;
      if (trial.IsGood(payload) &&
          !SameBytes(trial.Decompress(payload), trial.Decompress(payload))) {
        return absl::StrFormat("they stand for other numbers each time, a tensor of %d", elements);
      }
    }
  }
  return "";
}

// Several threads, each with numbers of its own, at a time.
std::string TryThreads(const OpenCustomCodec& codec, uint32_t seed) {
  constexpr uint32_t kThreads = 4;
  struct Alone {
    Floats values, error, sent;
    Payload payload;
  };
  const Trial trial(codec, codec.description.block_elements());
  std::mt19937 random(seed);
  std::vector<Alone> alone(kThreads);
  for (Alone& of_thread : alone) {
    of_thread.values = NormalNumbers(random, trial.elements(), 1);
    of_thread.error.resize(trial.elements());
    trial.Compress(of_thread.values, of_thread.error, of_thread.payload);
    of_thread.sent = trial.Decompress(of_thread.payload);
  }
  const uint32_t rounds = 50 + 400'000 / trial.elements();  // for some milliseconds at least
  absl::Notification all_are_there;
  std::atomic<bool> are_right = true;
  std::vector<std::thread> threads;
  for (const Alone& wanted : alone) {
    threads.emplace_back([&] {
      all_are_there.WaitForNotification();
      for (uint32_t round = 0; round < rounds; ++round) {
        Alone now = {.error = Floats(trial.elements())};
        trial.Compress(wanted.values, now.error, now.payload);
        now.sent = trial.Decompress(wanted.payload);
        if (now.payload.span() != wanted.payload.span() || !SameBytes(now.error, wanted.error) ||
            !SameBytes(now.sent, wanted.sent)) {
          are_right = false;
        }
      }
    });
  }
  all_are_there.Notify();
  for (std::thread& thread : threads) thread.join();
  return are_right ? "" : "what one packs or unpacks depends on what another does";
}

// What stays in the error of numbers with a fixed mean, relative to their size: in each quarter of
// the rounds. NaN when a round could not be packed.
constexpr int kQuarters = 4;
using ErrorRatios = std::array<double, kQuarters>;
ErrorRatios FeedBack(const OpenCustomCodec& codec, uint32_t elements, uint32_t seed) {
  constexpr int kRounds = 2000;
  ErrorRatios errors = {}, sizes = {};
  std::mt19937 random(seed);
  const Trial trial(codec, elements);
  const Floats mean = NormalNumbers(random, elements, 1);
  Floats error(elements);
  for (int round = 0; round < kRounds; ++round) {
    Floats values = NormalNumbers(random, elements, 0.5f);
    for (size_t i = 0; i < values.size(); ++i) values[i] += mean[i];
    Payload payload;
    const int quarter = round * kQuarters / kRounds;
    const bool is_packed = trial.Compress(values, error, payload);
    errors[quarter] += is_packed ? Norm(error) : std::nan("");
    sizes[quarter] += Norm(values);
    if (!is_packed) break;
  }
  for (int quarter = 0; quarter < kQuarters; ++quarter) errors[quarter] /= sizes[quarter];
  return errors;
}

// An error that grows with the rounds does so by more from the second quarter to the last.
constexpr double kMostGrowth = 1.5;

// Of a whole block, or as much of one as takes seconds, and of short ones: biases are tensors of a
// few numbers. `error_ratio` is that of the whole one.
std::string TryFeedback(const OpenCustomCodec& codec, uint32_t seed, double& error_ratio) {
  constexpr uint32_t kMostElements = 4096;
  const uint32_t block = codec.description.block_elements();
  std::string trouble;
  for (const uint32_t elements : {std::min(block, kMostElements), 1u, 10u, 1000u}) {
    if (elements > block) continue;
    const ErrorRatios ratios = FeedBack(codec, elements, seed);
    if (elements >= std::min(block, kMostElements)) error_ratio = ratios.back();
    if (!trouble.empty() || ratios.back() <= kMostGrowth * ratios[1]) continue;
    trouble = absl::StrFormat("it grows to %.3g times the input, a tensor of %d", ratios.back(),
                              elements);
  }
  return trouble;
}

}  // namespace

bool CodecReport::is_good() const {
  return std::all_of(findings.begin(), findings.end(),
                     [](const CodecFinding& finding) { return finding.trouble.empty(); });
}

absl::StatusOr<CodecReport> CheckCodecLibrary(const std::string& path, const std::string& options,
                                              const CodecTrials& trials) {
  const absl::StatusOr<std::string> name = LoadCodecLibrary(path);
  if (!name.ok()) return name.status();
  const absl::StatusOr<OpenCustomCodec> codec = OpenCodec(*name, options, trials.block_elements);
  if (!codec.ok()) return codec.status();

  if (absl::Status status = LayoutFor(*codec, 1).status(); !status.ok()) return status;

  CodecReport report;
  report.name = codec->description.name();
  report.version = codec->description.version();
  report.bits_per_parameter = 8 * (1.0 + codec->description.block_bytes()) / trials.block_elements;
  report.findings.push_back(
      {"it writes nothing outside of a block", TryGuards(*codec, trials.seed)});
  if (!report.is_good()) return report;  // who knows what else it has written to
  report.findings.push_back({"what it packs it unpacks to finite numbers",
                             TryNumbers(*codec, trials.seed, PacksWhatItCanUnpack)});
  report.findings.push_back(
      {"the same numbers give the same bytes", TryNumbers(*codec, trials.seed, GivesTheSameBytes)});
  // The rest relies on that.
  if (!report.is_good()) return report;
  report.findings.push_back({"threads do not disturb each other", TryThreads(*codec, trials.seed)});
  if (!report.is_good()) return report;
  report.findings.push_back(
      {"what is lost is in the error", TryNumbers(*codec, trials.seed, LosesNothing)});
  report.findings.push_back(
      {"bytes from anybody are refused or unpacked", TryRandomBytes(*codec, trials.seed)});
  report.findings.push_back({"error feedback keeps the error down",
                             TryFeedback(*codec, trials.seed, report.error_ratio)});
  return report;
}

}  // namespace signpost
