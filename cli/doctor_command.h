// `signpost doctor`: what would stop a job, or slow it down, before it runs.

#ifndef SIGNPOST_CLI_DOCTOR_COMMAND_H_
#define SIGNPOST_CLI_DOCTOR_COMMAND_H_

#include "cli/command.h"

namespace signpost::cli {

Command AddDoctorCommand(CLI::App& program);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_DOCTOR_COMMAND_H_
