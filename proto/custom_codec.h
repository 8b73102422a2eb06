// Codecs from outside (signpost_codec.h): the shared objects that this process has loaded, and what
// a job says of the one that it uses.

#ifndef SIGNPOST_PROTO_CUSTOM_CODEC_H_
#define SIGNPOST_PROTO_CUSTOM_CODEC_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/aggregator.pb.h"
#include "proto/codec.h"

namespace signpost {

// All of these are thread-safe, and of the whole process. What is loaded stays; a codec is open,
// for all who ask for it with the same options and blocks, until the last of them lets go of it.
// One that has ended, or thrown, is opened anew for the next who asks.

// Loads a shared object, and returns its codec's name; once more does nothing. INVALID_ARGUMENT,
// with the path, if it cannot be loaded or is no codec, or another of that name is there.
absl::StatusOr<std::string> LoadCodecLibrary(const std::string& path);

// A payload has, for each block of the chunk, a byte that is 1, or 0 if the block is not packed,
// and block_bytes bytes: those of the block itself and zeros.
struct OpenCustomCodec {
  CustomCodec description;  // JobOptions.custom_codec
  std::shared_ptr<const NumberCodec> codec;
};

// One that is loaded. INVALID_ARGUMENT if it does not take the options, or blocks of that length;
// INTERNAL if it throws;
// RESOURCE_EXHAUSTED when too many are open already.
absl::StatusOr<OpenCustomCodec> OpenCodec(const std::string& name, const std::string& options,
                                          uint32_t block_elements);

// What a job asks for. FAILED_PRECONDITION names what is here instead: no codec of that name,
// another version, or one that makes something else of the same numbers; otherwise as OpenCodec.
absl::StatusOr<std::shared_ptr<const NumberCodec>> OpenCodecOf(const CustomCodec& wanted,
                                                               uint32_t block_elements);

// Has the codec pack these numbers as a block, and unpack it, with memory around what it may write
// to: "compress writes outside of its block" if it does, or what the codec has thrown; empty if
// neither.
std::string WhatItWritesOutside(const OpenCustomCodec& codec, absl::Span<const float> values);

}  // namespace signpost

#endif  // SIGNPOST_PROTO_CUSTOM_CODEC_H_
