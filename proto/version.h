// The version of all of Signpost, as aggregators tell it in their status.

#ifndef SIGNPOST_PROTO_VERSION_H_
#define SIGNPOST_PROTO_VERSION_H_

namespace signpost {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace signpost

#endif  // SIGNPOST_PROTO_VERSION_H_
