// What the demo shows at its end: both runs side by side.

#ifndef SIGNPOST_CLIENT_DEMO_REPORT_H_
#define SIGNPOST_CLIENT_DEMO_REPORT_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/demo/comparison.h"

namespace signpost::demo {

// The result file of each worker (TrainingOptions::result_file), in rank order.
struct RunFiles {
  std::vector<std::string> adam;
  std::vector<std::string> onebit;
};

// Where the report goes besides the table; empty: not written.
struct ReportFiles {
  std::string svg;   // FormatLossChart (loss_chart.h)
  std::string csv;   // FormatCsv
  std::string json;  // FormatJson
};

// All that the demo's launcher calls: reads both runs' results, writes the files and returns the
// table, to be printed. INVALID_ARGUMENT if the results do not belong together (CheckComparison);
// other errors name the file.
absl::StatusOr<std::string> Report(const RunFiles& runs, const ReportFiles& files);

// For people; ends with a newline.
std::string FormatTable(const Comparison& comparison);

// The points of the loss curves: optimizer,step,training_bpb,validation_bpb.
std::string FormatCsv(const Comparison& comparison);

// One object. Numbers that are not finite are null.
//   val_bpb_adam, val_bpb_onebit        final validation loss, bits per byte
//   wire_bits_per_param_up, _down       measured, in the one-bit rounds
//   bytes_ratio_vs_fp32                 32 bits per parameter each way over the measured bytes of
//   the
//                                       whole 1-bit run, its dense warm-up included
//   bytes_ratio_vs_fp32_one_bit_rounds  the same of the one-bit rounds alone
//   replicas_identical                  whether each run ended with equal parameters on all workers
//   parameters, steps                   of each run
//   seconds                             of both runs together
// Bytes are those of the worker that had most.
std::string FormatJson(const Comparison& comparison);

}  // namespace signpost::demo

#endif  // SIGNPOST_CLIENT_DEMO_REPORT_H_
