// The memory of frames that came before their chunk was the furthest behind of its job, and so
// could have waited with their workers.

#ifndef SIGNPOST_SERVER_ROOM_H_
#define SIGNPOST_SERVER_ROOM_H_

#include <atomic>
#include <cstdint>
#include <utility>

namespace signpost {

// Thread-safe. All jobs of an aggregator share one.
class Room {
 public:
  uint64_t taken() const { return taken_; }

  // What one round has of it, and gives back when it is over. Not thread-safe.
  class Share {
   public:
    Share() = default;
    Share(Share&& other) noexcept
        : room_(std::exchange(other.room_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Share& operator=(Share&& other) noexcept {
      std::swap(room_, other.room_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Share() {
      if (room_ != nullptr) room_->taken_ -= bytes_;
    }

    uint64_t bytes() const { return bytes_; }

    // Always of the same room. False, and nothing is taken: more than `most` would be, by all.
    bool Take(Room& room, uint64_t bytes, uint64_t most) {
      room_ = &room;
      if (room.taken_.fetch_add(bytes) + bytes > most) {
        room.taken_ -= bytes;
        return false;
      }
      bytes_ += bytes;
      return true;
    }
    // Some of it, before the round is over.
    void Give(uint64_t bytes) {
      if (bytes == 0) return;
      room_->taken_ -= bytes;
      bytes_ -= bytes;
    }

   private:
    Room* room_ = nullptr;
    uint64_t bytes_ = 0;
  };

  // What a frame may have.
  struct Offer {
    Room* room = nullptr;  // null: the frame is needed, and takes what its job has reserved
    uint64_t most = 0;     // of the room, by all frames
    uint64_t limit = 0;    // --max-held-bytes, for messages
  };

 private:
  std::atomic<uint64_t> taken_ = 0;
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_ROOM_H_
