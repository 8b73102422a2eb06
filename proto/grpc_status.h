// absl::Status, which the code uses, to and from grpc::Status, which the transport uses. The codes
// are the same numbers.

#ifndef SIGNPOST_PROTO_GRPC_STATUS_H_
#define SIGNPOST_PROTO_GRPC_STATUS_H_

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

namespace signpost {

// A message over kMaxStatusMessageBytes is cut, and ends in "...": it travels in HTTP/2 trailers,
// percent-encoded to at most three times its size, and peers drop trailers of more than 8 KiB along
// with the code in them.
inline constexpr size_t kMaxStatusMessageBytes = 2048;
// The mark of TryAgain (try_again.h) becomes the status's details.
grpc::Status ToGrpcStatus(const absl::Status& status);

// A code that no standard names, which only a peer's fault can send, becomes UNKNOWN.
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace signpost

#endif  // SIGNPOST_PROTO_GRPC_STATUS_H_
