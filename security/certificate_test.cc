#include "security/certificate.h"

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/try_again.h"
#include "security/openssl_ptr.h"

namespace signpost {
namespace {

using ::testing::HasSubstr;

const Identity kWorkerOfA = {"signpost", PeerRole::kWorker, "a"};

// The authority's certificate, with another time.
std::string Between(const Authority& authority, absl::Time from, absl::Time until) {
  const auto reader = [](const std::string& pem) {
    return OpensslPtr<BIO, BIO_free>(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  };
  const OpensslPtr<X509, X509_free> certificate(
      PEM_read_bio_X509(reader(authority.certificate()).get(), nullptr, nullptr, nullptr));
  const OpensslPtr<EVP_PKEY, EVP_PKEY_free> key(
      PEM_read_bio_PrivateKey(reader(authority.key()).get(), nullptr, nullptr, nullptr));
  ASN1_TIME_set(X509_getm_notBefore(certificate.get()), absl::ToTimeT(from));
  ASN1_TIME_set(X509_getm_notAfter(certificate.get()), absl::ToTimeT(until));
  X509_sign(certificate.get(), key.get(), EVP_sha256());
  const OpensslPtr<BIO, BIO_free> writer(BIO_new(BIO_s_mem()));
  PEM_write_bio_X509(writer.get(), certificate.get());
  char* data = nullptr;
  const long size = BIO_get_mem_data(writer.get(), &data);
  return std::string(data, size);
}

class CertificateTest : public ::testing::Test {
 protected:
  Authority authority_ = *Authority::Make("Signpost test", absl::Hours(24));
  TlsFiles files_ = *authority_.Issue(kWorkerOfA, absl::Hours(1));
};

// As gRPC's threads do it. What is registered first runs last: behind what OpenSSL registers when
// it is used first.
TEST(CertificateDeathTest, CanBeReadWhileTheProcessExits) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a process that has not used OpenSSL
  EXPECT_EXIT(
      {
        static TlsFiles files;
        std::atexit([] { _exit(CheckTlsFiles(files, absl::Now()).ok() ? 0 : 1); });
        files =
            *Authority::Make("Signpost test", absl::Hours(1))->Issue(kWorkerOfA, absl::Hours(1));
        std::exit(2);
      },
      testing::ExitedWithCode(0), "");
}

TEST_F(CertificateTest, OfAnAuthorityWithALongNameIsAsGood) {
  const Authority authority = *Authority::Make(std::string(300, 'n'), absl::Hours(1));
  EXPECT_TRUE(CheckTlsFiles(*authority.Issue(kWorkerOfA, absl::Hours(1)), absl::Now()).ok());
}

TEST_F(CertificateTest, SaysWhoAndUntilWhen) {
  const absl::Time now = absl::Now();
  const auto facts = CheckTlsFiles(files_, now);
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_EQ(facts->identity.ToUri(), "spiffe://signpost/worker/a");
  EXPECT_LT(facts->valid_from, now);
  EXPECT_NEAR(absl::ToDoubleSeconds(facts->valid_until - now), 3600, /*abs_error=*/60);
}

TEST_F(CertificateTest, OfAnAuthorityThatWasLoadedIsAsGood) {
  const auto loaded = Authority::Load(authority_.certificate(), authority_.key());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  TlsFiles files = *loaded->Issue(kWorkerOfA, absl::Hours(1));
  files.roots = files_.roots;
  EXPECT_TRUE(CheckTlsFiles(files, absl::Now()).ok());
}

TEST_F(CertificateTest, IsValidForItsTimeOnly) {
  const auto early = CheckTlsFiles(files_, absl::Now() - absl::Hours(1));
  EXPECT_EQ(early.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(IsTryAgain(early.status()));
  EXPECT_THAT(early.status().message(), HasSubstr("is valid from "));
  const auto late = CheckTlsFiles(files_, absl::Now() + absl::Hours(2));
  EXPECT_EQ(late.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(IsTryAgain(late.status()));
  EXPECT_THAT(late.status().message(), HasSubstr("was valid until "));
}

TEST_F(CertificateTest, IsValidForTheTimeOfItsAuthorityOnly) {
  const absl::Time now = absl::Now();
  for (const std::string& root :
       {Between(authority_, now - absl::Hours(2), now - absl::Hours(1)),
        Between(authority_, now + absl::Hours(1), now + absl::Hours(2))}) {
    files_.roots = root;
    const auto facts = CheckTlsFiles(files_, now);
    EXPECT_EQ(facts.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(IsTryAgain(facts.status()));
    EXPECT_THAT(facts.status().message(), HasSubstr("the certificate of its authority is valid"));
  }
  files_.roots = Between(authority_, now - absl::Hours(2), now + absl::Hours(1));
  EXPECT_TRUE(CheckTlsFiles(files_, now).ok());
}

TEST_F(CertificateTest, IsNotIssuedByAnAuthorityThatIsNotValidAnyMore) {
  const absl::Time now = absl::Now();
  const auto over = Authority::Load(Between(authority_, now - absl::Hours(2), now - absl::Hours(1)),
                                    authority_.key());
  const absl::Status status = over->Issue(kWorkerOfA, absl::Hours(1)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("the authority was valid until"));
}

TEST_F(CertificateTest, LivesNoLongerThanItsAuthority) {
  const auto files = authority_.Issue(kWorkerOfA, absl::Hours(1000));
  EXPECT_LE(CheckTlsFiles(*files, absl::Now())->valid_until, absl::Now() + absl::Hours(24));
}

TEST_F(CertificateTest, OfAnotherAuthorityIsRefused) {
  files_.roots = Authority::Make("Other", absl::Hours(1))->certificate();
  const auto facts = CheckTlsFiles(files_, absl::Now());
  EXPECT_EQ(facts.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(facts.status().message(), HasSubstr("no root vouches for the certificate"));
}

TEST_F(CertificateTest, IsGoodWithOneOfSeveralRoots) {
  files_.roots =
      absl::StrCat(Authority::Make("Other", absl::Hours(1))->certificate(), files_.roots);
  EXPECT_TRUE(CheckTlsFiles(files_, absl::Now()).ok());
}

TEST_F(CertificateTest, WithAnothersKeyIsRefused) {
  files_.key = authority_.Issue(kWorkerOfA, absl::Hours(1))->key;
  EXPECT_THAT(CheckTlsFiles(files_, absl::Now()).status().message(),
              HasSubstr("the key is another certificate's"));
}

TEST_F(CertificateTest, CutAnywhereIsRefusedOrWhole) {
  const TlsFiles whole = files_;
  for (std::string TlsFiles::*part : {&TlsFiles::roots, &TlsFiles::certificate, &TlsFiles::key}) {
    // The last line break may be missing.
    for (size_t size = 0; size + 1 < (whole.*part).size(); size += 7) {
      TlsFiles cut = whole;
      (cut.*part).resize(size);
      EXPECT_FALSE(CheckTlsFiles(cut, absl::Now()).ok()) << size;
    }
  }
}

TEST_F(CertificateTest, AnAuthoritysIsNoIdentity) {
  EXPECT_THAT(CheckTlsFiles({authority_.certificate(), authority_.certificate(), authority_.key()},
                            absl::Now())
                  .status()
                  .message(),
              HasSubstr("has 0 SPIFFE IDs"));
}

TEST_F(CertificateTest, IsNotIssuedForANameThatCannotBeWritten) {
  EXPECT_EQ(
      authority_.Issue({"signpost", PeerRole::kWorker, "a b"}, absl::Hours(1)).status().code(),
      absl::StatusCode::kInvalidArgument);
}

// Its certificate is signed by one that may sign none.
TEST_F(CertificateTest, OfAWorkerSignsNobody) {
  EXPECT_THAT(Authority::Load(files_.certificate, files_.key).status().message(),
              HasSubstr("not an authority's"));
}

TEST_F(CertificateTest, AuthorityIsLoadedWithItsOwnKeyOnly) {
  EXPECT_FALSE(Authority::Load(authority_.certificate(), files_.key).ok());
  EXPECT_FALSE(Authority::Load("", authority_.key()).ok());
  EXPECT_FALSE(Authority::Load(authority_.certificate(), "").ok());
}

}  // namespace
}  // namespace signpost
