// OpenSSL's objects, each freed by its own function.

#ifndef SIGNPOST_SECURITY_OPENSSL_PTR_H_
#define SIGNPOST_SECURITY_OPENSSL_PTR_H_

#include <memory>

namespace signpost {

template <auto Free>
struct OpensslFreer {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};

// OpensslPtr<X509, X509_free>
template <typename T, auto Free>
using OpensslPtr = std::unique_ptr<T, OpensslFreer<Free>>;

}  // namespace signpost

#endif  // SIGNPOST_SECURITY_OPENSSL_PTR_H_
