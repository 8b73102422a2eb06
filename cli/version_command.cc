#include "cli/version_command.h"

#include <grpcpp/grpcpp.h>

#include <cstdio>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/device.h"
#include "kernels/target.h"
#include "proto/exit_code.h"
#include "proto/version.h"

namespace signpost::cli {

std::string DescribeVersion() {
  std::vector<std::string> targets;
  for (const kernels::Target target : kernels::SupportedTargets()) {
    targets.push_back(kernels::TargetName(target));
  }
  return absl::StrCat("signpost ", kVersion, "\n",                                          //
                      "gRPC     ", grpc::Version(), "\n",                                   //
                      "kernels  ", kernels::TargetName(kernels::CurrentTarget()), " (of ",  //
                      absl::StrJoin(targets, ", "), ")\n", kernels::DescribeDevices());
}

Command AddVersionCommand(CLI::App& program) {
  CLI::App& app = *program.add_subcommand(
      "version", "Tell the versions of Signpost and gRPC, and the kernels' instruction set here");
  app.footer("Example:\n  signpost version");
  return {&app, [] {
            std::puts(DescribeVersion().c_str());
            return kExitOk;
          }};
}

}  // namespace signpost::cli
