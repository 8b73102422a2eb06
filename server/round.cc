#include "server/round.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/base/internal/raw_logging.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "kernels/block.h"
#include "kernels/dense.h"
#include "proto/codec.h"
#include "proto/payload.h"

namespace signpost {
namespace {

// "step 7, chunk 2"
std::string Where(const FrameHeader& header) {
  return absl::StrCat("step ", header.step(), ", chunk ", header.chunk());
}

absl::Status OutOfRangeError(const FrameHeader& header, const Layout& layout,
                             absl::string_view where) {
  if (layout.options().sum()) {
    return absl::OutOfRangeError(
        absl::StrCat("the sum over the workers of ", Where(header), " is out of range (", where,
                     "), and what it had in error is lost: this job can only "
                     "be left"));
  }
  return absl::OutOfRangeError(absl::StrCat(
      "the sum over the workers of ", Where(header), " is out of range (", where,
      "): the training has diverged, and this aggregator's error for the chunk is lost. Start the "
      "job again from a checkpoint, with a lower learning rate or gamma"));
}

// " (group 0 has a learning_rate of 0.01, and 0.001 there)": the first rate that differs; empty if
// one of them has none, as frames of a node's workers and after a restart.
std::string Difference(const StepRates& ours, const StepRates& theirs) {
  for (int g = 0; g < std::min(ours.groups_size(), theirs.groups_size()); ++g) {
    const Rates &a = ours.groups(g), &b = theirs.groups(g);
    const std::tuple<absl::string_view, double, double> fields[] = {
        {"learning_rate", a.learning_rate(), b.learning_rate()},
        {"weight_decay", a.weight_decay(), b.weight_decay()},
        {"beta1", a.beta1(), b.beta1()},
        {"beta2", a.beta2(), b.beta2()},
        {"epsilon", a.epsilon(), b.epsilon()}};
    for (const auto& [name, here, there] : fields) {
      if (here != there) {
        return absl::StrFormat(" (group %d has a %s of %.9g, and %.9g there)", g, name, here, there);
      }
    }
  }
  return "";
}

}  // namespace

Contribution ContributionOf(const FrameHeader& header) {
  const float scale = header.error_scale();
  return {header.codec(), scale == 0 ? 1.0f : scale, header.loss_unit(), header.rates_crc32c(),
          header.payload_crc32c()};
}

absl::Status OtherBytesError(const FrameHeader& header) {
  return absl::AlreadyExistsError(absl::StrCat(
      "rank ", header.rank(), " already contributed other bytes to ", Where(header),
      ": a frame may only be sent again as it was. Do two processes run as this rank?"));
}

absl::Status Round::Contribute(Frame frame) {
  const uint32_t rank = frame.header.rank();
  if (frames_[rank].has_value()) return CheckDuplicate(frame);
  if (absl::Status status = CheckFits(frame.header); !status.ok()) return status;
  if (!first_rank_) rates_.Swap(frame.header.mutable_rates());
  frame.header.clear_rates();
  frames_[rank] = std::move(frame);
  Count(rank);
  return absl::OkStatus();
}

absl::Status Round::CheckDuplicate(const Frame& frame) const {
  const Frame& before = *frames_[frame.header.rank()];
  if (ContributionOf(frame.header) == ContributionOf(before.header) &&
      frame.payload.span() == before.payload.span()) {
    return absl::OkStatus();
  }
  return OtherBytesError(frame.header);
}

absl::Status Round::CheckFits(const FrameHeader& header) const {
  if (!first_rank_) return absl::OkStatus();
  if (header.rates_crc32c() != first_header().rates_crc32c()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "rank %d takes %s with other learning rates, weight decays, betas or epsilons than rank "
        "%d%s: their parameters would diverge. Do they follow the same schedule?",
        header.rank(), Where(header), *first_rank_, Difference(header.rates(), rates_)));
  }
  if (first_rank_with_numbers_ && header.codec() != SKIP) {
    const Codec ours = frames_[*first_rank_with_numbers_]->header.codec();
    if (header.codec() != ours) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "rank %d sent %s as %s, rank %d as %s: all ranks must send the same codec. Do they have "
          "the same freeze step?",
          header.rank(), Where(header), CodecName(header.codec()), *first_rank_with_numbers_,
          CodecName(ours)));
    }
  }
  // Of what follows from rates and steps, which have been compared; last, as it tells a user least.
  const auto check = [&](absl::string_view field, float theirs, float ours) {
    if (theirs == ours) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrFormat(
        "rank %d sent %s with %s %g, rank %d with %g: all ranks must send the same. Do they have "
        "the same freeze step and variance_refresh_interval?",
        header.rank(), Where(header), field, theirs, *first_rank_, ours));
  };
  absl::Status status = check("error_scale", ContributionOf(header).error_scale, error_scale());
  status.Update(check("loss_unit", header.loss_unit(), loss_unit()));
  return status;
}

void Round::LeaveOut(std::vector<uint32_t> ranks) {
  late_ranks_ = std::move(ranks);
  for (const uint32_t rank : late_ranks_) frames_[rank].reset();
  Recount();
}

void Round::Drop(uint32_t rank) {
  frames_[rank].reset();
  Recount();
}

void Round::Recount() {
  contributed_ = 0;
  first_rank_.reset();
  first_rank_with_numbers_.reset();
  for (uint32_t rank = 0; rank < frames_.size(); ++rank) {
    if (frames_[rank]) Count(rank);
  }
}

void Round::Count(uint32_t rank) {
  ++contributed_;
  if (!first_rank_) first_rank_ = rank;
  if (!first_rank_with_numbers_ && frames_[rank]->header.codec() != SKIP) {
    first_rank_with_numbers_ = rank;
  }
}

bool Round::IsLate(uint32_t rank) const { return absl::c_binary_search(late_ranks_, rank); }

uint64_t Round::payload_bytes() const {
  uint64_t bytes = 0;
  for (const std::optional<Frame>& frame : frames_) bytes += frame ? frame->payload.size() : 0;
  return bytes;
}

std::vector<uint32_t> Round::MissingRanks() const {
  std::vector<uint32_t> missing;
  for (uint32_t rank = 0; rank < frames_.size(); ++rank) {
    if (!frames_[rank].has_value() && !IsLate(rank)) missing.push_back(rank);
  }
  return missing;
}

std::vector<Contribution> Round::Contributions() const {
  std::vector<Contribution> contributions;
  contributions.reserve(frames_.size());
  for (const std::optional<Frame>& frame : frames_) {
    contributions.push_back(frame ? ContributionOf(frame->header) : Contribution());
  }
  return contributions;
}

float Round::error_scale() const { return ContributionOf(first_header()).error_scale; }

float Round::loss_unit() const { return first_header().loss_unit(); }

bool Round::is_apart() const { return loss_unit() != 0; }

float Round::InverseCount(const Layout& layout) const {
  return layout.options().sum() ? 1.0f : 1.0f / static_cast<float>(frames_.size());
}

absl::StatusOr<Answer> Round::Close(const Layout& layout, absl::Span<float> error) const {
  ABSL_RAW_CHECK(!error.empty() || !CanLose(), "an error, where there can be one");
  if (error_scale() != 1) kernels::Scale(error_scale(), error);

  Answer answer;
  answer.header.set_step(first_header().step());
  answer.header.set_chunk(first_header().chunk());
  answer.header.set_loss_unit(loss_unit());
  answer.header.mutable_late_ranks()->Add(late_ranks_.begin(), late_ranks_.end());
  if (const std::optional<uint32_t> rank = LowestSkippedRank()) {
    answer.header.set_codec(SKIP);
    answer.header.set_skipped_by_rank(*rank);
    answer.payload = SkipPayload(SkippedBlock(frames_[*rank]->payload.span()));
  } else {
    answer.header.set_codec(first_header().codec());
    absl::StatusOr<Payload> payload = Aggregate(answer.header.codec(), layout, error);
    if (!payload.ok()) return payload.status();
    answer.payload = *std::move(payload);
  }
  answer.header.set_payload_crc32c(Crc32c(answer.payload.span()));
  return answer;
}

bool Round::CanLose() const {
  const Codec codec = first_header().codec();
  return !LowestSkippedRank() && (codec == RESTORE || Loses(codec));
}

std::optional<uint32_t> Round::LowestSkippedRank() const {
  for (uint32_t rank = 0; rank < frames_.size(); ++rank) {
    if (frames_[rank] && frames_[rank]->header.codec() == SKIP) return rank;
  }
  return std::nullopt;
}

absl::StatusOr<Payload> Round::Aggregate(Codec codec, const Layout& layout,
                                         absl::Span<float> error) const {
  if (codec == RESTORE) {
    Restore(error);
    return Payload();
  }
  if (is_apart() && !Loses(codec)) error = {};
  const uint32_t chunk_index = first_header().chunk();
  const Chunk& chunk = layout.chunks()[chunk_index];
  const kernels::BlockRule rule = {.block_elements = layout.options().block_elements(),
                                   .gamma = layout.options().gamma()};
  std::vector<const uint8_t*> contributions;
  contributions.reserve(contributed_);
  for (const std::optional<Frame>& frame : frames_) {
    if (frame) contributions.push_back(frame->payload.data());
  }

  Payload out(layout.PayloadBytes(codec, chunk_index));
  const NumberCodec& number_codec = NumberCodecOf(codec, layout);
  for (const Segment& segment : chunk.segments) {
    const absl::Span<float> error_there =
        error.empty() ? error : error.subspan(segment.chunk_offset, segment.elements);
    const size_t packed =
        is_apart() && !error.empty()
            ? AggregateApart(number_codec, rule, chunk, segment, contributions,
                             InverseCount(layout), loss_unit(), error_there, out.data())
            : number_codec.Aggregate(rule, chunk, segment, contributions, InverseCount(layout),
                                     error_there, out.data());
    if (packed == kernels::BlockCount(segment.elements, rule.block_elements)) continue;
    const uint32_t block = segment.first_block + packed;
    const absl::Status status =
        number_codec.CheckCodecItself(layout, chunk_index, block, out.data());
    if (!status.ok()) return status;
    return OutOfRangeError(first_header(), layout, layout.DescribeBlock(chunk_index, block));
  }
  return out;
}

void Round::Restore(absl::Span<float> error) const {
  bool is_first = true;
  for (const std::optional<Frame>& frame : frames_) {
    const Payload& payload = frame->payload;
    if (payload.size() == 0) continue;
    // The first is copied: +0 + -0 would be +0.
    if (std::exchange(is_first, false)) {
      std::memcpy(error.data(), payload.data(), payload.size());
    } else {
      kernels::AddDense(kernels::DenseType::kFloat32, payload.data(), /*factor=*/1, error);
    }
  }
}

}  // namespace signpost
