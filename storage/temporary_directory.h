// A directory that goes with its object.

#ifndef SIGNPOST_STORAGE_TEMPORARY_DIRECTORY_H_
#define SIGNPOST_STORAGE_TEMPORARY_DIRECTORY_H_

#include <string>

namespace signpost {

// New and empty; only this user sees what is in it. It goes with all that is in it by then.
class TemporaryDirectory {
 public:
  // "<prefix>-" and six characters that are nobody's yet.
  explicit TemporaryDirectory(const std::string& prefix);
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const { return path_; }  // empty: it could not be made

 private:
  std::string path_;
};

}  // namespace signpost

#endif  // SIGNPOST_STORAGE_TEMPORARY_DIRECTORY_H_
