#include "client/demo/matrix_product.h"

#include "client/demo/matrix_product_target.h"

namespace signpost::demo {
namespace {

bool HasAvx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

template <typename Real>
void MultiplyOnBestTarget(const Product<Real>& product) {
  static const bool has_avx2 = HasAvx2();
  has_avx2 ? avx2::Multiply(product) : sse2::Multiply(product);
}

}  // namespace

void Multiply(const Product<float>& product) { MultiplyOnBestTarget(product); }
void Multiply(const Product<double>& product) { MultiplyOnBestTarget(product); }

}  // namespace signpost::demo
