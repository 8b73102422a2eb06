// The aggregators of a job, as a worker would find them.

#ifndef SIGNPOST_DOCTOR_AGGREGATORS_H_
#define SIGNPOST_DOCTOR_AGGREGATORS_H_

#include <cstdint>
#include <string>

#include "doctor/job.h"
#include "doctor/report.h"
#include "proto/aggregator.pb.h"
#include "security/transport_security.h"

namespace signpost::doctor {

// Connects to each, asks for its status, and checks that. `where` names this host.
void CheckAggregators(const Job& job, const TransportSecurity& security, const std::string& where,
                      DoctorReport& report);

// The answer of the one at `address`, which should be the shard `shard` of so many.
void CheckAggregatorStatus(const StatusResponse& status, const std::string& address, uint32_t shard,
                           uint32_t shard_count, Reporter& to);

}  // namespace signpost::doctor

#endif  // SIGNPOST_DOCTOR_AGGREGATORS_H_
