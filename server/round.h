// A round: one step of one chunk as the aggregator gathers it. Pure: no clock, threads or I/O.
//
// A round's result is a function of its contributions and the error before it: the order in which
// they arrive, resends and duplicates change nothing.

#ifndef SIGNPOST_SERVER_ROUND_H_
#define SIGNPOST_SERVER_ROUND_H_

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/aggregator.pb.h"
#include "proto/frame.h"
#include "proto/layout.h"

namespace signpost {

// What a frame contributed, but for the numbers themselves: enough to recognise a late duplicate.
struct Contribution {
  Codec codec = CODEC_UNSPECIFIED;
  float error_scale = 1;
  float loss_unit = 0;
  uint32_t rates_crc32c = 0;
  uint32_t payload_crc32c = 0;

  bool operator==(const Contribution&) const = default;
};
Contribution ContributionOf(const FrameHeader& header);

// ALREADY_EXISTS, naming rank, step and chunk: `header`'s rank contributed something else before.
absl::Status OtherBytesError(const FrameHeader& header);

// Gathers one frame per rank, all of them for the same step and chunk. Not thread-safe.
class Round {
 public:
  // world_size >= 1.
  explicit Round(uint32_t world_size) : frames_(world_size) {}

  // The round is to close without these ranks, ascending, and not all of them. Their frames do not
  // count, and are dropped if they are here.
  void LeaveOut(std::vector<uint32_t> ranks);
  const std::vector<uint32_t>& late_ranks() const { return late_ranks_; }
  bool IsLate(uint32_t rank) const;

  // Adds a frame that passed CheckFrame, or accepts it as a duplicate: the same Contribution and
  // payload as before. Refuses, and stays as it was: other bytes from the same rank
  // (ALREADY_EXISTS); another codec, error scale or loss unit than the round's other ranks
  // (FAILED_PRECONDITION, naming a rank on each side; SKIP goes with any codec).
  absl::Status Contribute(Frame frame);

  bool Has(uint32_t rank) const { return frames_[rank].has_value(); }
  // Forgets what the rank has contributed.
  void Drop(uint32_t rank);

  // Whether all ranks have contributed that it does not leave out.
  bool complete() const { return missing() == 0; }
  uint32_t missing() const { return frames_.size() - contributed_ - late_ranks_.size(); }
  uint32_t contributed() const { return contributed_; }
  uint64_t payload_bytes() const;              // of the frames that are here
  std::vector<uint32_t> MissingRanks() const;  // those that it leaves out are not among them

  // By rank; of those left out, the default. Requires complete().
  std::vector<Contribution> Contributions() const;
  const StepRates& rates() const { return rates_; }
  float error_scale() const;  // 1 but where the unit of what is compressed changes
  bool is_apart() const;      // from the error feedback

  // The round's result. Requires complete(), and to be called once: it updates `error`, the
  // aggregator's error for the chunk in chunk order:
  //   u = (sum of the contributions in rank order) / world_size + error_scale * error
  //   answer = compress(u);  error = u - answer
  // or of the sum, not divided, if the job's options say so.
  // It divides by the world size whoever is left out: their inputs come later, in full, and
  // momentum that every rank sends again must not be amplified (the loop gain would be
  // beta1 * n / k). When a rank skipped, the answer is SKIP with the lowest such rank's block, and
  // error = error_scale * error. INTERNAL when u is out of the range that an answer may have
  // (kMaxScale, kMaxDense of kernels/block.h), or a codec from outside fails: the error is then
  // spoilt, and the chunk must not go on. RESTORE: error = the sum of the contributions that have
  // numbers, in rank order. Where it is apart:
  //   u = (sum of the contributions in rank order) / world_size
  //   answer = compress(u);  error = error_scale * error + loss_unit * (u - answer)
  //
  // An error that is all zero may be empty instead where CanLose() is false.
  absl::StatusOr<Answer> Close(const Layout& layout, absl::Span<float> error) const;

  // Whether an answer can differ from u, and so leave an error.
  bool CanLose() const;

 private:
  // Of a frame that is there now; and of all of them, once some are gone.
  void Count(uint32_t rank);
  void Recount();
  absl::Status CheckDuplicate(const Frame& frame) const;
  absl::Status CheckFits(const FrameHeader& header) const;
  std::optional<uint32_t> LowestSkippedRank() const;
  absl::StatusOr<Payload> Aggregate(Codec codec, const Layout& layout,
                                    absl::Span<float> error) const;
  void Restore(absl::Span<float> error) const;
  float loss_unit() const;

  const FrameHeader& first_header() const { return frames_[*first_rank_]->header; }
  float InverseCount(const Layout& layout) const;

  std::vector<std::optional<Frame>> frames_;  // by rank; without their rates
  StepRates rates_;                           // of the first that came, and so of all
  uint32_t contributed_ = 0;
  std::vector<uint32_t> late_ranks_;
  std::optional<uint32_t> first_rank_;  // that contributed; the others must have its factors
  // That contributed numbers rather than SKIP; the others must have its codec.
  std::optional<uint32_t> first_rank_with_numbers_;
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_ROUND_H_
