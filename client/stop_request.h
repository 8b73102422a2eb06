// SIGTERM as a training loop wants it: asked between two steps, instead of in the middle of one.
//
//   auto session = Session::Join(...);
//   StopRequest stop;
//   for (...) {
//     if (stop.made()) {
//       (*session)->Leave();
//       return 75;  // "try again": `signpost run` and batch systems tell it from a failure
//     }
//     auto report = (*session)->Step(...);
//     if (!report.ok()) return ExitCodeOf(stop.Excuse(report.status()));
//   }

#ifndef SIGNPOST_CLIENT_STOP_REQUEST_H_
#define SIGNPOST_CLIENT_STOP_REQUEST_H_

#include <signal.h>

#include <array>

#include "absl/status/status.h"

namespace signpost {

// While it lives, the first SIGTERM or SIGINT to this process is noted and does nothing else; a
// second one of its kind ends the process as ever. One at a time, to be made after Join: a Join
// waits for other ranks, and for no request. Thread-safe.
class StopRequest {
 public:
  StopRequest();
  ~StopRequest();  // The signals do again what they did before.
  StopRequest(const StopRequest&) = delete;
  StopRequest& operator=(const StopRequest&) = delete;

  bool made() const;

  // What the error of a step means to who may have been asked to stop: who was has probably lost
  // ranks that were asked too and left a step earlier, so it is CANCELLED, with the message.
  // `error` itself if no request was made. Requires an error.
  absl::Status Excuse(const absl::Status& error) const;

 private:
  static constexpr std::array<int, 2> kSignals = {SIGTERM, SIGINT};

  std::array<struct sigaction, kSignals.size()> before_;
};

}  // namespace signpost

#endif  // SIGNPOST_CLIENT_STOP_REQUEST_H_
