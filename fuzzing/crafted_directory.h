// A directory of this machine in which an attacker has made files, links and pipes beforehand.

#ifndef SIGNPOST_FUZZING_CRAFTED_DIRECTORY_H_
#define SIGNPOST_FUZZING_CRAFTED_DIRECTORY_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "storage/temporary_directory.h"

namespace signpost::fuzzing {

// The directory is removed with the object.
//
//   input = entry*
//   entry = type (uint8) name (uint8) length (uint8) bytes
//
// A type is, modulo 8: 0 a file with those bytes, 1 one with what is good there, 2 a link to a file
// outside, 3 a link to a directory outside, 4 a pipe, 5 a directory, 6 a sparse file of 2^42 bytes,
// 7 a link to itself. A name is one of those given, modulo their number. An entry whose name, or
// whose subdirectory, is taken by then is left out.
class CraftedDirectory {
 public:
  struct Name {
    std::string name;  // "file" or "subdirectory/file"
    std::string good;  // contents that would be read
  };
  CraftedDirectory(absl::string_view input, const std::vector<Name>& names);

  const std::string& path() const { return path_; }

  // Returns whether the file and the directory outside still have their bytes and names.
  bool IsOutsideUnchanged() const;

 private:
  const TemporaryDirectory place_;
  const std::string path_, outside_;
};

}  // namespace signpost::fuzzing

#endif  // SIGNPOST_FUZZING_CRAFTED_DIRECTORY_H_
