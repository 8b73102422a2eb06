// The one knob for how fast a lost peer is noticed, and everything that follows from it.

#ifndef SIGNPOST_PROTO_FAILURE_TIMEOUT_H_
#define SIGNPOST_PROTO_FAILURE_TIMEOUT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace signpost {

// A peer that shows no sign of life for T is gone. A value; T = 10 s unless told otherwise, and 1 s
// is a fast setting for machines that are near each other.
//
//   keepalive_time     T/2               silence after which a connection is pinged
//   keepalive_timeout  T/2               how long a ping's answer may take; TCP_USER_TIMEOUT
//   connect_timeout    T                 from a connection's first packet to gRPC's greeting
//   longest_backoff    min(T/4, 500 ms)  between two tries, of a connection or an exchange
//
// TCP_USER_TIMEOUT, which gRPC takes from the keepalive timeout, is how long sent bytes may stay
// unacknowledged or the peer's window closed: it ends a frame that is stuck half-way, behind which
// no ping gets out. The backoff is how late a restarted aggregator may be found.
//
// So a hung peer is noticed after T at most; by a worker after T/2 + 1 s if that is later, because
// gRPC (1.51) lets a client ping once a second. What is lost then is a connection: the worker makes
// a new one and sends again until the exchange's deadline. T must be longer than a busy network or
// processor may delay an answer, or connections are given up that would have lived.
//
// It says nothing about peers that live and are slow, such as a worker that computes for long:
// those are WorkerOptions' join_timeout and exchange_timeout.
//
// Two peers need not have the same T.
class FailureTimeout {
 public:
  static constexpr absl::Duration kLeast = absl::Milliseconds(500);
  static constexpr absl::Duration kMost = absl::Hours(1);

  FailureTimeout() = default;

  // INVALID_ARGUMENT unless `duration` is in [kLeast, kMost].
  static absl::StatusOr<FailureTimeout> Of(absl::Duration duration);
  // "10s", "1500ms". INVALID_ARGUMENT says what `text` is and what was wanted.
  static absl::StatusOr<FailureTimeout> Parse(absl::string_view text);

  absl::Duration duration() const { return duration_; }
  std::string ToString() const { return absl::FormatDuration(duration_); }  // Parse reads it

  absl::Duration keepalive_time() const { return duration_ / 2; }
  absl::Duration keepalive_timeout() const { return duration_ / 2; }
  absl::Duration connect_timeout() const { return duration_; }
  absl::Duration longest_backoff() const;

 private:
  explicit FailureTimeout(absl::Duration duration) : duration_(duration) {}

  absl::Duration duration_ = absl::Seconds(10);
};

}  // namespace signpost

#endif  // SIGNPOST_PROTO_FAILURE_TIMEOUT_H_
