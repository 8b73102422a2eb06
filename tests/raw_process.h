// A process of a node as it is on the socket of the node's worker: it sends what it likes, and can
// go at any moment.

#ifndef SIGNPOST_TESTS_RAW_PROCESS_H_
#define SIGNPOST_TESTS_RAW_PROCESS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/node.pb.h"
#include "tests/nodes.h"

namespace signpost::testing {

class RawProcess {
 public:
  explicit RawProcess(const std::string& target);
  ~RawProcess();

  void Die();

  void Send(const node::Request& request);
  absl::StatusOr<node::Reply> Receive();
  absl::StatusOr<node::Reply> Call(const node::Request& request);

 private:
  struct Connection;

  const std::unique_ptr<Connection> connection_;
};

// To the job 'raw', of one tensor of 8 elements, as process 1000 + rank.
node::Request RawAttach(uint32_t rank, uint32_t world_size);
node::Request RawBegin();
node::Request RawStep(double learning_rate = 0.01);

// All that the nodes have, attached, and begun.
std::vector<std::unique_ptr<RawProcess>> RawProcessesOf(const Nodes& nodes);

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_RAW_PROCESS_H_
