// The rounds of a chunk that a crash of the aggregator would undo: workers keep their frames.

#ifndef SIGNPOST_SERVER_UNDURABLE_ROUNDS_H_
#define SIGNPOST_SERVER_UNDURABLE_ROUNDS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>

namespace signpost {

// Rounds of which a crash could make workers send the frames again, at most. Those that all ranks
// skip have next to no bytes.
inline constexpr size_t kMostKeptRounds = 64;

// Frames of a chunk may have so many bytes however small it is: a single number, as of a norm, has
// 16 rounds, as the one-bit rounds of a large chunk. With four nearly every step would wait for the
// disk.
inline constexpr uint64_t kLeastRoom = 16 * sizeof(float);

// The most bytes that frames or answers of a chunk which are kept may have, of which one has
// `largest`: half of the chunk's size in fp32, or four of the largest, or kLeastRoom.
inline uint64_t MostKeptBytes(uint64_t elements, uint64_t largest) {
  return std::max({2 * elements, 4 * largest, kLeastRoom});
}

// What one rank keeps. Not thread-safe.
class UndurableRounds {
 public:
  // The first one will be of `step`. `elements` are the chunk's.
  UndurableRounds(uint64_t elements, uint64_t step) : elements_(elements), first_step_(step) {}

  // Whether it would not be too much after one more, whose largest frame has so many bytes.
  bool HasRoomFor(uint64_t largest_frame) const {
    if (bytes_.size() >= kMostKeptRounds) return false;
    uint64_t largest = largest_frame;
    for (const uint64_t bytes : bytes_) largest = std::max(largest, bytes);
    return bytes() + largest_frame <= MostKeptBytes(elements_, largest);
  }

  // The next round has closed.
  void Add(uint64_t largest_frame) {
    bytes_.push_back(largest_frame);
    unsaved_bytes_ += largest_frame;
  }
  // All of them are in a snapshot, which is not durable yet.
  void SetSaved() { unsaved_bytes_ = 0; }
  // Those before `step` are durable.
  void SetDurable(uint64_t step) {
    durable_step_ = std::max(durable_step_, step);
    for (; first_step_ < step && !bytes_.empty(); ++first_step_) bytes_.pop_front();
  }

  uint64_t durable_step() const { return durable_step_; }
  uint64_t bytes() const {
    uint64_t sum = 0;
    for (const uint64_t bytes : bytes_) sum += bytes;
    return sum;
  }
  // Whether those that are in no snapshot have 3/16 of the chunk's size in fp32, or 3/8 of
  // kLeastRoom if that is more: so much that it is time for one.
  bool WantSnapshot() const {
    return 8 * unsaved_bytes_ >= 3 * std::max(2 * elements_, kLeastRoom);
  }

 private:
  uint64_t elements_;
  uint64_t first_step_;
  uint64_t durable_step_ = 0;
  std::deque<uint64_t> bytes_;  // by step from first_step_ on
  uint64_t unsaved_bytes_ = 0;
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_UNDURABLE_ROUNDS_H_
