// The product of matrix_product.h for each instruction set. matrix_product_target.cc is compiled once
// for each of these namespaces; the caller checks that the processor has the instructions.

#ifndef SIGNPOST_CLIENT_DEMO_MATRIX_PRODUCT_TARGET_H_
#define SIGNPOST_CLIENT_DEMO_MATRIX_PRODUCT_TARGET_H_

#include "client/demo/matrix_product.h"

namespace signpost::demo {

namespace sse2 {
void Multiply(const Product<float>& product);
void Multiply(const Product<double>& product);
}  // namespace sse2

namespace avx2 {  // and FMA
void Multiply(const Product<float>& product);
void Multiply(const Product<double>& product);
}  // namespace avx2

}  // namespace signpost::demo

#endif  // SIGNPOST_CLIENT_DEMO_MATRIX_PRODUCT_TARGET_H_
