// What goes back into an error.

#ifndef SIGNPOST_WORKER_ADDITION_H_
#define SIGNPOST_WORKER_ADDITION_H_

#include "proto/layout.h"

namespace signpost {

// A part of a segment that takes something, times the factor, into its error.
struct Addition {
  Segment part;
  float factor;
};

}  // namespace signpost

#endif  // SIGNPOST_WORKER_ADDITION_H_
