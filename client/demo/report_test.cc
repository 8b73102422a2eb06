#include "client/demo/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "client/demo/file.h"

namespace signpost::demo {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// One worker; 1000 parameters, 100 steps; 400000 bytes each way are fp32's.
Comparison MakeComparison() {
  const WorkerResult adam = {.world_size = 1,
                             .parameters = 1000,
                             .steps = 100,
                             .seconds = 12.25,
                             .parameters_crc32c = 0xabc,
                             .wire = {.sent = 400000, .received = 400000},
                             .validation = 2,
                             .curve = {{50, 4, 3}, {100, 2.5, 2}}};
  const WorkerResult onebit = {.world_size = 1,
                               .parameters = 1000,
                               .steps = 100,
                               .one_bit_steps = 80,
                               .seconds = 6.25,
                               .parameters_crc32c = 0xdef,
                               .wire = {.sent = 100000, .received = 60000},
                               .one_bit_wire = {.sent = 12500, .received = 10000},
                               .validation = 2.02,
                               .curve = {{50, 4.125, 3.125}, {100, 2.625, 2.02}}};
  return {{adam}, {onebit}};
}

TEST(Report, ShowsBothRunsInATable) {
  EXPECT_EQ(FormatTable(MakeComparison()),
            R"(1000 parameters, 1 workers; 1-bit Adam sends one bit in 80 of 100 steps

                                                Adam        1-bit Adam
sent per worker, whole run                    0.4 MB            0.1 MB
received per worker, whole run                0.4 MB            0.1 MB
fewer bytes than fp32                           1.0x              5.0x
  in one-bit steps                                               28.4x
bits per parameter, up / down        32.000 / 32.000     8.000 / 4.800
  in one-bit steps                                       1.250 / 1.000
training loss, bits per byte                  2.5000            2.6250
validation loss, bits per byte                2.0000            2.0200
  against Adam                                                  +1.00%
steps                                            100               100
time                                            12 s               6 s
replicas identical, CRC-32C            yes, 00000abc     yes, 00000def
)");
}

TEST(Report, SaysWhenReplicasDiffer) {
  Comparison comparison = MakeComparison();
  comparison.onebit.push_back(comparison.onebit[0]);
  comparison.onebit[1].parameters_crc32c = 0xabc;
  EXPECT_THAT(FormatTable(comparison), HasSubstr("yes, 00000abc                NO\n"));
  EXPECT_THAT(FormatJson(comparison), HasSubstr("\"replicas_identical\": false"));
}

TEST(Report, SaysWhatToDoWhenOneBitAdamHasDiverged) {
  Comparison comparison = MakeComparison();
  comparison.onebit[0].validation = std::numeric_limits<double>::quiet_NaN();
  const std::string table = FormatTable(comparison);
  EXPECT_THAT(table, HasSubstr("          diverged\n  against Adam"));
  EXPECT_THAT(table, HasSubstr("1-bit Adam has diverged"));
  EXPECT_THAT(table, Not(HasSubstr("nan")));
}

TEST(Report, HasThePointsOfBothCurvesAsCsv) {
  EXPECT_EQ(FormatCsv(MakeComparison()), R"(optimizer,step,training_bpb,validation_bpb
adam,50,4.000000,3.000000
adam,100,2.500000,2.000000
onebit,50,4.125000,3.125000
onebit,100,2.625000,2.020000
)");
}

TEST(Report, HasTheFiguresAsJson) {
  EXPECT_EQ(FormatJson(MakeComparison()), R"({
  "val_bpb_adam": 2,
  "val_bpb_onebit": 2.02,
  "wire_bits_per_param_up": 1.25,
  "wire_bits_per_param_down": 1,
  "bytes_ratio_vs_fp32": 5,
  "bytes_ratio_vs_fp32_one_bit_rounds": 28.444444,
  "replicas_identical": true,
  "parameters": 1000,
  "steps": 100,
  "seconds": 18.5
}
)");
}

TEST(Report, HasNullInJsonForALossThatIsNotFinite) {
  Comparison comparison = MakeComparison();
  comparison.onebit[0].validation = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(FormatJson(comparison), HasSubstr("\"val_bpb_onebit\": null"));
}

TEST(Report, IsMadeOfResultFiles) {
  const Comparison comparison = MakeComparison();
  const std::string directory = testing::TempDir();
  const RunFiles runs = {{directory + "/adam"}, {directory + "/onebit"}};
  const ReportFiles files = {.svg = directory + "/chart.svg",
                             .csv = directory + "/curves.csv",
                             .json = directory + "/figures.json"};
  ASSERT_TRUE(WriteResult(comparison.adam[0], runs.adam[0]).ok());
  ASSERT_TRUE(WriteResult(comparison.onebit[0], runs.onebit[0]).ok());
  EXPECT_EQ(Report(runs, files).value(), FormatTable(comparison));
  EXPECT_THAT(ReadFile(files.svg).value(), HasSubstr("</svg>"));
  EXPECT_EQ(ReadFile(files.csv).value(), FormatCsv(comparison));
  EXPECT_EQ(ReadFile(files.json).value(), FormatJson(comparison));
}

TEST(Report, WritesOnlyTheFilesThatAreWanted) {
  const Comparison comparison = MakeComparison();
  const RunFiles runs = {{testing::TempDir() + "/adam"}, {testing::TempDir() + "/onebit"}};
  ASSERT_TRUE(WriteResult(comparison.adam[0], runs.adam[0]).ok());
  ASSERT_TRUE(WriteResult(comparison.onebit[0], runs.onebit[0]).ok());
  EXPECT_TRUE(Report(runs, {}).ok());
  EXPECT_THAT(Report(runs, {.csv = "/nowhere/at.all"}).status().message(),
              HasSubstr("'/nowhere/at.all'"));
}

TEST(Report, NamesAResultThatIsMissing) {
  EXPECT_THAT(Report({{"/nowhere/at.all"}, {}}, {}).status().message(),
              HasSubstr("'/nowhere/at.all'"));
}

}  // namespace
}  // namespace signpost::demo
