// The mode of sockets in the file system.

#ifndef SIGNPOST_SECURITY_PRIVATE_UMASK_H_
#define SIGNPOST_SECURITY_PRIVATE_UMASK_H_

#include <sys/stat.h>

namespace signpost {

// While it exists, files and sockets that the process creates have mode 0600 at most, from their
// first moment. The umask is the whole process's: keep the object for as short as possible.
class PrivateUmask {
 public:
  PrivateUmask() : before_(umask(0177)) {}
  ~PrivateUmask() { umask(before_); }
  PrivateUmask(const PrivateUmask&) = delete;
  PrivateUmask& operator=(const PrivateUmask&) = delete;

 private:
  const mode_t before_;
};

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_PRIVATE_UMASK_H_
