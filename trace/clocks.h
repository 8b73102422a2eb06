// What the clocks of several hosts differ by, found out from messages between them.

#ifndef SIGNPOST_TRACE_CLOCKS_H_
#define SIGNPOST_TRACE_CLOCKS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace signpost::trace {

// Collects what messages say: none arrives before it was sent. One from A to B that A's clock saw
// leave at s and B's arrive at r says that B's clock is ahead of A's by at most r - s, and one from
// B to A that it is ahead by at least so much. So messages in both directions bound the difference,
// as they do in NTP, and the quickest of each the most. What A knows of B and B of C bounds what A
// knows of C. All times in nanoseconds.
//
// It knows nothing of clocks that run at different speeds: 10 ppm are 0.6 ms in each minute.
class Clocks {
 public:
  explicit Clocks(size_t hosts);

  void AddMessage(size_t from, int64_t sent, size_t to, int64_t received);

  // How far the host's clock is ahead of that of host 0.
  struct Offset {
    int64_t offset = 0;
    int64_t bound = 0;  // it is off by that much at most, if both clocks run at the same speed
    // The messages contradict each other, by twice the bound: clocks run at different speeds.
    bool is_contradictory = false;
  };
  // By host; none where messages do not tell, in both directions.
  std::vector<std::optional<Offset>> Solve() const;

 private:
  const size_t hosts_;
  std::vector<std::optional<int64_t>> most_;  // [a * hosts + b]: b is ahead of a by at most that
};

}  // namespace signpost::trace

#endif  // SIGNPOST_TRACE_CLOCKS_H_
