#include "client/demo/matrix_product.h"

#include <cstdint>
#include <random>
#include <tuple>
#include <vector>

#include "client/demo/matrix_product_target.h"
#include "gtest/gtest.h"

namespace signpost::demo {
namespace {

// Small integers, of which all sums and products are exact in either type, whatever their order.
template <typename Real>
std::vector<Real> Integers(std::mt19937& random, uint64_t count) {
  std::vector<Real> values(count);
  for (Real& value : values) value = static_cast<int>(random() % 17) - 8;
  return values;
}

template <typename Real>
std::vector<Real> ByDefinition(const Product<Real>& p, std::vector<Real> c) {
  for (uint32_t row = 0; row < p.rows; ++row) {
    for (uint32_t column = 0; column < p.columns; ++column) {
      Real sum = p.add_to_c ? c[row * p.columns + column] : 0;
      for (uint32_t i = 0; i < p.inner; ++i) {
        sum += p.a[p.transpose_a ? i * p.rows + row : row * p.inner + i] *
               p.b[p.transpose_b ? column * p.inner + i : i * p.columns + column];
      }
      c[row * p.columns + column] = sum;
    }
  }
  return c;
}

template <typename Real>
void ExpectByDefinition(void (*multiply)(const Product<Real>&)) {
  std::mt19937 random(1);
  for (const auto& [rows, columns, inner] :
       std::vector<std::tuple<uint32_t, uint32_t, uint32_t>>{{1, 1, 1}, {3, 5, 2}, {17, 9, 33}, {1, 70, 65}}) {
    const std::vector<Real> a = Integers<Real>(random, rows * inner);
    const std::vector<Real> b = Integers<Real>(random, inner * columns);
    for (int flags = 0; flags < 8; ++flags) {
      std::vector<Real> c = Integers<Real>(random, rows * columns);
      const Product<Real> product{.transpose_a = (flags & 1) != 0,
                                  .transpose_b = (flags & 2) != 0,
                                  .add_to_c = (flags & 4) != 0,
                                  .rows = rows,
                                  .columns = columns,
                                  .inner = inner,
                                  .a = a.data(),
                                  .b = b.data(),
                                  .c = c.data()};
      const std::vector<Real> wanted = ByDefinition(product, c);
      multiply(product);
      EXPECT_EQ(c, wanted) << rows << "x" << columns << "x" << inner << ", flags " << flags;
    }
  }
}

TEST(MatrixProductTest, IsTheDefinitionsOnThisProcessor) {
  ExpectByDefinition<float>(&Multiply);
  ExpectByDefinition<double>(&Multiply);
}

TEST(MatrixProductTest, IsTheDefinitionsWithSse2) {
  ExpectByDefinition<float>(&sse2::Multiply);
  ExpectByDefinition<double>(&sse2::Multiply);
}

TEST(MatrixProductTest, IsTheDefinitionsWithAvx2) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    GTEST_SKIP() << "this processor has no AVX2";
  }
  ExpectByDefinition<float>(&avx2::Multiply);
  ExpectByDefinition<double>(&avx2::Multiply);
}

}  // namespace
}  // namespace signpost::demo
