// Bytes on the wire, read from the kernel's counters of this process's TCP sockets (TCP_INFO), not
// computed from what we believe we sent: HTTP/2 framing, headers and retries are all in it.

#ifndef SIGNPOST_WORKER_WIRE_BYTES_H_
#define SIGNPOST_WORKER_WIRE_BYTES_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace signpost {

struct WireBytes {
  uint64_t sent = 0;           // TCP payload, retransmissions included
  uint64_t received = 0;       // TCP payload
  uint64_t retransmitted = 0;  // of `sent`: what was sent again
  WireBytes operator+(const WireBytes& other) const {
    return {sent + other.sent, received + other.received, retransmitted + other.retransmitted};
  }
  WireBytes operator-(const WireBytes& other) const {
    return {sent - other.sent, received - other.received, retransmitted - other.retransmitted};
  }
};

// Adds up the TCP connections of this process to given peers. A connection that closes between two
// readings counts with its last reading. Not thread-safe.
class WireByteCounter {
 public:
  // `ports`: the peers' TCP ports; other sockets of the process are not counted.
  explicit WireByteCounter(std::vector<uint16_t> ports);

  WireBytes Read();

 private:
  std::vector<uint16_t> ports_;
  std::map<uint64_t, WireBytes> by_socket_;  // by inode
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_WIRE_BYTES_H_
