// The page that an aggregator shows in a browser, status_page.html.

#ifndef SIGNPOST_SERVER_STATUS_PAGE_H_
#define SIGNPOST_SERVER_STATUS_PAGE_H_

#include "absl/strings/string_view.h"

namespace signpost {

absl::string_view StatusPage();

// Its Content-Security-Policy.
absl::string_view StatusPagePolicy();

}  // namespace signpost

#endif  // SIGNPOST_SERVER_STATUS_PAGE_H_
