#include "doctor/tls.h"

#include <netdb.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>
#include <unistd.h>

#include <ctime>
#include <memory>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "doctor/name.h"
#include "security/identity.h"
#include "security/openssl_ptr.h"
#include "security/tls_dir.h"

namespace signpost::doctor {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(3);

using Context = OpensslPtr<SSL_CTX, SSL_CTX_free>;
using Connection = OpensslPtr<SSL, SSL_free>;
using Bio = OpensslPtr<BIO, BIO_free_all>;
using Certificate = OpensslPtr<X509, X509_free>;
using Key = OpensslPtr<EVP_PKEY, EVP_PKEY_free>;
using Names = OpensslPtr<GENERAL_NAMES, GENERAL_NAMES_free>;

std::string Minute(absl::Time time) {
  return absl::FormatTime("%Y-%m-%d %H:%M UTC", time, absl::UTCTimeZone());
}

absl::Time TimeOf(const ASN1_TIME* time) {
  tm parts = {};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return absl::InfinitePast();
  return absl::FromTM(parts, absl::UTCTimeZone());
}

std::string UriOf(X509* certificate) {
  const Names names(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* const name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type != GEN_URI) continue;
    const std::string uri(
        reinterpret_cast<const char*>(ASN1_STRING_get0_data(name->d.uniformResourceIdentifier)),
        ASN1_STRING_length(name->d.uniformResourceIdentifier));
    if (absl::StartsWith(uri, "spiffe://")) return uri;
  }
  return "";
}

Bio Reader(const std::string& pem) {
  return Bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// Trusts the roots, and shows the certificate; what is missing is not used.
Context MakeContext(const TlsFiles& own) {
  Context context(SSL_CTX_new(TLS_client_method()));
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_NONE, nullptr);
  const Bio roots = Reader(own.roots), chain = Reader(own.certificate), key_text = Reader(own.key);
  while (const Certificate root{PEM_read_bio_X509(roots.get(), nullptr, nullptr, nullptr)}) {
    X509_STORE_add_cert(SSL_CTX_get_cert_store(context.get()), root.get());
  }
  const Certificate certificate(PEM_read_bio_X509(chain.get(), nullptr, nullptr, nullptr));
  const Key key(PEM_read_bio_PrivateKey(key_text.get(), nullptr, nullptr, nullptr));
  if (certificate != nullptr && key != nullptr) {
    SSL_CTX_use_certificate(context.get(), certificate.get());
    SSL_CTX_use_PrivateKey(context.get(), key.get());
  }
  static constexpr unsigned char kHttp2[] = {2, 'h', '2'};
  SSL_CTX_set_alpn_protos(context.get(), kHttp2, sizeof kHttp2);
  ERR_clear_error();
  return context;
}

// A connected socket, or -1.
int Connect(const std::string& address, const std::string& port, absl::Duration timeout) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.c_str(), port.c_str(), &hints, &found) != 0) return -1;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval patience = absl::ToTimeval(timeout);
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  if (connect(fd, found->ai_addr, found->ai_addrlen) == 0) return fd;
  close(fd);
  return -1;
}

constexpr char kMakeOne[] =
    "signpost cert issue DIR --role ROLE --to TLS-DIR, with the DIR of the job's `signpost cert "
    "init`";

}  // namespace

std::optional<CertificateFacts> CheckTlsDir(const TransportSecurity& security, absl::Time now,
                                            Reporter& to) {
  if (security.tls_dir.empty()) {
    to.Fine("certificate", security.insecure ? "none: plain text was asked for" : "none is given");
    return std::nullopt;
  }
  const absl::StatusOr<TlsFiles> files = ReadTlsDir(security.tls_dir);
  if (!files.ok()) {
    to.Fault("certificate", std::string(files.status().message()),
             absl::IsPermissionDenied(files.status())
                 ? absl::StrCat("chown -R $(id -u) ", security.tls_dir)
                 : "signpost cert init DIR makes an authority and a TLS directory for each role");
    return std::nullopt;
  }
  const absl::StatusOr<CertificateFacts> facts = CheckTlsFiles(*files, now);
  if (absl::IsFailedPrecondition(facts.status())) {
    to.Fault("certificate",
             absl::StrCat(security.tls_dir, ": ", facts.status().message(),
                          "; the clock here says ", Minute(now)),
             absl::StrCat("if the clock is right, ", kMakeOne,
                          " (it is used without a restart); if not, timedatectl set-ntp true"));
    return std::nullopt;
  }
  if (!facts.ok()) {
    to.Fault("certificate", absl::StrCat(security.tls_dir, ": ", facts.status().message()),
             kMakeOne);
    return std::nullopt;
  }
  const std::string text =
      absl::StrCat(facts->identity.ToUri(), ", until ", Minute(facts->valid_until));
  if (facts->IsNearItsEnd(now)) {
    to.Warn("certificate", absl::StrCat(text, ": less than a fifth of its time is left"), kMakeOne);
  } else {
    to.Fine("certificate", text);
  }
  return *facts;
}

absl::StatusOr<ShownCertificate> LookAtCertificate(const std::string& address,
                                                   const std::string& port, const TlsFiles& own,
                                                   absl::Duration timeout) {
  const int fd = Connect(address, port, timeout);
  if (fd < 0) return absl::UnavailableError("no connection");
  const absl::Cleanup closer = [fd] { close(fd); };
  const Context context = MakeContext(own);
  const Connection connection(SSL_new(context.get()));
  SSL_set_fd(connection.get(), fd);
  SSL_connect(connection.get());
  ERR_clear_error();
  const Certificate certificate(SSL_get1_peer_certificate(connection.get()));
  if (certificate == nullptr) {
    return absl::FailedPreconditionError("it does not show a certificate");
  }
  ShownCertificate shown = {UriOf(certificate.get()), "",
                            TimeOf(X509_get0_notBefore(certificate.get())),
                            TimeOf(X509_get0_notAfter(certificate.get()))};
  if (const long result = SSL_get_verify_result(connection.get()); result != X509_V_OK) {
    shown.distrust = X509_verify_cert_error_string(result);
  }
  return shown;
}

bool ExplainByTls(const std::string& host, const std::string& address, const std::string& error,
                  const TransportSecurity& security, Wanted wanted, Reporter& to) {
  TlsFiles own;
  if (!security.tls_dir.empty()) own = ReadTlsDir(security.tls_dir).value_or(TlsFiles());
  const auto shown = LookAtCertificate(address, PortOf(host), own, kTimeout);
  const bool is_aggregator = wanted == Wanted::kAggregator;
  const std::string command = is_aggregator ? "signpost aggregator" : "signpost doctor --listen";
  if (!shown.ok()) {
    if (security.tls_dir.empty() || !absl::IsFailedPrecondition(shown.status())) return false;
    to.Fault("certificate", absl::StrCat(host, " speaks plain text, and this host mTLS"),
             absl::StrCat("start it with a TLS directory: ", command, " --tls-dir DIR"));
    return true;
  }
  if (security.tls_dir.empty()) {
    to.Fault("certificate", absl::StrCat(host, " speaks mTLS, and this host plain text"),
             "--tls-dir DIR, or SIGNPOST_TLS_DIR");
    return true;
  }
  const absl::StatusOr<CertificateFacts> facts = CheckTlsFiles(own, absl::Now());
  const absl::StatusOr<Identity> peer = Identity::Parse(shown->uri);
  if (!peer.ok() || (facts.ok() && peer->trust_domain != facts->identity.trust_domain)) {
    to.Fault(
        "certificate",
        absl::StrCat(host, " is ", shown->uri.empty() ? "nobody by its certificate" : shown->uri,
                     ", wanted one of the trust domain ",
                     facts.ok() ? facts->identity.trust_domain : "of this host"),
        absl::StrCat(kMakeOne, " --trust-domain ",
                     facts.ok() ? facts->identity.trust_domain : "NAME",
                     "; or another is meant by its address"));
  } else if (!shown->distrust.empty()) {
    to.Fault(
        "certificate",
        absl::StrCat(host, " (", shown->uri, ", valid from ", Minute(shown->valid_from), " to ",
                     Minute(shown->valid_until), ") is not trusted here: ", shown->distrust),
        absl::StrCat("on ", HostOf(host), ": ", kMakeOne));
  } else if (is_aggregator && peer->role != PeerRole::kAggregator) {
    to.Fault("certificate", absl::StrCat(host, " is ", shown->uri, ", which is no aggregator"),
             "signpost cert issue DIR --role aggregator --to TLS-DIR, for that aggregator");
  } else {
    to.Fault(
        "certificate", absl::StrCat(host, " does not take this host's certificate: ", error),
        "signpost cert show TLS-DIR on both sides: do they have one authority and trust domain?");
  }
  return true;
}

}  // namespace signpost::doctor
