// The port on which an aggregator tells about itself: to Prometheus at /metrics, to a person's
// browser at /, which asks /status.json every second.

#ifndef SIGNPOST_SERVER_METRICS_PORT_H_
#define SIGNPOST_SERVER_METRICS_PORT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/steady_time.h"
#include "server/exposition.h"
#include "server/http_port.h"

namespace signpost {

class MetricsPort {
 public:
  // `observe` is called by one thread at a time, and at most every quarter of a second however many
  // ask: what came less than that before is told again. Errors as HttpPort's.
  static absl::StatusOr<std::unique_ptr<MetricsPort>> Listen(
      const std::string& address, const std::vector<std::string>& names,
      std::function<Observation()> observe, std::function<absl::Time()> now = SteadyNow);

  uint16_t port() const { return port_->port(); }

 private:
  MetricsPort(std::function<Observation()> observe, std::function<absl::Time()> now)
      : observe_(std::move(observe)), now_(std::move(now)) {}

  std::optional<HttpPage> Find(absl::string_view path);
  const Observation& Observe();

  const std::function<Observation()> observe_;
  const std::function<absl::Time()> now_;
  // Of the port's thread.
  Observation newest_;
  absl::Time observed_ = absl::InfinitePast();
  std::unique_ptr<HttpPort> port_;  // ends first
};

}  // namespace signpost

#endif  // SIGNPOST_SERVER_METRICS_PORT_H_
