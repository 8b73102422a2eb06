#include "cli/checkpoint_command.h"

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"

namespace signpost::cli {
namespace {

CheckpointEntry Entry(const std::string& name, const std::string& text) {
  CheckpointManifest manifest;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &manifest)) << text;
  return {name, manifest};
}

TEST(Checkpoints, HaveALineEachAndTheirDetails) {
  EXPECT_EQ(FormatCheckpoints(
                {Entry("step-2", R"pb(
                   step: 2
                   job: "bert"
                   world_size: 1
                   options {
                     block_elements: 8
                     chunk_elements: 16
                     gamma: 1.35
                     optimizer: "1-bit adam beta1=0.9"
                     parameters_crc32c: 0xabc
                   }
                   tensors {
                     name: "w"
                     shape: [ 3, 4 ]
                   }
                   tensors { name: "b" }
                   files { name: "parameters" bytes: 1500 crc32c: 0x12 }
                   files { name: "rank-0" bytes: 500 crc32c: 0x34 }
                   committed_us: 1000000
                 )pb"),
                 Entry("step-1", R"pb(step: 1 job: "bert" world_size: 1)pb"),
                 {"step-0", absl::DataLossError("checkpoint step-0: manifest is damaged: why")}}),
            "CHECKPOINT  STEP  JOB   WORKERS  PARAMETERS  FILES  SIZE    COMMITTED\n"
            "step-2      2     bert  1        13          3      2.0 kB  1970-01-01 00:00:01 UTC  "
            "(newest)\n"
            "step-1      1     bert  1        0           1      0 B     1970-01-01 00:00:00 UTC\n"
            "\n"
            "step-2\n"
            "  optimizer  1-bit adam beta1=0.9\n"
            "  layout     2 tensors, blocks of 8, chunks of 16, gamma 1.35\n"
            "  values     CRC-32C 00000abc\n"
            "  parameters 1.5 kB, CRC-32C 00000012\n"
            "  rank-0     500 B, CRC-32C 00000034\n"
            "\n"
            "step-1\n"
            "  optimizer  \n"
            "  layout     0 tensors, blocks of 0, chunks of 0, gamma 0\n"
            "  values     CRC-32C 00000000\n"
            "\n"
            "checkpoint step-0: manifest is damaged: why\n");
}

}  // namespace
}  // namespace signpost::cli
