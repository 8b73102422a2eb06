// `signpost cert`: an authority of one's own, and certificates.

#ifndef SIGNPOST_CLI_CERT_COMMAND_H_
#define SIGNPOST_CLI_CERT_COMMAND_H_

#include "cli/command.h"

namespace signpost::cli {

Command AddCertCommand(CLI::App& program);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_CERT_COMMAND_H_
