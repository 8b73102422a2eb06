// Figures: what benchmarks find, against what physics allows and what others need.

#ifndef SIGNPOST_BENCH_FIGURES_H_
#define SIGNPOST_BENCH_FIGURES_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "bench/figures.pb.h"

namespace signpost::bench {

// The middle one, or the mean of the middle two; of at least one number.
double Median(std::vector<double> samples);

// A row of what was measured, at least once: its median, least and most.
Figure MakeFigure(const std::string& name, const std::string& unit,
                  absl::Span<const double> samples);

// What was measured in turns, at least one and at least once in each.
using Turns = absl::Span<const std::vector<double>>;

// Of each turn.
std::vector<double> Medians(Turns turns);

// A row of turns: the median of their medians, and the least and the most in any of them.
Figure FigureOfTurns(const std::string& name, const std::string& unit, Turns turns);

// Adds the bound and how much of it the value reaches.
enum class Better { kMore, kLess };
void SetBound(double bound, Better better, Figure& figure);

// The same of a bound that was measured too, in turns with `samples` and equally often: shows its
// median, and how much of it was reached is the median of the pairs.
void SetBounds(absl::Span<const double> samples, absl::Span<const double> bounds, Better better,
               Figure& figure);

// Adds the peer. `samples` and `peers` were measured in turns and are equally many.
void SetPeer(const std::string& peer, absl::Span<const double> samples,
             absl::Span<const double> peers, Better better, Figure& figure);

// The cells of a table: a head, and a row for each, with columns for what any of them has.
std::vector<std::vector<std::string>> TableOf(const Figures& figures);

// As protobuf writes JSON, with the fields' names as they are in figures.proto.
std::string FormatJson(const Figures& figures);

// What FormatJson wrote; INVALID_ARGUMENT if it is something else.
absl::StatusOr<Figures> ParseJson(const std::string& json);

}  // namespace signpost::bench

#endif  // SIGNPOST_BENCH_FIGURES_H_
