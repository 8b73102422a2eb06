#include "doctor/report.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace signpost::doctor {
namespace {

using ::testing::HasSubstr;

TEST(Report, ShowsFindingsLastWithWhatMendsThem) {
  DoctorReport report;
  Reporter to("host", report);
  to.Warn("proxy", "set", "unset http_proxy");
  EXPECT_FALSE(HasFault(report));
  to.Fault("mtu", "lost", "ip link");
  to.Fine("disk", "fast");
  to.Unchecked("reach", "later");
  EXPECT_TRUE(HasFault(report));
  EXPECT_EQ(FormatText(report),
            "ok       disk   host  fast\n"
            "unknown  reach  host  later\n"
            "WARNING  proxy  host  set\n"
            "         mend: unset http_proxy\n"
            "FAULT    mtu    host  lost\n"
            "         mend: ip link\n"
            "4 checks: 1 fault, 1 warning\n");
  EXPECT_THAT(FormatJson(report), HasSubstr("\"verdict\": \"FAULT\""));
}

TEST(Report, HasNothingThatStirsATerminal) {
  DoctorReport report;
  Reporter("other\x1b[2J", report).Fine("disk", "a\nFAULT b\x7f");
  EXPECT_EQ(FormatText(report),
            "ok       disk  other [2J  a FAULT b \n1 check: 0 faults, 0 warnings\n");
}

}  // namespace
}  // namespace signpost::doctor
