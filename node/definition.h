// What a training process joins with, as it tells the worker of its node.

#ifndef SIGNPOST_NODE_DEFINITION_H_
#define SIGNPOST_NODE_DEFINITION_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/session_options.h"
#include "proto/layout.h"
#include "proto/node.pb.h"
#include "worker/onebit_adam.h"

namespace signpost::node {

Definition DefinitionOf(const SessionOptions& options, const OptimizerOptions& optimizer,
                        absl::Span<const Parameter> parameters);

// Gives `options` what a definition says of a worker: all but where the aggregators are, and which
// of the job's ranks it is.
void SetWorkerOptions(const Options& from, WorkerOptions& options);
OptimizerOptions OptimizerOptionsOf(const Options& options);

// The tensors as parameters with values in `values`, one behind the other, of the layout's size.
std::vector<Parameter> ParametersOf(const Definition& definition, absl::Span<float> values);

// How the node's worker goes through the numbers: by chunks, as the job does if it is told their
// size. INVALID_ARGUMENT as Layout::Create, or for another number of groups than of tensors.
absl::StatusOr<Layout> LayOut(const Definition& definition);

// OK when both are the same. Otherwise FAILED_PRECONDITION that names the first tensor that
// differs, with both shapes, or the options, with both values: "tensor 3 is 'fc2.bias' [256] here
// but 'fc2.bias' [128] in the job". `layout` is the job's.
absl::Status CheckSame(const Definition& theirs, const Definition& job, const Layout& layout);

// The same for what a job begins with. States are not looked at, but for whether there is one.
absl::Status CheckSame(const Start& theirs, const Start& job);

}  // namespace signpost::node

#endif  // SIGNPOST_NODE_DEFINITION_H_
