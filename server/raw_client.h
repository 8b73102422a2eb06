// A TCP client for tests that sends whatever bytes they like to a port of this machine.

#ifndef SIGNPOST_SERVER_RAW_CLIENT_H_
#define SIGNPOST_SERVER_RAW_CLIENT_H_

#include <cstdint>
#include <string>

namespace signpost {

class RawClient {
 public:
  explicit RawClient(uint16_t port);  // of 127.0.0.1, where somebody listens
  RawClient(RawClient&& other);
  ~RawClient();

  // As much of it as the other side takes; waits for it to take all, but not for longer than it
  // stays.
  void Send(const std::string& bytes);
  // As much of it as fits in the buffers at once.
  void SendSome(const std::string& bytes);

  // Until the other side closes; "timeout" if nothing comes for ten seconds.
  std::string ReadAll();

 private:
  int fd_;
};

// What comes after that request; nothing if the connection is refused.
std::string HttpGet(uint16_t port, const std::string& path);

}  // namespace signpost

#endif  // SIGNPOST_SERVER_RAW_CLIENT_H_
