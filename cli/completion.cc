#include "cli/completion.h"

#include <algorithm>
#include <optional>
#include <set>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cli/flag.h"

namespace signpost::cli {
namespace {

constexpr char kBash[] = R"(# What signpost offers in bash: source this file.
_signpost() {
  local words=() word typed joins= kind candidate help
  # Bash splits words at = and : too.
  for word in "${COMP_WORDS[@]:1:COMP_CWORD}"; do
    if [[ ${#words[@]} -gt 0 && ( $joins || $word =~ ^[=:]+$ ) ]]; then
      words[-1]+=$word
    else
      words+=("$word")
    fi
    joins=
    if [[ $word =~ ^[=:]+$ ]]; then joins=1; fi
  done
  typed=${COMP_WORDS[COMP_CWORD]}
  if [[ $typed =~ ^[=:]+$ ]]; then typed=; fi
  COMPREPLY=()
  {
    read -r kind
    while IFS=$'\t' read -r candidate help; do
      COMPREPLY+=("${candidate#"${words[-1]%"$typed"}"}")
    done
  } < <("${1/#\~/$HOME}" complete -- "${words[@]}" 2>/dev/null)
  case $kind in
    files) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$typed") ;;
    directories) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$typed") ;;
    command)
      local first=1
      while [[ ${COMP_WORDS[first - 1]} != -- ]]; do first=$((first + 1)); done
      if declare -F _command_offset >/dev/null; then
        _command_offset $first
      elif ((COMP_CWORD == first)); then
        mapfile -t COMPREPLY < <(compgen -c -- "$typed")
      else
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -f -- "$typed")
      fi
      ;;
  esac
}
complete -F _signpost signpost
)";

constexpr char kZsh[] = R"(#compdef signpost
# What signpost offers in zsh: source this file, or have it in $fpath as _signpost.
_signpost() {
  local line
  local -a answer candidates
  answer=("${(@f)$("${words[1]/#\~/$HOME}" complete -- \
    "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)}")
  case $answer[1] in
    words)
      for line in "${(@)answer[2,-1]}"; do
        candidates+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
      done
      _describe -V signpost candidates
      ;;
    files) compset -P '--*='; _files ;;
    directories) compset -P '--*='; _files -/ ;;
    command)
      local first=${words[(i)--]}
      shift $first words
      ((CURRENT -= first))
      _normal
      ;;
  esac
}
if [[ ${funcstack[1]} == _signpost ]]; then
  _signpost "$@"
else
  compdef _signpost signpost
fi
)";

constexpr char kFish[] = R"(# What signpost offers in fish.
function __signpost_complete
    set -l words (commandline -opc)
    set -l typed (commandline -ct)
    set -l program $words[1]
    set -l first (contains -i -- -- $words)
    set -e words[1]
    set -l answer ($program complete -- $words "$typed" 2>/dev/null)
    set -l before (string match -r -- '^--[^=]*=' "$typed")
    set -l path (string replace -- "$before" '' "$typed")
    set -l tail $words[$first..]
    switch "$answer[1]"
        case words
            printf '%s\n' $answer[2..]
        case files
            printf '%s\n' "$before"(__fish_complete_path "$path")
        case directories
            printf '%s\n' "$before"(__fish_complete_directories "$path")
        case command
            complete -C (string join ' ' -- (string escape -- $tail) "$typed")
    end
end
complete -c signpost -f -a '(__signpost_complete)'
)";

constexpr absl::string_view kKindNames[] = {"words", "files", "directories", "command"};

// Where the words lead: to a command, and in it to a flag that wants a value, or to the argument
// that is next.
struct Position {
  const CLI::App* command;
  std::optional<Flag> waits;   // for a value
  size_t arguments = 0;        // that are there
  std::set<std::string> used;  // flags
};

bool IsFlag(const std::string& word) { return word.size() > 1 && word[0] == '-'; }

std::optional<Flag> Find(const CLI::App& command, const std::string& name) {
  for (const Flag& flag : FlagsOf(command)) {
    if (absl::c_linear_search(flag.names, name)) return flag;
  }
  return std::nullopt;
}

const CLI::App* FindCommand(const CLI::App& command, const std::string& name) {
  const auto found = command.get_subcommands(
      [&name](const CLI::App* subcommand) { return subcommand->get_name() == name; });
  return found.empty() ? nullptr : found.front();
}

void PassFlag(const std::string& word, Position& at) {
  const std::string name = word.substr(0, word.find('='));
  const std::optional<Flag> flag = Find(*at.command, name);
  if (!flag) return;
  if (!flag->is_repeated) at.used.insert(flag->names.begin(), flag->names.end());
  if (name == word && !flag->value.empty()) at.waits = flag;
}

void Pass(const std::string& word, Position& at) {
  if (at.waits && !IsFlag(word)) {
    if (!at.waits->is_repeated) at.waits.reset();
    return;
  }
  at.waits.reset();
  if (IsFlag(word)) return PassFlag(word, at);
  if (const CLI::App* const command = FindCommand(*at.command, word)) {
    at = {.command = command};
  } else {
    ++at.arguments;
  }
}

void Offer(const std::string& word, const std::string& help, const std::string& typed,
           Completion& to) {
  if (absl::StartsWith(word, typed)) to.candidates.push_back({word, help});
}

void OfferCommands(const CLI::App& command, const std::string& typed, Completion& to) {
  for (const CLI::App* subcommand : CommandsOf(command)) {
    Offer(subcommand->get_name(), subcommand->get_description(), typed, to);
  }
}

void OfferFlags(const Position& at, const std::string& typed, Completion& to) {
  for (const Flag& flag : FlagsOf(*at.command)) {
    if (at.used.count(flag.names.front()) == 0) Offer(flag.names.back(), flag.help, typed, to);
  }
}

// `before` is what stands in front of the value in its word: "--codec=", or "".
Completion ValuesOf(const Flag& flag, const CLI::App& program, const std::string& before,
                    const std::string& typed) {
  if (flag.value == "FILE" || flag.value == "PROGRAM") return {Completion::Kind::kFiles, {}};
  if (flag.value == "DIR") return {Completion::Kind::kDirectories, {}};
  Completion completion;
  if (flag.value == "COMMAND") OfferCommands(program, before + typed, completion);
  const size_t comma = flag.is_list ? typed.rfind(',') : std::string::npos;
  const std::string listed = comma == std::string::npos ? "" : typed.substr(0, comma + 1);
  const std::vector<std::string> chosen = absl::StrSplit(listed, ',');
  for (const std::string& choice : ChoicesOf(flag)) {
    if (absl::c_linear_search(chosen, choice)) continue;
    Offer(absl::StrCat(before, listed, choice), "", before + typed, completion);
  }
  return completion;
}

}  // namespace

Completion Complete(const CLI::App& program, const std::vector<std::string>& words) {
  if (words.empty()) return Complete(program, {""});
  const std::vector<std::string> before(words.begin(), words.end() - 1);
  if (absl::c_linear_search(before, "--")) return {Completion::Kind::kCommand, {}};
  Position at = {.command = &program};
  for (const std::string& word : before) Pass(word, at);

  const std::string& typed = words.back();
  const size_t equals = IsFlag(typed) ? typed.find('=') : std::string::npos;
  if (equals != std::string::npos) {
    const std::optional<Flag> flag = Find(*at.command, typed.substr(0, equals));
    if (!flag) return {};
    return ValuesOf(*flag, program, typed.substr(0, equals + 1), typed.substr(equals + 1));
  }
  if (at.waits && !IsFlag(typed)) return ValuesOf(*at.waits, program, "", typed);

  Completion completion;
  const std::vector<Flag> arguments = ArgumentsOf(*at.command);
  if (IsFlag(typed) || typed == "-") {
    OfferFlags(at, typed, completion);
  } else if (at.arguments < arguments.size()) {
    return ValuesOf(arguments[at.arguments], program, "", typed);
  } else if (!CommandsOf(*at.command).empty()) {
    OfferCommands(*at.command, typed, completion);
  } else {
    OfferFlags(at, typed, completion);
  }
  return completion;
}

std::string FormatCompletion(const Completion& completion) {
  std::string lines = absl::StrCat(kKindNames[static_cast<size_t>(completion.kind)], "\n");
  for (const Candidate& candidate : completion.candidates) {
    absl::StrAppend(&lines, candidate.word, "\t", candidate.help, "\n");
  }
  return lines;
}

absl::StatusOr<std::string> CompletionScript(absl::string_view shell) {
  if (shell == "bash") return kBash;
  if (shell == "zsh") return kZsh;
  if (shell == "fish") return kFish;
  return absl::InvalidArgumentError(
      absl::StrCat("no completion for '", shell, "', wanted bash, zsh or fish"));
}

}  // namespace signpost::cli
