#include "cli/cert_command.h"

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/exit_code.h"
#include "security/certificate.h"
#include "security/tls_dir.h"
#include "storage/small_file.h"

namespace signpost::cli {
namespace {

struct Flags {
  std::string directory;
  std::string role = "worker";
  std::string to;
  std::string trust_domain = "signpost";
  std::string job;
  uint32_t days = 365;
  uint32_t authority_days = 3650;

  std::optional<std::string> JobOrAll() const {
    return job.empty() ? std::nullopt : std::optional(job);
  }
};

absl::Duration Days(uint32_t days) { return days * absl::Hours(24); }

std::string FormatDay(absl::Time time) {
  return absl::FormatTime("%Y-%m-%d %H:%M UTC", time, absl::UTCTimeZone());
}

std::string AuthorityFile(const Flags& flags, const char* name) {
  return absl::StrCat(flags.directory, "/ca/", name);
}

std::string Describe(const CertificateFacts& facts) {
  return absl::StrCat(facts.identity.ToUri(), ", until ", FormatDay(facts.valid_until));
}

// While authorities change, a TLS directory trusts both: then it stays as it is.
std::string RootsFor(const std::string& directory, const std::string& authority) {
  const absl::StatusOr<TlsFiles> present = ReadTlsDir(directory);
  const auto without_spaces = [](std::string pem) {
    std::erase_if(pem, absl::ascii_isspace);
    return pem;
  };
  const bool is_among_them =
      present.ok() && absl::StrContains(without_spaces(present->roots), without_spaces(authority));
  return is_among_them ? present->roots : authority;
}

// Issues one, writes it, and says so.
absl::Status IssueTo(const Authority& authority, const Flags& flags, const Identity& identity,
                     const std::string& directory) {
  absl::StatusOr<TlsFiles> files = authority.Issue(identity, Days(flags.days));
  if (!files.ok()) return files.status();
  files->roots = RootsFor(directory, files->roots);
  const absl::StatusOr<CertificateFacts> facts = CheckTlsFiles(*files, absl::Now());
  if (!facts.ok()) return facts.status();
  if (absl::Status status = WriteTlsDir(directory, *files); !status.ok()) return status;
  std::printf("%s: %s\n", directory.c_str(), Describe(*facts).c_str());
  return absl::OkStatus();
}

absl::StatusOr<bool> IsThere(const std::string& path) {
  std::error_code error;
  const bool is_there = std::filesystem::exists(path, error);
  if (!error) return is_there;
  return absl::InvalidArgumentError(absl::StrCat("cannot look for ", path, ": ", error.message()));
}

Identity IdentityToInit(const Flags& flags, PeerRole role) {
  Identity identity = {flags.trust_domain, role, flags.JobOrAll()};
  // They serve any number of jobs.
  if (role == PeerRole::kAggregator) identity.job.reset();
  return identity;
}

// Before anything is written.
absl::Status CheckCanInit(const Flags& flags) {
  const std::string certificate_file = AuthorityFile(flags, "ca.crt");
  const absl::StatusOr<bool> has_authority = IsThere(certificate_file);
  if (!has_authority.ok()) return has_authority.status();
  if (*has_authority) {
    return absl::InvalidArgumentError(
        absl::StrCat(certificate_file,
                     " is there already, and certificates of it may be in use; "
                     "`signpost cert issue` makes more of them"));
  }
  for (const PeerRole role : kPeerRoles) {
    const absl::Status status = IdentityToInit(flags, role).Check();
    if (!status.ok()) return status;
    const std::string key = absl::StrCat(flags.directory, "/", NameOf(role), "/tls.key");
    const absl::StatusOr<bool> has_key = IsThere(key);
    if (!has_key.ok()) return has_key.status();
    if (!*has_key) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        key, " is there already, and its authority is elsewhere: bring that back to ",
        AuthorityFile(flags, ""), " for `signpost cert issue`, or give another directory"));
  }
  return absl::OkStatus();
}

absl::StatusOr<int> Init(const Flags& flags) {
  if (absl::Status status = CheckCanInit(flags); !status.ok()) return status;
  const absl::StatusOr<Authority> authority =
      Authority::Make(absl::StrCat("Signpost ", flags.trust_domain), Days(flags.authority_days));
  if (!authority.ok()) return authority.status();
  // First: what comes to an end behind it goes on by `cert issue`.
  absl::Status status = MakePrivateDirectory(flags.directory + "/ca");
  if (status.ok()) status = WritePrivateFile(AuthorityFile(flags, "ca.key"), authority->key());
  if (status.ok()) {
    status = WritePrivateFile(AuthorityFile(flags, "ca.crt"), authority->certificate());
  }
  for (const PeerRole role : kPeerRoles) {
    if (!status.ok()) return status;
    status = IssueTo(*authority, flags, IdentityToInit(flags, role),
                     absl::StrCat(flags.directory, "/", NameOf(role)));
  }
  if (!status.ok()) return status;
  std::printf("%s: the authority. Whoever has its ca.key can be anyone: keep it off the cluster\n",
              AuthorityFile(flags, "").c_str());
  return kExitOk;
}

absl::StatusOr<std::string> ReadText(const std::string& path) {
  absl::StatusOr<std::string> text = ReadSmallFile(path);
  if (text.ok()) return text;
  return absl::NotFoundError(
      absl::StrCat("cannot read ", text.status().message(),
                   ": is that the directory that `signpost cert init` was given?"));
}

// Whose the new certificate is: what the flags say that were given, otherwise whom the TLS
// directory is of, if it is there. Its identity does not change: peers may expect it, and a process
// that uses it would go on with the old files until it is started again.
absl::StatusOr<Identity> IdentityToIssue(const Flags& flags, const CLI::App& issue) {
  const std::optional<PeerRole> role = ParsePeerRole(flags.role);
  if (!role) {
    return absl::InvalidArgumentError(
        absl::StrCat("--role is '", flags.role, "', wanted aggregator, worker, observer or admin"));
  }
  Identity identity = {flags.trust_domain, *role, flags.JobOrAll()};
  const absl::StatusOr<bool> has_key = IsThere(flags.to + "/tls.key");
  if (!has_key.ok()) return has_key.status();
  if (!*has_key) return identity;
  const absl::StatusOr<TlsFiles> files = ReadTlsDir(flags.to);
  const absl::StatusOr<Identity> present =
      files.ok() ? IdentityIn(files->certificate) : files.status();
  if (!present.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        flags.to, " has a tls.key, and is no TLS directory of Signpost: give another directory (",
        present.status().message(), ")"));
  }
  if (issue.count("--role") == 0) identity.role = present->role;
  if (issue.count("--trust-domain") == 0) identity.trust_domain = present->trust_domain;
  if (issue.count("--job") == 0) identity.job = present->job;
  if (identity.ToUri() == present->ToUri()) return identity;
  return absl::InvalidArgumentError(
      absl::StrCat(flags.to, " is of ", present->ToUri(), ", and would be of ", identity.ToUri(),
                   ": give another directory, or without --role, --trust-domain and --job it is "
                   "renewed as it is"));
}

absl::StatusOr<int> Issue(const Flags& flags, const CLI::App& issue) {
  const absl::StatusOr<Identity> identity = IdentityToIssue(flags, issue);
  if (!identity.ok()) return identity.status();
  const absl::StatusOr<std::string> certificate = ReadText(AuthorityFile(flags, "ca.crt"));
  if (!certificate.ok()) return certificate.status();
  const absl::StatusOr<std::string> key = ReadText(AuthorityFile(flags, "ca.key"));
  if (!key.ok()) return key.status();
  const absl::StatusOr<Authority> authority = Authority::Load(*certificate, *key);
  if (!authority.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(AuthorityFile(flags, ""), ": ", authority.status().message()));
  }
  if (absl::Status status = IssueTo(*authority, flags, *identity, flags.to); !status.ok()) {
    return status;
  }
  return kExitOk;
}

absl::StatusOr<int> Show(const Flags& flags) {
  const absl::StatusOr<TlsFiles> files = ReadTlsDir(flags.directory);
  if (!files.ok()) return files.status();
  const absl::StatusOr<CertificateFacts> facts = CheckTlsFiles(*files, absl::Now());
  if (!facts.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.directory, ": ", facts.status().message()));
  }
  std::printf("%s\n", Describe(*facts).c_str());
  return kExitOk;
}

void AddIdentityFlags(CLI::App& app, Flags& flags) {
  app.add_option("--trust-domain", flags.trust_domain,
                 "The trust domain of the processes, whose names begin with it")
      ->type_name("NAME")
      ->capture_default_str();
  app.add_option("--job", flags.job, "The only job that certificates are good for [every job]")
      ->type_name("JOB");
  app.add_option("--days", flags.days, "Days for which certificates are valid")
      ->check(CLI::Range(1, 36500).description(""))
      ->capture_default_str();
}

}  // namespace

Command AddCertCommand(CLI::App& program) {
  // Shared by the flags' and the command's closures.
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *program.add_subcommand("cert", "Make certificates for mTLS, and look at them");
  app.require_subcommand(1);
  app.footer(
      "A process shows who it is with a TLS directory: ca.crt, tls.crt and tls.key, whose\n"
      "certificate has spiffe://TRUST-DOMAIN/ROLE or spiffe://TRUST-DOMAIN/ROLE/JOB among its\n"
      "names. Other authorities, such as cert-manager's, can make them as well.\n\n"
      "Example:\n"
      "  signpost cert init certificates");
  CLI::App& init = *app.add_subcommand(
      "init",
      "Make an authority, and a TLS directory for each role: DIR/aggregator, DIR/worker ...");
  init.add_option("directory", flags->directory,
                  "Where all of them go; it must have none of them yet")
      ->type_name("DIR")
      ->required();
  AddIdentityFlags(init, *flags);
  init.add_option("--authority-days", flags->authority_days,
                  "Days for which the authority is valid")
      ->check(CLI::Range(1, 36500).description(""))
      ->capture_default_str();
  CLI::App& issue = *app.add_subcommand(
      "issue",
      "Make one more TLS directory, or new files in one that is in use, which keeps its identity, "
      "by DIR's authority");
  issue.add_option("directory", flags->directory, "The directory that `cert init` was given")
      ->type_name("DIR")
      ->required();
  issue.add_option("--role", flags->role, "The role of its process")
      ->type_name("aggregator|worker|observer|admin")
      ->capture_default_str();
  issue.add_option("--to", flags->to, "The TLS directory to write")->type_name("DIR")->required();
  AddIdentityFlags(issue, *flags);
  CLI::App& show =
      *app.add_subcommand("show", "Tell whether a TLS directory is good, and whose it is");
  show.add_option("directory", flags->directory, "The TLS directory")->type_name("DIR")->required();
  return {&app, [flags, &init, &issue]() -> absl::StatusOr<int> {
            if (init.parsed()) return Init(*flags);
            return issue.parsed() ? Issue(*flags, issue) : Show(*flags);
          }};
}

}  // namespace signpost::cli
