#include "cli/completion.h"

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class CompleteTest : public ::testing::Test {
 protected:
  CompleteTest() {
    CLI::App& run = *program_.add_subcommand("run", "Run a job");
    run.add_option("-n,--workers", text_, "Ranks");
    run.add_option("--codec", text_, "")->type_name("onebit|int8|cuda[:N]");
    run.add_option("--faults", text_, "")->type_name("kill|stop|stall,...");
    run.add_option("--state-dir", text_, "")->type_name("DIR");
    run.add_option("--text", texts_, "")->type_name("FILE");
    CLI::App& cert = *program_.add_subcommand("cert", "");
    cert.add_subcommand("init", "Make one")->add_option("directory", text_)->type_name("DIR");
    cert.add_subcommand("issue", "");
    program_.add_subcommand("man", "")->add_option("command", text_)->type_name("COMMAND");
    program_.add_subcommand("stacks", "")->group("");
  }

  std::vector<std::string> Words(const std::vector<std::string>& typed) {
    const Completion completion = Complete(program_, typed);
    EXPECT_EQ(completion.kind, Completion::Kind::kWords);
    std::vector<std::string> words;
    for (const Candidate& candidate : completion.candidates) words.push_back(candidate.word);
    return words;
  }

  Completion::Kind Kind(const std::vector<std::string>& typed) {
    return Complete(program_, typed).kind;
  }

  CLI::App program_{"", "signpost"};
  std::string text_;
  std::vector<std::string> texts_;
};

TEST_F(CompleteTest, OffersCommandsButNoneThatIsHidden) {
  EXPECT_THAT(Words({""}), ElementsAre("run", "cert", "man"));
  EXPECT_THAT(Words({"s"}), IsEmpty());
  EXPECT_THAT(Words({"cert", "i"}), ElementsAre("init", "issue"));
}

TEST_F(CompleteTest, OffersFlagsThatAreNotThereYet) {
  EXPECT_THAT(Words({"run", "--s"}), ElementsAre("--state-dir"));
  EXPECT_THAT(Words({"run", "-n", "2", "--w"}), IsEmpty());
  EXPECT_THAT(Words({"run", "--workers=2", "--c"}), ElementsAre("--codec"));
  EXPECT_THAT(Words({"run", "--text", "a", "--t"}), ElementsAre("--text"));
}

TEST_F(CompleteTest, OffersAFlagsValuesBehindItAndInTheSameWord) {
  EXPECT_THAT(Words({"run", "--codec", ""}), ElementsAre("onebit", "int8", "cuda"));
  EXPECT_THAT(Words({"run", "--codec=i"}), ElementsAre("--codec=int8"));
}

TEST_F(CompleteTest, OffersTheRestOfAList) {
  EXPECT_THAT(Words({"run", "--faults", "kill,st"}), ElementsAre("kill,stop", "kill,stall"));
  EXPECT_THAT(Words({"run", "--faults=stop,"}),
              ElementsAre("--faults=stop,kill", "--faults=stop,stall"));
}

TEST_F(CompleteTest, OffersNothingForAValueThatNobodyKnows) {
  EXPECT_THAT(Words({"run", "-n", ""}), IsEmpty());
}

TEST_F(CompleteTest, OffersFilesAndDirectories) {
  EXPECT_EQ(Kind({"run", "--state-dir", ""}), Completion::Kind::kDirectories);
  EXPECT_EQ(Kind({"run", "--state-dir=/t"}), Completion::Kind::kDirectories);
  EXPECT_EQ(Kind({"run", "--text", "a", ""}), Completion::Kind::kFiles);
  EXPECT_EQ(Kind({"cert", "init", ""}), Completion::Kind::kDirectories);
}

TEST_F(CompleteTest, OffersNoDirectoryBehindTheOneThatIsWanted) {
  EXPECT_THAT(Words({"cert", "init", "d", ""}), ElementsAre("--help"));
}

TEST_F(CompleteTest, OffersCommandsWhereOneIsTheArgument) {
  EXPECT_THAT(Words({"man", "c"}), ElementsAre("cert"));
}

TEST_F(CompleteTest, LeavesWhatStandsBehindTwoDashesToItsOwner) {
  EXPECT_EQ(Kind({"run", "--", ""}), Completion::Kind::kCommand);
  EXPECT_EQ(Kind({"run", "--", "python3", "--co"}), Completion::Kind::kCommand);
  EXPECT_EQ(Kind({"run", "--"}), Completion::Kind::kWords);
}

TEST(FormatCompletion, HasTheKindAndACandidateOnEachLine) {
  EXPECT_EQ(FormatCompletion({Completion::Kind::kWords, {{"run", "Run a job"}, {"cert", ""}}}),
            "words\nrun\tRun a job\ncert\t\n");
  EXPECT_EQ(FormatCompletion({Completion::Kind::kFiles, {}}), "files\n");
}

TEST(CompletionScript, IsOfThreeShellsAndNoOther) {
  for (const char* shell : {"bash", "zsh", "fish"}) {
    EXPECT_TRUE(CompletionScript(shell).ok()) << shell;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(CompletionScript("csh").status()));
}

}  // namespace
}  // namespace signpost::cli
