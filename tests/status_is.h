// What a test expects of an error: its code and its message.

#ifndef SIGNPOST_TESTS_STATUS_IS_H_
#define SIGNPOST_TESTS_STATUS_IS_H_

#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"

namespace signpost::testing {

inline std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

// As the matcher of that name in newer releases of Abseil.
inline auto StatusIs(absl::StatusCode code, const ::testing::Matcher<std::string>& message) {
  return ::testing::AllOf(::testing::Property("code", &absl::Status::code, code),
                          ::testing::ResultOf(MessageOf, message));
}

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_STATUS_IS_H_
