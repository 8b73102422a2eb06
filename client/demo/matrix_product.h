// The demo model's matrix products, in one thread: the demo's workers share the machine.

#ifndef SIGNPOST_CLIENT_DEMO_MATRIX_PRODUCT_H_
#define SIGNPOST_CLIENT_DEMO_MATRIX_PRODUCT_H_

#include <cstdint>

namespace signpost::demo {

// c [rows, columns] = a [rows, inner] * b [inner, columns], or c += a * b. All matrices are dense and
// row-major; c overlaps neither a nor b.
template <typename Real>
struct Product {
  bool transpose_a = false;  // a is stored as [inner, rows]
  bool transpose_b = false;  // b is stored as [columns, inner]
  bool add_to_c = false;     // otherwise c is only written
  uint32_t rows, columns, inner;
  const Real* a;
  const Real* b;
  Real* c;
};

// Computes the product with AVX2 and FMA if the processor has both, otherwise with SSE2. The two
// round differently, so the last bits depend on the processor.
void Multiply(const Product<float>& product);
void Multiply(const Product<double>& product);

}  // namespace signpost::demo

#endif  // SIGNPOST_CLIENT_DEMO_MATRIX_PRODUCT_H_
