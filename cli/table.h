// Figures as people read them.

#ifndef SIGNPOST_CLI_TABLE_H_
#define SIGNPOST_CLI_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace signpost::cli {

// "999 B", "1.5 MB".
std::string FormatBytes(uint64_t bytes);

// A line per row, its columns aligned. The rows, at least one, are equally long.
std::string Align(const std::vector<std::vector<std::string>>& rows);

}  // namespace signpost::cli

#endif  // SIGNPOST_CLI_TABLE_H_
