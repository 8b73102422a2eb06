// Codecs from outside (signpost_codec.h): the shared objects that this process has loaded, and what
// a job says of the one that it uses.

#ifndef SIGNPOST_PROTO_CUSTOM_CODEC_H_
#define SIGNPOST_PROTO_CUSTOM_CODEC_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/aggregator.pb.h"
#include "proto/codec.h"

namespace signpost {

// All of these are thread-safe, and of the whole process; what is loaded stays.

// Loads a shared object, and returns its codec's name; once more does nothing. INVALID_ARGUMENT,
// with the path, if it cannot be loaded or is no codec, or another of that name is there.
absl::StatusOr<std::string> LoadCodecLibrary(const std::string& path);

// JobOptions.custom_codec of a job with a codec that is loaded. INVALID_ARGUMENT if it does not
// take the options, or blocks of that length; RESOURCE_EXHAUSTED when too many are open already.
absl::StatusOr<CustomCodec> DescribeCustomCodec(const std::string& name, const std::string& options,
                                                uint32_t block_elements);

// Whether this process has what the job asks for. FAILED_PRECONDITION names what is here instead:
// no codec of that name, another version, or one that makes something else of the same numbers;
// INVALID_ARGUMENT as DescribeCustomCodec.
absl::Status CheckCustomCodec(const CustomCodec& wanted, uint32_t block_elements);

// Requires CheckCustomCodec. A payload has, for each block of the chunk, a byte that is 1, or 0 if
// the block is not packed, and block_bytes bytes: those of the block itself and zeros.
const NumberCodec& CustomNumberCodec(const CustomCodec& wanted);

}  // namespace signpost

#endif  // SIGNPOST_PROTO_CUSTOM_CODEC_H_
