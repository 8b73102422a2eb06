#include "bench/traffic.h"

#include "kernels/block.h"
#include "kernels/highway_targets.h"

// Compiles traffic-inl.h once per target.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/traffic-inl.h"
#include "hwy/foreach_target.h"
#include "bench/traffic-inl.h"

namespace signpost::bench {

HWY_EXPORT(GoThrough);

namespace {

constexpr size_t kBlockElements = kernels::BlockRule().block_elements;

}  // namespace

double BytesOf(const Streams& streams) {
  double bytes = 0;
  for (const Stream& stream : streams) {
    bytes += stream.use == Stream::Use::kChange ? 2 * stream.bytes : stream.bytes;
  }
  return bytes;
}

Traffic::Traffic(const Streams& streams, size_t elements)
    : blocks_(kernels::BlockCount(elements, kBlockElements)) {
  for (const auto& [use, bytes] : streams) {
    // Whole lines: a block's bits are eight.
    const auto of_block = static_cast<size_t>(bytes * kBlockElements);
    arrays_.push_back({use, of_block, BlockVector<uint8_t>(of_block * blocks_, uint8_t{1})});
  }
}

size_t Traffic::bytes() const {
  size_t bytes = 0;
  for (const Array& array : arrays_) bytes += array.bytes.size();
  return bytes;
}

void Traffic::Run() {
  checksum_ = 0;
  for (size_t block = 0; block < blocks_; ++block) {
    for (Array& array : arrays_) {
      uint8_t* const begin = array.bytes.data() + block * array.block_bytes;
      checksum_ += HWY_DYNAMIC_DISPATCH(GoThrough)(array.use, begin, array.block_bytes);
    }
  }
  hwy::FlushStream();
}

}  // namespace signpost::bench
