#!/usr/bin/env bash
# embed_page.sh PAGE: the C++ that has the page in it, with a policy by which a browser runs its one
# script and style, as they are, and nothing else.
set -euo pipefail

# The hash of what is between the lines <$1> and </$1>, as a policy has it.
hash_of() {
  { echo; sed -n "/^<$1>\$/,/^<\\/$1>\$/p" "$page" | sed '1d;$d'; } |
    sha256sum | cut -d' ' -f1 | tr a-f A-F | basenc --base16 -d | base64 -w0
}

page=$1
cat <<END
#include "server/status_page.h"

namespace signpost {

absl::string_view StatusPage() {
  return R"page($(cat "$page"))page";
}

absl::string_view StatusPagePolicy() {
  return "default-src 'none'; script-src 'sha256-$(hash_of script)'; "
         "style-src 'sha256-$(hash_of style)'; connect-src 'self'; img-src data:; base-uri 'none'; "
         "form-action 'none'; frame-ancestors 'none'";
}

}  // namespace signpost
END
