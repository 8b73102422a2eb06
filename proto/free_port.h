// A port for a server that is told where to listen.

#ifndef SIGNPOST_PROTO_FREE_PORT_H_
#define SIGNPOST_PROTO_FREE_PORT_H_

#include <cstdint>

namespace signpost {

// Returns a TCP port on which nothing listens now. Another process may take it before the caller does.
uint16_t FreePort();

}  // namespace signpost

#endif  // SIGNPOST_PROTO_FREE_PORT_H_
