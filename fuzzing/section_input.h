// Files in sections (storage/section_file.h) as fuzz inputs, without their checksums: guessing one
// takes a fuzzer for ever.
//
//   input = (length (uint16, little-endian) bytes)*

#ifndef SIGNPOST_FUZZING_SECTION_INPUT_H_
#define SIGNPOST_FUZZING_SECTION_INPUT_H_

#include <string>

#include "absl/strings/string_view.h"

namespace signpost::fuzzing {

// The file, of any input; a length beyond its end is up to there.
std::string FileOf(absl::string_view first_line, absl::string_view input);

// The input of a good file. Its sections have less than 2^16 bytes each.
std::string InputOf(absl::string_view first_line, absl::string_view file);

}  // namespace signpost::fuzzing

#endif  // SIGNPOST_FUZZING_SECTION_INPUT_H_
