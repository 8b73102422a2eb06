#include "deploy/render.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"

namespace signpost::deploy {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kCheckedIn[] = "deploy/kustomize";

std::string Refusal(const std::function<void(RenderOptions&)>& change) {
  RenderOptions options;
  change(options);
  const absl::StatusOr<Files> files = Render(options);
  EXPECT_TRUE(absl::IsInvalidArgument(files.status())) << files.status();
  return std::string(files.status().message());
}

std::string Workers(const RenderOptions& options) {
  const absl::StatusOr<Files> files = Render(options);
  EXPECT_TRUE(files.ok()) << files.status();
  return files->at("overlays/production/workers/workers.yaml");
}

TEST(Render, OfTheDefaultsIsWhatIsCheckedIn) {
  Files checked_in;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(kCheckedIn)) {
    if (!entry.is_regular_file()) continue;
    std::stringstream text;
    text << std::ifstream(entry.path()).rdbuf();
    checked_in[entry.path().lexically_relative(kCheckedIn)] = text.str();
  }
  const absl::StatusOr<Files> files = Render({});
  ASSERT_TRUE(files.ok()) << files.status();
  for (const auto& [path, text] : *files) {
    EXPECT_EQ(text, checked_in[path]) << path << ": signpost k8s render --output deploy/kustomize";
  }
  EXPECT_EQ(files->size(), checked_in.size());
}

TEST(Render, RefusesNamesThatKubernetesWould) {
  for (const char* name :
       {"", "Demo", "-demo", "demo-", "7b", "de_mo", "de mo", "a.b", "a\nb: c"}) {
    EXPECT_THAT(Refusal([&](RenderOptions& options) { options.job = name; }), HasSubstr("--job"));
    EXPECT_THAT(Refusal([&](RenderOptions& options) { options.name_space = name; }),
                HasSubstr("--namespace"));
  }
}

TEST(Render, RefusesAJobWhoseStatefulSetWouldHaveTooLongAName) {
  RenderOptions options;
  options.job = std::string(41, 'a');
  EXPECT_TRUE(Render(options).ok());
  EXPECT_THAT(Refusal([](RenderOptions& options) { options.job = std::string(42, 'a'); }),
              HasSubstr("at most 41"));
}

TEST(Render, RefusesWhatIsNoImageOrQuantity) {
  for (const char* image : {"a b", "a\"b", ":1", "a/", "a{b}"}) {
    EXPECT_THAT(Refusal([&](RenderOptions& options) { options.image = image; }),
                HasSubstr("--image"));
  }
  for (const char* quantity :
       {"", "4", "4GB", "-1Gi", "1.5Gi", "0Gi", "Gi", "99999999999Gi", "16777216Ti", "2048Ti"}) {
    EXPECT_THAT(Refusal([&](RenderOptions& options) { options.worker_memory = quantity; }),
                HasSubstr("--worker-memory"));
  }
  EXPECT_THAT(Refusal([](RenderOptions& options) { options.worker_cpus = "two"; }),
              HasSubstr("--worker-cpus"));
}

TEST(Render, RefusesAnImageForWorkersWithoutTheirProgram) {
  EXPECT_THAT(Refusal([](RenderOptions& options) { options.worker_image = "bert:1"; }),
              HasSubstr("' -- '"));
}

TEST(Render, RefusesSizesThatNoJobHas) {
  EXPECT_THAT(Refusal([](RenderOptions& options) { options.size.workers = 0; }),
              HasSubstr("0 workers"));
  EXPECT_THAT(Refusal([](RenderOptions& options) { options.size.parameters = 0; }),
              HasSubstr("0 parameters"));
  EXPECT_THAT(Refusal([](RenderOptions& options) { options.size.aggregators = 5; }),
              HasSubstr("fewer than the 5 aggregators"));
  EXPECT_THAT(Refusal([](RenderOptions& options) { options.min_workers = 5; }),
              HasSubstr("--min-workers"));
  EXPECT_THAT(Refusal([](RenderOptions& options) { options.gpus = 100'000; }), HasSubstr("--gpus"));
  for (const char* deadline : {"1m", "48h", "inf"}) {
    EXPECT_THAT(Refusal([&](RenderOptions& options) {
                  options.min_workers = 2;
                  options.round_deadline = deadline;
                }),
                HasSubstr("--round-deadline"));
  }
}

TEST(Render, AggregatorsTakeTheFramesOfSoManyWorkersAndChunks) {
  RenderOptions options;
  const char* const path = "overlays/production/aggregators/aggregators.yaml";
  EXPECT_THAT(Render(options)->at(path), HasSubstr("--max-frames=4194304"));
  options.size.workers = 1024;
  options.size.aggregators = 8;
  options.size.parameters = 10'000'000'000;
  EXPECT_THAT(Render(options)->at(path), HasSubstr("--max-frames=9748480"));
}

TEST(Render, AggregatorsTakeTheModelTwiceAndWhatElseIsReduced) {
  RenderOptions options;
  options.size.parameters = 1'000'000;
  const std::string text = Render(options)->at("overlays/production/aggregators/aggregators.yaml");
  const std::string flag = "--max-parameters=";
  const std::string value = text.substr(text.find(flag) + flag.size(), 20);
  uint64_t most = 0;
  ASSERT_TRUE(absl::SimpleAtoi(value.substr(0, value.find('\n')), &most)) << value;
  EXPECT_GT(most, 2'000'000 + 1000);
  EXPECT_LT(most, 2 * 2'000'000);
}

TEST(Render, AnArgumentOfTheTrainingProgramArrivesAsItIs) {
  RenderOptions options;
  options.worker_image = "bert:1";
  options.worker_command = {"sh", "-c", "echo \"{job}\" $(RANK) \\ \n"};
  EXPECT_THAT(Workers(options), HasSubstr(R"(            - "echo \"{job}\" $$(RANK) \\ \u000a")"));
}

TEST(Render, LateWorkersTakeMoreMemoryAndAreToldToWorkers) {
  RenderOptions options;
  const char* const path = "overlays/production/aggregators/aggregators.yaml";
  const std::string without = Render(options)->at(path);
  options.min_workers = 3;
  EXPECT_NE(Render(options)->at(path), without);
  EXPECT_THAT(Workers(options), HasSubstr("SIGNPOST_MIN_WORKERS\n              value: \"3\""));
}

TEST(Render, GpusAreALimit) {
  RenderOptions options;
  options.gpus = 8;
  EXPECT_THAT(Workers(options), HasSubstr("nvidia.com/gpu: 8"));
  EXPECT_THAT(Workers({}), Not(HasSubstr("gpu")));
}

TEST(DocumentsOf, RefusesAnUnknownOverlay) {
  EXPECT_THAT(DocumentsOf(*Render({}), "prod").status().message(), HasSubstr("production"));
}

}  // namespace
}  // namespace signpost::deploy
