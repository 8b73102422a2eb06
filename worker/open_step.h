// A step that has begun and not ended.

#ifndef SIGNPOST_WORKER_OPEN_STEP_H_
#define SIGNPOST_WORKER_OPEN_STEP_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "proto/frame.h"
#include "proto/layout.h"
#include "worker/chunk_queue.h"
#include "worker/gradient.h"
#include "worker/step_report.h"

namespace signpost {

// Which of its gradients are there, which chunks can go, and what has come back too early. Not
// thread-safe.
class OpenStep {
 public:
  struct HeldAnswer {
    uint32_t chunk;
    Answer answer;
  };

  // `layout` must outlive it. `window` as ChunkQueue's.
  OpenStep(const Layout& layout, uint32_t window);

  // Requires that the tensor's is not there.
  void AddGradient(size_t tensor, Gradient gradient);

  // By tensor; empty ones where they are missing.
  absl::Span<const Gradient> gradients() const { return gradients_; }
  bool has_gradient(size_t tensor) const { return has_gradient_[tensor]; }
  size_t gradients_missing() const { return gradients_missing_; }
  size_t first_missing() const;  // tensor; requires gradients_missing() > 0

  // Chunks are ready in it when all their tensors' gradients are there.
  ChunkQueue queue;
  bool may_apply = false;
  std::deque<HeldAnswer> held_answers;  // until it may
  HeldAnswer TakeHeldAnswer() {
    HeldAnswer held = std::move(held_answers.front());
    held_answers.pop_front();
    return held;
  }
  StepReport report;
  int64_t trace_begin = 0;

 private:
  const Layout& layout_;
  std::vector<Gradient> gradients_;  // by tensor
  std::vector<bool> has_gradient_;   // likewise
  size_t gradients_missing_;
  std::vector<uint32_t> segments_missing_;  // by chunk: without a gradient
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_OPEN_STEP_H_
