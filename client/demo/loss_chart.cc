#include "client/demo/loss_chart.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace signpost::demo {
namespace {

// In pixels; y grows downwards.
constexpr double kWidth = 860, kHeight = 480;
constexpr double kLeft = 70, kRight = kWidth - 30, kTop = 64, kBottom = kHeight - 58;

// Told apart by every kind of colour vision (Okabe and Ito).
constexpr char kAdamColor[] = "#0072b2";
constexpr char kOneBitColor[] = "#d55e00";

// Maps values in [low, high] to pixels.
struct Axis {
  double low, high;
  double low_pixel, high_pixel;
  double Pixel(double value) const {
    return low_pixel + (value - low) / (high - low) * (high_pixel - low_pixel);
  }
};

struct Axes {
  Axis steps, loss;
};

Axes AxesFor(const Comparison& comparison) {
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  for (const RunResults* run : {&comparison.adam, &comparison.onebit}) {
    for (const CurvePoint& point : (*run)[0].curve) {
      for (double loss : {point.training_bpb, point.validation_bpb}) {
        if (!std::isfinite(loss)) continue;
        low = std::min(low, loss);
        high = std::max(high, loss);
      }
    }
  }
  if (low > high) low = 0, high = 8;  // nothing to show
  const double margin = std::max(0.04 * (high - low), 0.01);
  const double steps = static_cast<double>(comparison.adam[0].steps);
  return {.steps = {0, steps, kLeft, kRight}, .loss = {low - margin, high + margin, kBottom, kTop}};
}

// `anchor`: "start", "middle" or "end" of the text is at (x, y).
std::string Label(double x, double y, absl::string_view anchor, absl::string_view text) {
  return absl::StrFormat("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>\n", x, y, anchor,
                         text);
}

std::string Line(double x1, double y1, double x2, double y2, absl::string_view style) {
  return absl::StrFormat("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" %s/>\n", x1, y1, x2,
                         y2, style);
}

std::string Title() {
  return "<text x=\"70\" y=\"28\" font-size=\"17\" font-weight=\"bold\" fill=\"#222\">"
         "Loss of a byte-level language model: Adam and 1-bit Adam</text>\n";
}

std::string GridAndLabels(const Axes& axes) {
  std::string svg;
  for (double loss : Ticks(axes.loss.low, axes.loss.high, 8)) {
    const double y = axes.loss.Pixel(loss);
    absl::StrAppend(&svg, Line(kLeft, y, kRight, y, "stroke=\"#e4e4e4\""),
                    Label(kLeft - 9, y + 4.5, "end", absl::StrFormat("%.4g", loss)));
  }
  for (double step : Ticks(axes.steps.low, axes.steps.high, 9)) {
    const double x = axes.steps.Pixel(step);
    absl::StrAppend(&svg, Line(x, kBottom, x, kBottom + 5, "stroke=\"#888\""),
                    Label(x, kBottom + 21, "middle", absl::StrFormat("%.10g", step)));
  }
  absl::StrAppend(&svg, Line(kLeft, kBottom, kRight, kBottom, "stroke=\"#888\""),
                  Line(kLeft, kTop, kLeft, kBottom, "stroke=\"#888\""),
                  Label((kLeft + kRight) / 2, kHeight - 14, "middle", "step"),
                  absl::StrFormat("<text transform=\"translate(22 %.1f) rotate(-90)\" "
                                  "text-anchor=\"middle\">loss, bits per byte</text>\n",
                                  (kTop + kBottom) / 2));
  return svg;
}

std::string FreezeMark(const Comparison& comparison, const Axes& axes) {
  const WorkerResult& result = comparison.onebit[0];
  const double x = axes.steps.Pixel(static_cast<double>(result.steps - result.one_bit_steps));
  return absl::StrCat(Line(x, kTop, x, kBottom, "stroke=\"#999\" stroke-dasharray=\"4 4\""),
                      Label(x + 7, kBottom - 10, "start", "1-bit Adam sends one bit from here"));
}

std::string Curve(const RunResults& run, double CurvePoint::*loss, const Axes& axes,
                  absl::string_view style) {
  std::string points;
  for (const CurvePoint& point : run[0].curve) {
    if (!std::isfinite(point.*loss)) continue;
    absl::StrAppend(&points, points.empty() ? "" : " ",
                    absl::StrFormat("%.1f,%.1f", axes.steps.Pixel(static_cast<double>(point.step)),
                                    axes.loss.Pixel(point.*loss)));
  }
  return absl::StrFormat("<polyline points=\"%s\" fill=\"none\" stroke-linejoin=\"round\" %s/>\n",
                         points, style);
}

std::string Style(absl::string_view color, double width, double opacity) {
  return absl::StrFormat("stroke=\"%s\" stroke-width=\"%g\" stroke-opacity=\"%g\"", color, width,
                         opacity);
}

// Adam's curve is the wider one: it shows on both sides where 1-bit Adam's covers it.
std::string AdamValidationStyle() { return Style(kAdamColor, 5, 0.6); }
std::string AdamTrainingStyle() { return Style(kAdamColor, 2.5, 0.3); }
std::string OneBitValidationStyle() { return Style(kOneBitColor, 2, 1); }
std::string OneBitTrainingStyle() { return Style(kOneBitColor, 1, 0.7); }

std::string Legend() {
  struct Entry {
    const char* name;
    std::string style;
  };
  const Entry entries[] = {
      {"Adam, validation", AdamValidationStyle()},
      {"1-bit Adam, validation", OneBitValidationStyle()},
      {"Adam, training", AdamTrainingStyle()},
      {"1-bit Adam, training", OneBitTrainingStyle()},
  };
  constexpr double kEntryHeight = 20, kEntryWidth = 190;
  std::string svg;
  double y = kTop + 16;
  for (const Entry& entry : entries) {
    const double x = kRight - kEntryWidth;
    absl::StrAppend(&svg, Line(x, y, x + 28, y, entry.style),
                    Label(x + 36, y + 4.5, "start", entry.name));
    y += kEntryHeight;
  }
  return svg;
}

}  // namespace

std::string FormatLossChart(const Comparison& comparison) {
  const Axes axes = AxesFor(comparison);
  return absl::StrCat(
      absl::StrFormat("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" "
                      "width=\"%.0f\" height=\"%.0f\" font-family=\"sans-serif\" font-size=\"13\" "
                      "fill=\"#444\">\n",
                      kWidth, kHeight, kWidth, kHeight),
      "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n", Title(), GridAndLabels(axes),
      FreezeMark(comparison, axes),
      Curve(comparison.adam, &CurvePoint::training_bpb, axes, AdamTrainingStyle()),
      Curve(comparison.onebit, &CurvePoint::training_bpb, axes, OneBitTrainingStyle()),
      Curve(comparison.adam, &CurvePoint::validation_bpb, axes, AdamValidationStyle()),
      Curve(comparison.onebit, &CurvePoint::validation_bpb, axes, OneBitValidationStyle()),
      Legend(), "</svg>\n");
}

std::vector<double> Ticks(double low, double high, int count) {
  const double distance = (high - low) / count;
  const double power = std::pow(10, std::floor(std::log10(distance)));
  double step = 10 * power;
  for (double factor : {5.0, 2.0, 1.0}) {
    if (factor * power >= distance) step = factor * power;
  }
  std::vector<double> ticks;
  for (double i = std::ceil(low / step); i * step <= high; ++i) ticks.push_back(i * step);
  return ticks;
}

}  // namespace signpost::demo
