// How many processors there are for this process.

#ifndef SIGNPOST_PROTO_PROCESSORS_H_
#define SIGNPOST_PROTO_PROCESSORS_H_

#include <cstdint>

namespace signpost {

// That the calling thread may run on; 0: unknown. A control group's share of their time is not
// looked at.
uint32_t ProcessorCount();

}  // namespace signpost

#endif  // SIGNPOST_PROTO_PROCESSORS_H_
