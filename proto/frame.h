// Frames: what one worker sends for one (step, chunk), and the aggregator's answer; and their
// checking. WIRE.md describes the bytes.

#ifndef SIGNPOST_PROTO_FRAME_H_
#define SIGNPOST_PROTO_FRAME_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "proto/aggregator.pb.h"
#include "proto/layout.h"
#include "proto/payload.h"

namespace signpost {

// Parameter groups whose rates travel in headers: an answer may have those of 16 steps.
inline constexpr int kMaxGroups = 128;
// Tensors whose scales do: all of a job's, in a state's.
inline constexpr int kMaxTensorScales = 4096;

// What a worker contributes to a round.
struct Frame {
  FrameHeader header;
  Payload payload;
};

// A closed round's result, the same for all ranks; `header.waited_us` is filled in per rank when it
// is sent.
struct Answer {
  AnswerHeader header;
  Payload payload;
};

// The one place where bytes from outside are judged. OK means: the kernels may run on the payload.
// INVALID_ARGUMENT names what is wrong, got and wanted: rank, chunk, codec, payload size or
// checksum; a scale that is negative (-0 is), not finite or over kMaxScale; a dense element that is
// not finite or over kMaxDense; rates that are not finite, or of more than kMaxGroups; scales that
// are not finite, of tensors that there are not, or more than kMaxTensorScales; set bits or codes
// behind a block's last element; a skipped block that the chunk does not have; a negative or
// non-finite error_scale or loss_unit; late ranks that do not ascend or are all ranks; RESTORE at
// another step than the one before the job's first_step, or another codec at that one. Otherwise it
// does not look at job, epoch and step: those are state, and the aggregator's to judge.
absl::Status CheckFrame(const FrameHeader& header, absl::Span<const uint8_t> payload,
                        uint32_t world_size, const Layout& layout);

// The same for an answer to `frame`, a header that passes CheckFrame: the step and chunk must be
// the frame's, and so must the loss unit, and the codec unless it is SKIP; a frame that says SKIP
// gets SKIP, unless the round closed without it. REPLAY goes with any frame, names its step or an
// earlier one, and has no payload; nor has the answer to RESTORE, which is never SKIP. FETCH takes
// a STATE of its chunk, of any step, and LISTEN an answer of any codec. FETCH as an answer goes
// with any frame that is a contribution, names its step, and chunks that there are. Rates that come
// with any of them are judged as a frame's are. `skipped_by_rank` is for messages only and is not
// judged.
absl::Status CheckAnswer(const AnswerHeader& header, absl::Span<const uint8_t> payload,
                         const FrameHeader& frame, const Layout& layout);

// Whether a frame of that codec is a rank's part of a round: not if it is FETCH, STATE or LISTEN.
bool IsContribution(Codec codec);

// A SKIP payload: the first block, counted in the chunk, whose input was not finite.
Payload SkipPayload(uint32_t block);
uint32_t SkippedBlock(absl::Span<const uint8_t> payload);  // requires CheckFrame

}  // namespace signpost

#endif  // SIGNPOST_PROTO_FRAME_H_
