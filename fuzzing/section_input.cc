#include "fuzzing/section_input.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "storage/section_file.h"

namespace signpost::fuzzing {

std::string FileOf(absl::string_view first_line, absl::string_view input) {
  SectionWriter writer(first_line);
  while (input.size() >= sizeof(uint16_t)) {
    uint16_t length;
    std::memcpy(&length, input.data(), sizeof length);
    input.remove_prefix(sizeof length);
    writer.Add(input.substr(0, length));
    input.remove_prefix(std::min<size_t>(length, input.size()));
  }
  std::string file;
  for (const absl::string_view part : writer.parts()) file.append(part.data(), part.size());
  return file;
}

std::string InputOf(absl::string_view first_line, absl::string_view file) {
  std::string input;
  SectionReader reader(file.substr(first_line.size()));
  absl::string_view bytes;
  while (!reader.at_end() && reader.Next(bytes).ok()) {
    const auto length = static_cast<uint16_t>(bytes.size());
    input.append(reinterpret_cast<const char*>(&length), sizeof length);
    input.append(bytes.data(), bytes.size());
  }
  return input;
}

}  // namespace signpost::fuzzing
