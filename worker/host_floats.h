#ifndef SIGNPOST_WORKER_HOST_FLOATS_H_
#define SIGNPOST_WORKER_HOST_FLOATS_H_

#include <cstddef>
#include <utility>

#include "absl/types/span.h"
#include "worker/page_vector.h"

namespace signpost {

// Numbers on the host: where they are, or a copy of what is on a GPU.
class HostFloats {
 public:
  explicit HostFloats(absl::Span<const float> there) : floats_(there) {}
  explicit HostFloats(PageVector<float> copy) : copy_(std::move(copy)), floats_(copy_) {}
  HostFloats(HostFloats&&) = default;  // a vector that moves leaves its numbers where they are

  operator absl::Span<const float>() const { return floats_; }
  const float* begin() const { return floats_.begin(); }
  const float* end() const { return floats_.end(); }
  float operator[](size_t i) const { return floats_[i]; }
  size_t size() const { return floats_.size(); }

 private:
  PageVector<float> copy_;
  absl::Span<const float> floats_;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_HOST_FLOATS_H_
