#include "bench/figures.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"

namespace signpost::bench {
namespace {

// Three digits that count.
std::string FormatNumber(double value) {
  if (value == 0) return "0";
  const int exponent = static_cast<int>(std::floor(std::log10(std::fabs(value))));
  if (exponent < -4) return absl::StrFormat("%.2e", value);
  return absl::StrFormat("%.*f", std::clamp(2 - exponent, 0, 6), value);
}

std::string FormatShare(double share) { return absl::StrFormat("%.0f%%", 100 * share); }

// How well a value does beside another: more than 1 is better.
double Ratio(double value, double other, Better better) {
  return better == Better::kMore ? value / other : other / value;
}

// Of pairs that were measured in turns.
double MedianRatio(absl::Span<const double> values, absl::Span<const double> others,
                   Better better) {
  std::vector<double> ratios;
  for (size_t i = 0; i < values.size(); ++i) ratios.push_back(Ratio(values[i], others[i], better));
  return Median(std::move(ratios));
}

}  // namespace

double Median(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const size_t middle = samples.size() / 2;
  if (samples.size() % 2 == 1) return samples[middle];
  return (samples[middle - 1] + samples[middle]) / 2;
}

Figure MakeFigure(const std::string& name, const std::string& unit,
                  absl::Span<const double> samples) {
  Figure figure;
  figure.set_name(name);
  figure.set_unit(unit);
  figure.set_value(Median({samples.begin(), samples.end()}));
  figure.set_least(*std::min_element(samples.begin(), samples.end()));
  figure.set_most(*std::max_element(samples.begin(), samples.end()));
  return figure;
}

std::vector<double> Medians(Turns turns) {
  std::vector<double> medians;
  for (const std::vector<double>& turn : turns) medians.push_back(Median(turn));
  return medians;
}

Figure FigureOfTurns(const std::string& name, const std::string& unit, Turns turns) {
  std::vector<double> all;
  for (const std::vector<double>& turn : turns) all.insert(all.end(), turn.begin(), turn.end());
  Figure figure = MakeFigure(name, unit, all);
  figure.set_value(Median(Medians(turns)));
  return figure;
}

void SetBound(double bound, Better better, Figure& figure) {
  figure.set_bound(bound);
  figure.set_of_bound(Ratio(figure.value(), bound, better));
}

void SetBounds(absl::Span<const double> samples, absl::Span<const double> bounds, Better better,
               Figure& figure) {
  figure.set_bound(Median({bounds.begin(), bounds.end()}));
  figure.set_of_bound(MedianRatio(samples, bounds, better));
}

void SetPeer(const std::string& peer, absl::Span<const double> samples,
             absl::Span<const double> peers, Better better, Figure& figure) {
  figure.set_peer(peer);
  figure.set_times_faster(MedianRatio(samples, peers, better));
}

std::vector<std::vector<std::string>> TableOf(const Figures& figures) {
  bool has_spread = false, has_bound = false, has_peer = false;
  for (const Figure& figure : figures.figures()) {
    has_spread |= figure.least() != figure.most();
    has_bound |= figure.has_bound();
    has_peer |= figure.has_times_faster();
  }
  std::vector<std::string> head = {"", has_spread ? "MEDIAN" : "VALUE"};
  if (has_spread) head.insert(head.end(), {"LEAST", "MOST"});
  head.push_back("UNIT");
  if (has_bound) head.insert(head.end(), {"BOUND", "OF BOUND"});
  if (has_peer) head.insert(head.end(), {"TIMES FASTER", "THAN"});
  std::vector<std::vector<std::string>> rows = {std::move(head)};
  for (const Figure& figure : figures.figures()) {
    std::vector<std::string>& row = rows.emplace_back();
    row = {figure.name(), FormatNumber(figure.value())};
    if (has_spread) {
      row.insert(row.end(), {FormatNumber(figure.least()), FormatNumber(figure.most())});
    }
    row.push_back(figure.unit());
    if (has_bound) {
      row.push_back(figure.has_bound() ? FormatNumber(figure.bound()) : "");
      row.push_back(figure.has_bound() ? FormatShare(figure.of_bound()) : "");
    }
    if (has_peer) {
      row.push_back(figure.has_times_faster() ? FormatNumber(figure.times_faster()) : "");
      row.push_back(figure.peer());
    }
  }
  return rows;
}

std::string FormatJson(const Figures& figures) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;  // zeros too
  std::string json;
  // Only an Any of an unknown type can fail.
  const auto status = google::protobuf::util::MessageToJsonString(figures, &json, options);
  return status.ok() ? json : "{}";
}

absl::StatusOr<Figures> ParseJson(const std::string& json) {
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;  // of a later version
  Figures figures;
  const auto status = google::protobuf::util::JsonStringToMessage(json, &figures, options);
  if (status.ok()) return figures;
  return absl::InvalidArgumentError(std::string(status.message()));
}

}  // namespace signpost::bench
