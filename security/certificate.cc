#include "security/certificate.h"

#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <ctime>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/try_again.h"
#include "security/openssl_ptr.h"

namespace signpost {
namespace {

// OpenSSL would free what it has when the process exits, while gRPC's threads still make
// connections with it and crash. Only before its first use, so here.
[[maybe_unused]] const int kOpensslStaysUntilTheEnd =
    OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);

// How far another host's clock may be behind.
constexpr absl::Duration kClockSkew = absl::Minutes(5);

constexpr int kSerialBits = 127;  // positive, as X.509 wants it

void FreeCertificates(STACK_OF(X509) * certificates) { sk_X509_pop_free(certificates, X509_free); }

using Bio = OpensslPtr<BIO, BIO_free_all>;
using Key = OpensslPtr<EVP_PKEY, EVP_PKEY_free>;
using Certificate = OpensslPtr<X509, X509_free>;
using Certificates = OpensslPtr<STACK_OF(X509), FreeCertificates>;
using Extension = OpensslPtr<X509_EXTENSION, X509_EXTENSION_free>;
using Names = OpensslPtr<GENERAL_NAMES, GENERAL_NAMES_free>;
using Serial = OpensslPtr<BIGNUM, BN_free>;
using Store = OpensslPtr<X509_STORE, X509_STORE_free>;
using StoreContext = OpensslPtr<X509_STORE_CTX, X509_STORE_CTX_free>;

Bio Reader(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// Of OpenSSL, which keeps a queue of them for each thread.
absl::Status OpensslError(absl::string_view what) {
  char text[256] = "no reason given";
  if (const unsigned long code = ERR_get_error(); code != 0) {
    ERR_error_string_n(code, text, sizeof text);
  }
  ERR_clear_error();
  return absl::InternalError(absl::StrCat("OpenSSL cannot ", what, ": ", text));
}

Certificates ParseCertificates(const std::string& pem) {
  Certificates certificates(sk_X509_new_null());
  const Bio bio = Reader(pem);
  while (X509* certificate = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) {
    sk_X509_push(certificates.get(), certificate);
  }
  ERR_clear_error();  // there was no further one
  return certificates;
}

// Null when there is none, or it wants a password.
Key ParseKey(const std::string& pem) {
  const auto no_password = [](char*, int, int, void*) { return -1; };
  Key key(PEM_read_bio_PrivateKey(Reader(pem).get(), nullptr, no_password, nullptr));
  ERR_clear_error();
  return key;
}

absl::Time TimeOf(const ASN1_TIME* time) {
  std::tm fields = {};
  if (ASN1_TIME_to_tm(time, &fields) != 1) return absl::InfinitePast();
  return absl::FromTimeT(timegm(&fields));
}

// The one SPIFFE ID.
absl::StatusOr<Identity> IdentityOf(X509* certificate) {
  const Names names(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  std::vector<std::string> found;
  for (int i = 0; i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type != GEN_URI) continue;
    const ASN1_STRING* uri = name->d.uniformResourceIdentifier;
    std::string text(reinterpret_cast<const char*>(ASN1_STRING_get0_data(uri)),
                     ASN1_STRING_length(uri));
    if (absl::StartsWith(text, "spiffe://")) found.push_back(std::move(text));
  }
  if (found.size() == 1) return Identity::Parse(found[0]);
  return absl::InvalidArgumentError(absl::StrCat(
      "the certificate has ", found.size(),
      " SPIFFE IDs among its alternative names, wanted one, as spiffe://signpost/worker"));
}

// Passes when the certificate is renewed, or the time comes.
absl::Status OutOfDate(const std::string& message) {
  return TryAgain(absl::FailedPreconditionError(message));
}

std::string Minute(absl::Time time) {
  return absl::FormatTime("%Y-%m-%d %H:%M UTC", time, absl::UTCTimeZone());
}

absl::Status CheckValidity(const CertificateFacts& facts, absl::Time now) {
  if (now < facts.valid_from) {
    return OutOfDate(absl::StrCat("the certificate is valid from ", Minute(facts.valid_from),
                                  " on, and this host's clock says ", Minute(now)));
  }
  if (now >= facts.valid_until) {
    return OutOfDate(absl::StrCat("the certificate was valid until ", Minute(facts.valid_until),
                                  ", and this host's clock says ", Minute(now),
                                  "; issue another (`signpost cert issue`)"));
  }
  return absl::OkStatus();
}

// As the other side of a connection will.
absl::Status CheckChain(STACK_OF(X509) * chain, STACK_OF(X509) * roots, int purpose,
                        absl::Time now) {
  const Store store(X509_STORE_new());
  for (int i = 0; i < sk_X509_num(roots); ++i) {
    X509_STORE_add_cert(store.get(), sk_X509_value(roots, i));
  }
  const StoreContext context(X509_STORE_CTX_new());
  X509_STORE_CTX_init(context.get(), store.get(), sk_X509_value(chain, 0), chain);
  X509_STORE_CTX_set_purpose(context.get(), purpose);
  X509_VERIFY_PARAM_set_time(X509_STORE_CTX_get0_param(context.get()), absl::ToTimeT(now));
  if (X509_verify_cert(context.get()) == 1) return absl::OkStatus();
  const int error = X509_STORE_CTX_get_error(context.get());
  ERR_clear_error();
  if (error == X509_V_ERR_CERT_HAS_EXPIRED || error == X509_V_ERR_CERT_NOT_YET_VALID) {
    const X509* const authority = X509_STORE_CTX_get_current_cert(context.get());
    return OutOfDate(absl::StrCat(
        "the certificate of its authority is valid from ",
        Minute(TimeOf(X509_get0_notBefore(authority))), " until ",
        Minute(TimeOf(X509_get0_notAfter(authority))), ", and this host's clock says ", Minute(now),
        "; renew the authority, and then the certificate (`signpost cert init`)"));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("no root vouches for the certificate as one of a ",
                   purpose == X509_PURPOSE_SSL_SERVER ? "server" : "client", ": ",
                   X509_verify_cert_error_string(error)));
}

absl::StatusOr<std::string> ToPem(X509* certificate) {
  const Bio bio(BIO_new(BIO_s_mem()));
  if (PEM_write_bio_X509(bio.get(), certificate) != 1) return OpensslError("write a certificate");
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &data);
  return std::string(data, size);
}

absl::StatusOr<std::string> ToPem(EVP_PKEY* key) {
  const Bio bio(BIO_new(BIO_s_mem()));
  if (PEM_write_bio_PKCS8PrivateKey(bio.get(), key, nullptr, nullptr, 0, nullptr, nullptr) != 1) {
    return OpensslError("write a key");
  }
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &data);
  return std::string(data, size);
}

absl::Status AddExtension(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  const Extension extension(X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str()));
  if (extension == nullptr || X509_add_ext(certificate, extension.get(), -1) != 1) {
    return OpensslError(absl::StrCat("add '", value, "' to a certificate"));
  }
  return absl::OkStatus();
}

// All but its extensions and signature.
absl::StatusOr<Certificate> Unsigned(absl::string_view name, EVP_PKEY* key, absl::Time from,
                                     absl::Time until) {
  Certificate certificate(X509_new());
  const Serial serial(BN_new());
  if (BN_rand(serial.get(), kSerialBits, BN_RAND_TOP_ANY, BN_RAND_BOTTOM_ANY) != 1) {
    return OpensslError("make a serial number");
  }
  X509_set_version(certificate.get(), X509_VERSION_3);
  BN_to_ASN1_INTEGER(serial.get(), X509_get_serialNumber(certificate.get()));
  ASN1_TIME_set(X509_getm_notBefore(certificate.get()), absl::ToTimeT(from));
  ASN1_TIME_set(X509_getm_notAfter(certificate.get()), absl::ToTimeT(until));
  name = name.substr(0, ub_common_name);
  if (X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate.get()), "CN", MBSTRING_UTF8,
                                 reinterpret_cast<const unsigned char*>(name.data()),
                                 static_cast<int>(name.size()), -1, 0) != 1) {
    return OpensslError("name a certificate");
  }
  if (X509_set_pubkey(certificate.get(), key) != 1) return OpensslError("set a public key");
  return certificate;
}

Key MakeKey() { return Key(EVP_EC_gen("P-256")); }

}  // namespace

absl::StatusOr<CertificateFacts> CheckTlsFiles(const TlsFiles& files, absl::Time now) {
  const Certificates roots = ParseCertificates(files.roots);
  if (sk_X509_num(roots.get()) == 0) {
    return absl::InvalidArgumentError("there is no certificate of an authority in PEM");
  }
  const Certificates chain = ParseCertificates(files.certificate);
  if (sk_X509_num(chain.get()) == 0) {
    return absl::InvalidArgumentError("there is no certificate in PEM");
  }
  X509* const certificate = sk_X509_value(chain.get(), 0);
  const Key key = ParseKey(files.key);
  if (key == nullptr) {
    return absl::InvalidArgumentError("there is no key in PEM, or it has a password");
  }
  if (X509_check_private_key(certificate, key.get()) != 1) {
    ERR_clear_error();
    return absl::InvalidArgumentError("the key is another certificate's");
  }
  absl::StatusOr<Identity> identity = IdentityOf(certificate);
  if (!identity.ok()) return identity.status();
  const CertificateFacts facts = {*std::move(identity), TimeOf(X509_get0_notBefore(certificate)),
                                  TimeOf(X509_get0_notAfter(certificate))};
  absl::Status status = CheckValidity(facts, now);
  status.Update(CheckChain(chain.get(), roots.get(), X509_PURPOSE_SSL_CLIENT, now));
  if (facts.identity.role == PeerRole::kAggregator) {
    status.Update(CheckChain(chain.get(), roots.get(), X509_PURPOSE_SSL_SERVER, now));
  }
  if (!status.ok()) return status;
  return facts;
}

absl::StatusOr<Identity> IdentityIn(const std::string& certificates) {
  const Certificates chain = ParseCertificates(certificates);
  if (sk_X509_num(chain.get()) == 0) {
    return absl::InvalidArgumentError("there is no certificate in PEM");
  }
  return IdentityOf(sk_X509_value(chain.get(), 0));
}

struct Authority::Parsed {
  Certificate certificate;
  Key key;
};

Authority::Authority(std::string certificate, std::string key, std::unique_ptr<Parsed> parsed)
    : certificate_(std::move(certificate)), key_(std::move(key)), parsed_(std::move(parsed)) {}
Authority::Authority(Authority&&) = default;
Authority& Authority::operator=(Authority&&) = default;
Authority::~Authority() = default;

absl::StatusOr<Authority> Authority::Make(absl::string_view name, absl::Duration lifetime) {
  const absl::Time now = absl::Now();
  const Key key = MakeKey();
  if (key == nullptr) return OpensslError("make a key");
  absl::StatusOr<Certificate> made = Unsigned(name, key.get(), now - kClockSkew, now + lifetime);
  if (!made.ok()) return made.status();
  X509* const certificate = made->get();
  X509_set_issuer_name(certificate, X509_get_subject_name(certificate));
  absl::Status status;
  status.Update(
      AddExtension(certificate, certificate, NID_basic_constraints, "critical,CA:TRUE,pathlen:0"));
  status.Update(
      AddExtension(certificate, certificate, NID_key_usage, "critical,keyCertSign,cRLSign"));
  status.Update(AddExtension(certificate, certificate, NID_subject_key_identifier, "hash"));
  if (!status.ok()) return status;
  if (X509_sign(certificate, key.get(), EVP_sha256()) == 0) return OpensslError("sign");
  const absl::StatusOr<std::string> certificate_pem = ToPem(certificate),
                                    key_pem = ToPem(key.get());
  if (!certificate_pem.ok()) return certificate_pem.status();
  if (!key_pem.ok()) return key_pem.status();
  return Load(*certificate_pem, *key_pem);
}

absl::StatusOr<Authority> Authority::Load(const std::string& certificate, const std::string& key) {
  const Certificates certificates = ParseCertificates(certificate);
  auto parsed = std::make_unique<Parsed>();
  parsed->key = ParseKey(key);
  if (sk_X509_num(certificates.get()) == 0 || parsed->key == nullptr) {
    return absl::InvalidArgumentError("there is no authority's certificate, or key, in PEM");
  }
  parsed->certificate.reset(sk_X509_shift(certificates.get()));
  if (X509_check_private_key(parsed->certificate.get(), parsed->key.get()) != 1 ||
      X509_check_ca(parsed->certificate.get()) == 0) {
    ERR_clear_error();
    return absl::InvalidArgumentError(
        "the key is another certificate's, or that is not an authority's");
  }
  return Authority(certificate, key, std::move(parsed));
}

absl::StatusOr<TlsFiles> Authority::Issue(const Identity& identity, absl::Duration lifetime) const {
  if (absl::Status status = identity.Check(); !status.ok()) return status;
  const absl::Time now = absl::Now();
  const absl::Time own_until = TimeOf(X509_get0_notAfter(parsed_->certificate.get()));
  if (now >= own_until) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the authority was valid until ", Minute(own_until), ", and this host's clock says ",
        Minute(now), "; make another (`signpost cert init`)"));
  }
  const absl::Time until = std::min(now + lifetime, own_until);
  const Key key = MakeKey();
  if (key == nullptr) return OpensslError("make a key");
  X509* const issuer = parsed_->certificate.get();
  absl::StatusOr<Certificate> made =
      Unsigned(NameOf(identity.role), key.get(), now - kClockSkew, until);
  if (!made.ok()) return made.status();
  X509* const certificate = made->get();
  X509_set_issuer_name(certificate, X509_get_subject_name(issuer));
  absl::Status status;
  const auto add = [&](int nid, const std::string& value) {
    status.Update(AddExtension(certificate, issuer, nid, value));
  };
  add(NID_basic_constraints, "critical,CA:FALSE");
  add(NID_key_usage, "critical,digitalSignature");
  add(NID_ext_key_usage, "serverAuth,clientAuth");
  add(NID_subject_alt_name, absl::StrCat("URI:", identity.ToUri()));
  add(NID_authority_key_identifier, "keyid");
  if (!status.ok()) return status;
  if (X509_sign(certificate, parsed_->key.get(), EVP_sha256()) == 0) return OpensslError("sign");
  absl::StatusOr<std::string> certificate_pem = ToPem(certificate), key_pem = ToPem(key.get());
  if (!certificate_pem.ok()) return certificate_pem.status();
  if (!key_pem.ok()) return key_pem.status();
  return TlsFiles{certificate_, *std::move(certificate_pem), *std::move(key_pem)};
}

}  // namespace signpost
