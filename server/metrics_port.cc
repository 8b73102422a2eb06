#include "server/metrics_port.h"

#include <utility>

#include "server/status_page.h"

namespace signpost {
namespace {

constexpr absl::Duration kLeastInterval = absl::Milliseconds(250);

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsPort>> MetricsPort::Listen(
    const std::string& address, const std::vector<std::string>& names,
    std::function<Observation()> observe, std::function<absl::Time()> now) {
  std::unique_ptr<MetricsPort> metrics(new MetricsPort(std::move(observe), std::move(now)));
  absl::StatusOr<std::unique_ptr<HttpPort>> port = HttpPort::Listen(
      address, names,
      [metrics = metrics.get()](absl::string_view path) { return metrics->Find(path); });
  if (!port.ok()) return port.status();
  metrics->port_ = *std::move(port);
  return metrics;
}

std::optional<HttpPage> MetricsPort::Find(absl::string_view path) {
  if (path == "/metrics") {
    return HttpPage{"text/plain; version=0.0.4; charset=utf-8", FormatPrometheus(Observe())};
  }
  if (path == "/status.json") return HttpPage{"application/json", FormatStatusJson(Observe())};
  if (path == "/") {
    return HttpPage{"text/html; charset=utf-8", std::string(StatusPage()),
                    std::string(StatusPagePolicy())};
  }
  return std::nullopt;
}

const Observation& MetricsPort::Observe() {
  const absl::Time now = now_();
  if (now >= observed_ + kLeastInterval) {
    newest_ = observe_();
    observed_ = now;
  }
  return newest_;
}

}  // namespace signpost
