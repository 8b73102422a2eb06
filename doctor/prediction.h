// What a link makes of a job's steps.

#ifndef SIGNPOST_DOCTOR_PREDICTION_H_
#define SIGNPOST_DOCTOR_PREDICTION_H_

#include "bench/costs.h"
#include "bench/predict.h"
#include "doctor/report.h"

namespace signpost::doctor {

// A line for fp32, bf16, one bit and what the warm-up has (bench/predict.h), and one that says
// whether one bit pays. Without a time for computing, of exchanges alone.
void AddPrediction(const bench::Cluster& cluster, const bench::Training& training, Reporter& to);

}  // namespace signpost::doctor

#endif  // SIGNPOST_DOCTOR_PREDICTION_H_
