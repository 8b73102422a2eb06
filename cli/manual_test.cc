#include "cli/manual.h"

#include "cli/flag.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// A program with one command that has all kinds of flags.
class ManualTest : public ::testing::Test {
 protected:
  ManualTest() {
    program_.add_flag("--quiet", quiet_, "Say nothing");
    train_.footer(
        "It takes a while, doesn't it:\n"
        "  a$ train --fast \\\n"
        "and then ends.");
    train_.add_option("DIR", text_, "Where to")->type_name("")->required();
    train_.add_option("-n,--workers", number_, "Ranks")->type_name("N")->capture_default_str();
    train_.add_option("--aggregators", text_, "Whom to ask")
        ->type_name("HOST:PORT")
        ->envname("SIGNPOST_AGGREGATORS");
    train_.add_option("--python", text_, "Interpreter")->envname("SIGNPOST_PYTHON");
    train_.add_option("--secret", text_, "For tests")->group("");
    program_.add_subcommand("stacks", "For tests")->group("");
  }

  CLI::App program_{"Trains models", "signpost"};
  CLI::App& train_ = *program_.add_subcommand("train", "Train one");
  int number_ = 4;
  bool quiet_ = false;
  std::string text_;
};

TEST_F(ManualTest, TellsFlagsWithTheirDefaultsAndVariables) {
  const std::string page = ManualOf(program_);
  EXPECT_THAT(page, HasSubstr("\n\\fB\\-n\\fR, \\fB\\-\\-workers\\fR \\fIN\\fR\n"
                              "Ranks (default: 4)\n"));
  EXPECT_THAT(page, HasSubstr("\nWhom to ask (environment: SIGNPOST_AGGREGATORS)\n"));
  EXPECT_THAT(page, HasSubstr("\\fBsignpost train\\fR \\fIDIR\\fR [\\fIFLAG\\fR ...]"));
}

TEST_F(ManualTest, SaysWhatStandsBehindTheFlagsAsTheHelpDoes) {
  SetUsageOfTail(train_, "-- COMMAND [ARG ...]");
  EXPECT_THAT(ManualOfCommand(train_),
              HasSubstr("[\\fIFLAG\\fR ...] \\-\\- COMMAND [ARG ...]\n.SH DESCRIPTION"));
  EXPECT_THAT(train_.help(), HasSubstr("Usage: train [OPTIONS] DIR -- COMMAND [ARG ...]\n"));
  EXPECT_EQ(UsageOfTail(program_), "");
}

TEST_F(ManualTest, HidesWhatIsHidden) {
  EXPECT_THAT(ManualOf(program_), Not(HasSubstr("secret")));
  EXPECT_THAT(ManualOf(program_), Not(HasSubstr("stacks")));
}

TEST_F(ManualTest, LeavesExamplesAsTheyAreAndEscapesWhatRoffWouldTakeForItself) {
  EXPECT_THAT(
      ManualOfCommand(train_),
      HasSubstr("It takes a while, doesn\\(aqt it:\n"
                ".PP\n.nf\n.RS 4\na$ train \\-\\-fast \\e\n.RE\n.fi\n.PP\nand then ends.\n"));
}

TEST_F(ManualTest, HasEachVariableOnce) {
  const std::string page = ManualOf(program_);
  EXPECT_THAT(page, HasSubstr("\n\\fBSIGNPOST_PYTHON\\fR\nAs \\fB\\-\\-python\\fR.\n"));
  EXPECT_THAT(page, Not(HasSubstr("As \\fB\\-\\-aggregators\\fR.\n")));
}

TEST_F(ManualTest, OfACommandHasItsExitCodesAndThePageThatItBelongsTo) {
  const std::string page = ManualOfCommand(train_);
  EXPECT_THAT(page, HasSubstr(".TH \"SIGNPOST-TRAIN\" 1"));
  EXPECT_THAT(page, HasSubstr("\n\\fB75\\fR\n"));
  EXPECT_THAT(page, HasSubstr("\\fBsignpost\\fR(1)"));
}

}  // namespace
}  // namespace signpost::cli
