// signpost codec: tries codecs from outside (proto/signpost_codec.h).

#ifndef SIGNPOST_CLI_CODEC_COMMAND_H_
#define SIGNPOST_CLI_CODEC_COMMAND_H_

#include "cli/command.h"

namespace signpost::cli {

Command AddCodecCommand(CLI::App& program);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_CODEC_COMMAND_H_
