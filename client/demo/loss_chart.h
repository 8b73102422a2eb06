// The loss curves of both runs as a picture.

#ifndef SIGNPOST_CLIENT_DEMO_LOSS_CHART_H_
#define SIGNPOST_CLIENT_DEMO_LOSS_CHART_H_

#include <string>
#include <vector>

#include "client/demo/comparison.h"

namespace signpost::demo {

// An SVG document that needs nothing else: bits per byte over steps, validation loss in full lines
// and training loss in faint ones, with a mark where 1-bit Adam froze the variance. Points that are
// not finite are left out.
std::string FormatLossChart(const Comparison& comparison);

// About `count` round numbers (1, 2 or 5 times a power of ten apart) that lie in [low, high]. low <
// high.
std::vector<double> Ticks(double low, double high, int count);

}  // namespace signpost::demo

#endif  // SIGNPOST_CLIENT_DEMO_LOSS_CHART_H_
