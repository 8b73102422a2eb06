#include "cli/manual.h"

#include <map>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cli/flag.h"
#include "proto/exit_code.h"
#include "proto/version.h"

namespace signpost::cli {
namespace {

struct Entry {
  absl::string_view name;
  absl::string_view text;
};

// Those that are no flag's: what a rank reads, and what is for tests.
constexpr Entry kVariables[] = {
    {"SIGNPOST_AGGREGATORS", "HOST:PORT of each shard, in shard order, separated by commas."},
    {"SIGNPOST_JOB", "The job that a rank joins."},
    {"SIGNPOST_RANK", "Which rank it is, from 0 on."},
    {"SIGNPOST_WORLD_SIZE", "How many ranks there are."},
    {"SIGNPOST_NODE", "unix:PATH of the `signpost worker` that a rank attaches to."},
    {"SIGNPOST_TLS_DIR", "The TLS directory, as `--tls-dir`."},
    {"SIGNPOST_INSECURE_I_UNDERSTAND", "1: plain text beyond this machine."},
    {"SIGNPOST_TOKEN_FILE", "A Kubernetes service account's token, as `--token-file`."},
    {"SIGNPOST_FAILURE_TIMEOUT",
     "How long an aggregator may be without sign of life before a rank connects to it anew."},
    {"SIGNPOST_JOIN_TIMEOUT", "How long a rank waits for the others to join."},
    {"SIGNPOST_EXCHANGE_TIMEOUT",
     "How long a step goes on without an answer, and a checkpoint waits for a rank."},
    {"SIGNPOST_CONNECTIONS",
     "TCP connections to each aggregator, for links that one does not fill."},
    {"SIGNPOST_MIN_WORKERS", "Rounds close with so many workers if others are late."},
    {"SIGNPOST_ROUND_DEADLINE", "With SIGNPOST_MIN_WORKERS: how long late workers are waited for."},
    {"SIGNPOST_THREADS", "Threads that compress and apply in each worker."},
    {"SIGNPOST_CODEC_LIBRARIES",
     "Codecs from outside that an aggregator has, separated by colons, as `--codec-library`."},
    {"SIGNPOST_PYTHON_CODECS",
     "Classes, as module:Class with commas in between, that an aggregator or the worker of a node "
     "may run as codecs in Python; SIGNPOST_PYTHON is the interpreter that runs them, python3 "
     "unless it is set."},
    {"SIGNPOST_SHARED_DIRECTORIES",
     "1: state and checkpoint directories that other users may write to are taken all the same."},
    {"SIGNPOST_FAILPOINT", "For tests: where a process dies, stops or dawdles."},
    {"GRPC_VERBOSITY", "Whether gRPC tells what it does: debug, info or error."},
};

constexpr Entry kFiles[] = {
    {"TLS-DIR/{ca.crt,tls.crt,tls.key}",
     "Who a process is, and whom it trusts. They may be replaced at any time."},
    {"STATE-DIR/",
     "What an aggregator needs to go on after a crash; it belongs to one shard, and is locked."},
    {"CHECKPOINTS/",
     "What a job needs to go on after its end: the newest two that are whole. `signpost "
     "checkpoint` "
     "tells what is in there."},
    {"signpost-demo/", "Loss curves of `signpost demo`."},
};

// Text as roff shows it; what stands in backticks is bold.
std::string Escape(absl::string_view text) {
  std::string escaped;
  bool is_bold = false;
  for (const char letter : text) {
    switch (letter) {
      case '`':
        is_bold = !is_bold;
        absl::StrAppend(&escaped, is_bold ? "\\fB" : "\\fR");
        break;
      case '\\':
        absl::StrAppend(&escaped, "\\e");
        break;
      case '-':
        absl::StrAppend(&escaped, "\\-");
        break;
      case '\'':
        absl::StrAppend(&escaped, "\\(aq");
        break;
      case '^':
        absl::StrAppend(&escaped, "\\(ha");
        break;
      case '~':
        absl::StrAppend(&escaped, "\\(ti");
        break;
      default:
        escaped.push_back(letter);
    }
  }
  // A line that begins with a dot would be a request.
  return absl::StartsWith(escaped, ".") ? absl::StrCat("\\&", escaped) : escaped;
}

// What a command is for, as a sentence.
std::string Sentence(const CLI::App& command) {
  const std::string text = command.get_description();
  return Escape(absl::EndsWith(text, ".") ? text : absl::StrCat(text, "."));
}

std::string Bold(absl::string_view text) { return absl::StrCat("\\fB", Escape(text), "\\fR"); }
std::string Italic(absl::string_view text) { return absl::StrCat("\\fI", Escape(text), "\\fR"); }

void AddEntry(std::string& page, absl::string_view head, absl::string_view text) {
  absl::StrAppend(&page, ".TP\n", head, "\n", text, "\n");
}

// A footer: lines that are indented stay as they are, others are filled.
void AddText(std::string& page, absl::string_view text) {
  bool is_example = false;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    const bool is_indented = absl::StartsWith(line, "  ");
    if (is_indented != is_example) {
      absl::StrAppend(&page, is_indented ? ".PP\n.nf\n.RS 4\n" : ".RE\n.fi\n.PP\n");
      is_example = is_indented;
    }
    if (line.empty()) {
      if (!absl::EndsWith(page, ".PP\n")) absl::StrAppend(&page, ".PP\n");
    } else {
      absl::StrAppend(&page, Escape(is_indented ? line.substr(2) : line), "\n");
    }
  }
  if (is_example) absl::StrAppend(&page, ".RE\n.fi\n");
}

// "\fB-n\fR, \fB--workers\fR \fIN\fR"
std::string HeadOf(const Flag& flag) {
  const std::string value =
      flag.value.empty() ? "" : Italic(absl::StrCat(flag.value, flag.is_repeated ? " ..." : ""));
  if (flag.names.empty()) return value;
  std::vector<std::string> names;
  for (const std::string& name : flag.names) names.push_back(Bold(name));
  return absl::StrCat(absl::StrJoin(names, ", "), value.empty() ? "" : " ", value);
}

std::string TextOf(const Flag& flag) {
  std::vector<std::string> notes;
  if (flag.is_required) notes.push_back("required");
  if (!flag.default_value.empty()) notes.push_back(absl::StrCat("default: ", flag.default_value));
  if (!flag.variable.empty()) notes.push_back(absl::StrCat("environment: ", flag.variable));
  std::string text = flag.help;
  if (!notes.empty()) {
    absl::StrAppend(&text, text.empty() ? "" : " ", "(", absl::StrJoin(notes, "; "), ")");
  }
  return Escape(text);
}

// Every command has --help.
bool IsHelp(const Flag& flag) { return absl::c_linear_search(flag.names, "--help"); }

void AddFlags(std::string& page, const CLI::App& command) {
  for (const Flag& argument : ArgumentsOf(command)) {
    AddEntry(page, HeadOf(argument), TextOf(argument));
  }
  for (const Flag& flag : FlagsOf(command)) {
    if (!IsHelp(flag)) AddEntry(page, HeadOf(flag), TextOf(flag));
  }
}

std::string SynopsisOf(const CLI::App& command) {
  std::string synopsis = Bold(FullNameOf(command));
  if (!CommandsOf(command).empty()) absl::StrAppend(&synopsis, " ", Italic("COMMAND"));
  for (const Flag& argument : ArgumentsOf(command)) {
    absl::StrAppend(&synopsis, " ",
                    argument.is_required ? Italic(argument.value)
                                         : absl::StrCat("[", Italic(argument.value), "]"));
  }
  for (const Flag& flag : FlagsOf(command)) {
    if (flag.is_required) absl::StrAppend(&synopsis, " ", HeadOf(flag));
  }
  absl::StrAppend(&synopsis, " [", Italic("FLAG"), " ...]");
  const std::string tail = UsageOfTail(command);
  if (!tail.empty()) absl::StrAppend(&synopsis, " ", Escape(tail));
  return synopsis;
}

// What one command is and takes, and those below it.
void AddCommand(std::string& page, const CLI::App& command) {
  absl::StrAppend(&page, SynopsisOf(command), "\n.PP\n", Sentence(command), "\n");
  AddFlags(page, command);
  // Commands have their parent's footer unless they have one of their own.
  const CLI::App& parent = *command.get_parent();
  if (!command.get_footer().empty() && command.get_footer() != parent.get_footer()) {
    absl::StrAppend(&page, ".PP\n");
    AddText(page, command.get_footer());
  }
}

void AddCommandWithItsOwn(std::string& page, const CLI::App& command) {
  absl::StrAppend(&page, ".SS \"", Escape(FullNameOf(command)), "\"\n");
  AddCommand(page, command);
  for (const CLI::App* subcommand : CommandsOf(command)) AddCommandWithItsOwn(page, *subcommand);
}

void AddTitle(std::string& page, const std::string& name, const std::string& description) {
  absl::StrAppend(&page, ".TH \"", absl::AsciiStrToUpper(name), "\" 1 \"\" \"Signpost ", kVersion,
                  "\" \"Signpost\"\n", ".SH NAME\n", Escape(name), " \\- ", Escape(description),
                  "\n");
}

void AddEntries(std::string& page, absl::string_view heading, absl::Span<const Entry> entries) {
  absl::StrAppend(&page, ".SH ", heading, "\n");
  for (const Entry& entry : entries) AddEntry(page, Bold(entry.name), Escape(entry.text));
}

void AddExitCodes(std::string& page) {
  absl::StrAppend(&page, ".SH EXIT STATUS\n");
  for (const ExitCodeMeaning& code : AllExitCodes()) {
    AddEntry(page, Bold(absl::StrCat(code.code)), Escape(code.meaning));
  }
  absl::StrAppend(&page, ".PP\n",
                  Escape("Of `signpost run` and `signpost chaos` it is that of the first rank that "
                         "failed. 128 and a signal's number: that signal ended the process."),
                  "\n");
}

// Variables by name, with the flags that they stand for.
void AddFlagVariables(const CLI::App& command, std::map<std::string, std::string>& flags) {
  for (const Flag& flag : FlagsOf(command)) {
    if (flag.variable.empty() || flag.names.empty()) continue;
    flags.emplace(flag.variable, absl::StrCat("As `", flag.names.back(), "`."));
  }
  for (const CLI::App* subcommand : CommandsOf(command)) AddFlagVariables(*subcommand, flags);
}

void AddVariables(std::string& page, const CLI::App& program) {
  AddEntries(page, "ENVIRONMENT", kVariables);
  std::map<std::string, std::string> of_flags;
  AddFlagVariables(program, of_flags);
  for (const Entry& variable : kVariables) of_flags.erase(std::string(variable.name));
  for (const auto& [name, text] : of_flags) AddEntry(page, Bold(name), Escape(text));
}

void AddExamples(std::string& page) {
  absl::StrAppend(&page, ".SH EXAMPLES\n");
  AddText(page,
          "Train a model on this machine, and see how many bytes that takes:\n"
          "  signpost demo\n"
          "Run your own program as four ranks, with two aggregators:\n"
          "  signpost run -n 4 --aggregators 2 -- python3 train.py\n"
          "Serve a job's only shard to other hosts, and see whom it waits for:\n"
          "  signpost cert init certificates\n"
          "  signpost aggregator --listen 10.0.0.1:4000 --tls-dir certificates/aggregator\n"
          "  signpost status --aggregators 10.0.0.1:4000 --tls-dir certificates/observer");
}

std::string PageOf(const CLI::App& command) {
  return absl::StrReplaceAll(FullNameOf(command), {{" ", "-"}});
}

}  // namespace

std::string ManualOf(const CLI::App& program) {
  std::string page;
  AddTitle(page, program.get_name(), "train with one sign bit per parameter each way");
  absl::StrAppend(&page, ".SH SYNOPSIS\n", SynopsisOf(program), " [", Bold("--"), " ",
                  Italic("WORD"), " ...]\n.SH DESCRIPTION\n");
  AddText(page, program.get_description());
  AddFlags(page, program);
  absl::StrAppend(&page, ".SH COMMANDS\n");
  for (const CLI::App* command : CommandsOf(program)) {
    AddEntry(page, Bold(command->get_name()), Sentence(*command));
  }
  for (const CLI::App* command : CommandsOf(program)) AddCommandWithItsOwn(page, *command);
  AddExitCodes(page);
  AddVariables(page, program);
  AddEntries(page, "FILES", kFiles);
  AddExamples(page);
  absl::StrAppend(&page, ".SH SEE ALSO\n",
                  Escape("`signpost man COMMAND` writes the page of one command. README.md, "
                         "docs/errors.md (error codes one by one), docs/faq.md, docs/deployment.md "
                         "and docs/runbook.md of the source."),
                  "\n");
  return page;
}

std::string ManualOfCommand(const CLI::App& command) {
  std::string page;
  AddTitle(page, PageOf(command), command.get_description());
  absl::StrAppend(&page, ".SH SYNOPSIS\n", SynopsisOf(command), "\n.SH DESCRIPTION\n",
                  Sentence(command), "\n.PP\n");
  AddText(page, command.get_footer());
  absl::StrAppend(&page, ".SH OPTIONS\n");
  AddFlags(page, command);
  for (const CLI::App* subcommand : CommandsOf(command)) AddCommandWithItsOwn(page, *subcommand);
  AddExitCodes(page);
  absl::StrAppend(&page, ".SH SEE ALSO\n", Bold(command.get_parent()->get_name()), "(1)\n");
  return page;
}

}  // namespace signpost::cli
