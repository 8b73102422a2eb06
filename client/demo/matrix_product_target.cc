// Bazel compiles this file once for each TARGET, a namespace of matrix_product_target.h, with that
// target's instructions. Eigen's namespace has another name in each object file: otherwise the linker
// would keep one of two equal templates, and could keep that with AVX2 for both.

#include "client/demo/matrix_product_target.h"

#define EIGEN_DONT_PARALLELIZE
#include <eigen3/Eigen/Core>

namespace signpost::demo::TARGET {
namespace {

template <typename Real>
using RowMajor = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// c = a * b, or c += a * b.
template <typename Left, typename Right, typename Out>
void Store(bool add, const Left& a, const Right& b, Out c) {
  if (add) {
    c.noalias() += a * b;
  } else {
    c.noalias() = a * b;
  }
}

template <typename Real>
void MultiplyByEigen(const Product<Real>& p) {
  using In = Eigen::Map<const RowMajor<Real>>;
  const In a(p.a, p.transpose_a ? p.inner : p.rows, p.transpose_a ? p.rows : p.inner);
  const In b(p.b, p.transpose_b ? p.columns : p.inner, p.transpose_b ? p.inner : p.columns);
  const Eigen::Map<RowMajor<Real>> c(p.c, p.rows, p.columns);
  if (p.transpose_a && p.transpose_b) {
    Store(p.add_to_c, a.transpose(), b.transpose(), c);
  } else if (p.transpose_a) {
    Store(p.add_to_c, a.transpose(), b, c);
  } else if (p.transpose_b) {
    Store(p.add_to_c, a, b.transpose(), c);
  } else {
    Store(p.add_to_c, a, b, c);
  }
}

}  // namespace

void Multiply(const Product<float>& product) { MultiplyByEigen(product); }
void Multiply(const Product<double>& product) { MultiplyByEigen(product); }

}  // namespace signpost::demo::TARGET
