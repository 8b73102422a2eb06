#include "tests/raw_process.h"

#include "absl/status/status.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "proto/aggregator.pb.h"
#include "proto/node.grpc.pb.h"
#include "worker/onebit_adam.h"

namespace signpost::testing {

struct RawProcess::Connection {
  explicit Connection(const std::string& target)
      : stub(node::NodeService::NewStub(
            grpc::CreateChannel(target, grpc::InsecureChannelCredentials()))),
        stream(stub->Serve(&context)) {}

  const std::unique_ptr<node::NodeService::Stub> stub;
  grpc::ClientContext context;
  const std::unique_ptr<grpc::ClientReaderWriter<node::Request, node::Reply>> stream;
};

RawProcess::RawProcess(const std::string& target)
    : connection_(std::make_unique<Connection>(target)) {}

RawProcess::~RawProcess() {
  Die();
  connection_->stream->Finish();
}

void RawProcess::Die() { connection_->context.TryCancel(); }

void RawProcess::Send(const node::Request& request) { connection_->stream->Write(request); }

absl::StatusOr<node::Reply> RawProcess::Receive() {
  node::Reply reply;
  if (!connection_->stream->Read(&reply)) return absl::CancelledError("no reply");
  if (reply.code() == 0) return reply;
  return absl::Status(static_cast<absl::StatusCode>(reply.code()), reply.message());
}

absl::StatusOr<node::Reply> RawProcess::Call(const node::Request& request) {
  Send(request);
  return Receive();
}

node::Request RawAttach(uint32_t rank, uint32_t world_size) {
  node::Request request;
  node::Attach& attach = *request.mutable_attach();
  attach.set_job("raw");
  attach.set_rank(rank);
  attach.set_world_size(world_size);
  attach.set_pid(1000 + rank);
  Tensor& tensor = *attach.mutable_definition()->add_tensors();
  tensor.set_name("x");
  tensor.add_shape(8);
  attach.mutable_definition()->add_groups(0);
  node::Options& options = *attach.mutable_definition()->mutable_options();
  options.set_block_elements(8);
  options.set_gamma(1.35);
  options.set_join_timeout_us(30'000'000);
  options.set_exchange_timeout_us(30'000'000);
  options.set_freeze_step(5);
  options.set_warm_up_codec(FLOAT32);
  options.set_variance_codec(FLOAT32);
  options.set_codec(ONE_BIT);
  options.set_variance_floor(0.01);
  return request;
}

node::Request RawBegin() {
  node::Request request;
  request.mutable_begin();
  return request;
}

node::Request RawStep(double learning_rate) {
  node::Request request;
  const GroupRates rates = {.learning_rate = learning_rate};
  *request.mutable_step()->mutable_rates() = MessageOf({&rates, 1}, Schedule());
  return request;
}

std::vector<std::unique_ptr<RawProcess>> RawProcessesOf(const Nodes& nodes) {
  std::vector<std::unique_ptr<RawProcess>> processes;
  for (uint32_t i = 0; i < nodes.processes(); ++i) {
    processes.push_back(std::make_unique<RawProcess>(nodes.OptionsOf(i).node));
    EXPECT_EQ(processes[i]->Call(RawAttach(i, nodes.processes())).status(), absl::OkStatus());
    processes[i]->Send(RawBegin());
  }
  for (const auto& process : processes) EXPECT_EQ(process->Receive().status(), absl::OkStatus());
  return processes;
}

}  // namespace signpost::testing
