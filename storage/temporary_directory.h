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
  // "cannot make the directory /nowhere/run-XXXXXX: No such file or directory"; empty: it was made.
  const std::string& why_not() const { return why_not_; }

 private:
  std::string path_;
  std::string why_not_;
};

// A prefix of this name in TMPDIR, or in /tmp where that is not set.
std::string TemporaryPrefix(const std::string& name);

}  // namespace signpost

#endif  // SIGNPOST_STORAGE_TEMPORARY_DIRECTORY_H_
