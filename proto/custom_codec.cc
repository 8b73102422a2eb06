#include "proto/custom_codec.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "google/protobuf/stubs/common.h"
#include "kernels/dense.h"
#include "log/log.h"
#include "proto/payload.h"
#include "proto/signpost_codec.h"

namespace signpost {
namespace {

using kernels::BlockRule;

constexpr size_t kMaxNameBytes = 64;
constexpr size_t kMaxOptionsBytes = 4096;
constexpr uint32_t kMaxCodecBlock = 65536;  // as signpost_codec.h says

constexpr uint8_t kNotPackedMark = 0;
constexpr uint8_t kPackedMark = 1;
constexpr uint8_t kCodecFailedMark = 2;  // never sent

bool AreWithinRange(absl::Span<const float> values) {
  return kernels::DenseWithinRange(kernels::DenseType::kFloat32,
                                   reinterpret_cast<const uint8_t*>(values.data()), values.size());
}

// In [-1, 1), the same on every machine; the small ones are down to 2^-23 of what they were.
std::vector<float> FixedNumbers(uint32_t elements, bool has_small_ones) {
  std::vector<float> numbers(elements);
  uint32_t state = elements;
  for (uint32_t i = 0; i < elements; ++i) {
    state = 1664525 * state + 1013904223;
    numbers[i] = std::ldexp(static_cast<float>(static_cast<int32_t>(state) >> 8),
                            -23 - (has_small_ones ? static_cast<int>(i % 24) : 0));
  }
  return numbers;
}

// Bytes with others before and behind them that nobody should write to. They are aligned to as much
// as said, and to no more, as in a job.
class GuardedBytes {
 public:
  GuardedBytes(size_t size, size_t alignment, uint8_t fill)
      : begin_(kGuard + alignment), fill_(fill), bytes_(begin_ + size + kGuard, fill) {}

  uint8_t* data() { return bytes_.data() + begin_; }
  absl::Span<const uint8_t> span() const {
    return absl::MakeConstSpan(bytes_).subspan(begin_, bytes_.size() - begin_ - kGuard);
  }
  bool is_guard_whole() const {
    const auto is_filled = [this](uint8_t byte) { return byte == fill_; };
    return std::all_of(bytes_.begin(), bytes_.begin() + begin_, is_filled) &&
           std::all_of(bytes_.end() - kGuard, bytes_.end(), is_filled);
  }

 private:
  static constexpr size_t kGuard = 64 << 10;

  const size_t begin_;
  const uint8_t fill_;
  std::vector<uint8_t> bytes_;
};

// What a call throws, as no function of a codec may; empty if nothing.
template <class Call>
std::string ThrownBy(const Call& call) {
  try {
    call();
  } catch (const abi::__forced_unwind&) {
    throw;  // the thread is being cancelled
  } catch (const std::exception& exception) {
    return absl::StrCat("thrown an exception: ", exception.what());
  } catch (...) {
    return "thrown an exception that is no std::exception";
  }
  return "";
}

// A codec that is open. What it throws goes no further: it has failed then.
class OpenState {
 public:
  OpenState(const signpost_codec_v2& codec, void* state) : codec_(codec), state_(state) {}
  ~OpenState() {
    if (codec_.close == nullptr) return;
    Note("close", ThrownBy([this] { codec_.close(state_); }));
  }
  OpenState(const OpenState&) = delete;
  OpenState& operator=(const OpenState&) = delete;

  const char* name() const { return codec_.name; }

  // 0 if it has failed.
  size_t BlockBytes(uint32_t elements) const {
    size_t bytes = 0;
    Note("block_bytes", ThrownBy([&] { bytes = codec_.block_bytes(state_, elements); }));
    return bytes;
  }

  // False if it has thrown: the block may be anything then.
  bool Compress(absl::Span<const float> values, uint8_t* block) const {
    const std::string thrown =
        ThrownBy([&] { codec_.compress(state_, values.data(), values.size(), block); });
    Note("compress", thrown);
    return thrown.empty();
  }

  bool Decompress(const uint8_t* block, uint32_t elements, float* values) const {
    bool is_done = false;
    Note("decompress",
         ThrownBy([&] { is_done = codec_.decompress(state_, block, elements, values) == 0; }));
    return is_done;
  }

  // "compress has thrown an exception: ..."; empty if none has.
  std::string thrown() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return thrown_;
  }

 private:
  void Note(const char* function, const std::string& thrown) const ABSL_LOCKS_EXCLUDED(mutex_) {
    if (thrown.empty()) return;
    absl::MutexLock lock(&mutex_);
    if (!thrown_.empty()) return;
    thrown_ = absl::StrCat(function, " has ", thrown);
    log::Write(log::Level::kError, "signpost",
               absl::StrCat("codec '", codec_.name, "': ", thrown_, ", as it may not"));
  }

  const signpost_codec_v2& codec_;
  void* const state_;
  mutable absl::Mutex mutex_;
  mutable std::string thrown_ ABSL_GUARDED_BY(mutex_);  // the first
};

// CRC-32C of the blocks, and of what they stand for, that a codec makes of such numbers: of a whole
// block and of a short one.
uint32_t DigestOf(const OpenState& codec, uint32_t block_elements) {
  uint32_t digest = 0;
  for (const uint32_t elements : {block_elements, (block_elements + 2) / 3}) {
    for (const bool has_small_ones : {false, true}) {
      const std::vector<float> numbers = FixedNumbers(elements, has_small_ones);
      GuardedBytes block(codec.BlockBytes(elements), /*alignment=*/1, /*fill=*/0);
      codec.Compress(numbers, block.data());
      digest = Crc32c(block.span(), digest);
      GuardedBytes output(elements * sizeof(float), alignof(float), /*fill=*/0);
      float* const values = reinterpret_cast<float*>(output.data());
      if (!codec.Decompress(block.data(), elements, values)) continue;
      digest = Crc32c(output.span(), digest);
    }
  }
  return digest;
}

class CodecFromOutside final : public NumberCodec {
 public:
  CodecFromOutside(std::unique_ptr<const OpenState> codec, uint32_t block_elements,
                   size_t block_bytes)
      : codec_(std::move(codec)),
        block_elements_(block_elements),
        stride_(1 + block_bytes),
        digest_(DigestOf(*codec_, block_elements)) {}

  size_t block_bytes() const { return stride_ - 1; }

  std::string WhatItWritesOutside(absl::Span<const float> values) const {
    for (const uint8_t fill : {0x00, 0xa5}) {  // what is written may be the same by chance
      GuardedBytes input(values.size() * sizeof(float), alignof(float), fill);
      std::memcpy(input.data(), values.data(), values.size() * sizeof(float));
      GuardedBytes block(codec_->BlockBytes(values.size()), /*alignment=*/1, fill);
      codec_->Compress({reinterpret_cast<const float*>(input.data()), values.size()}, block.data());
      if (!block.is_guard_whole()) return "compress writes outside of its block";
      GuardedBytes output(values.size() * sizeof(float), alignof(float), fill);
      codec_->Decompress(block.data(), values.size(), reinterpret_cast<float*>(output.data()));
      if (!output.is_guard_whole()) return "decompress writes outside of its values";
    }
    return codec_->thrown();
  }

  uint32_t digest() const { return digest_; }

  // INTERNAL if it can do nothing more, or has thrown: whatever comes out then is nobody else's
  // fault.
  absl::Status CheckThatItWorks() const {
    if (const std::string thrown = codec_->thrown(); !thrown.empty()) {
      return absl::InternalError(absl::StrCat("codec '", codec_->name(), "': ", thrown,
                                              ", as it may not: a defect of the codec"));
    }
    if (codec_->BlockBytes(block_elements_) != 0) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(
        "codec '", codec_->name(),
        "' has ended, and can do nothing more for this job: what it wrote before, on the standard "
        "error of the process that has it, may say why. The next job opens it anew"));
  }

  absl::Status Check(const Layout& layout, uint32_t chunk, const uint8_t* payload) const override {
    const uint32_t block_elements = layout.options().block_elements();
    std::vector<float> values(block_elements);
    absl::Status status;
    ForEachBlock(layout.chunks()[chunk], block_elements, [&](const Segment& block) {
      const uint8_t* const at = At(block, payload);
      const absl::Span<float> there = absl::MakeSpan(values).first(block.elements);
      if (!status.ok() || (*at == kPackedMark && Unpack(at, there) && HasZerosBehind(at, block))) {
        return;
      }
      status = CheckThatItWorks();
      if (!status.ok()) return;
      status = absl::InvalidArgumentError(absl::StrCat(
          "codec '", codec_->name(), "' can have made no such block as ", block.first_block, " (",
          layout.DescribeBlock(chunk, block.first_block), ")"));
    });
    return status;
  }

  size_t Compress(const BlockRule& rule, const Chunk&, const Segment& part,
                  absl::Span<const float> values, absl::Span<float> error,
                  uint8_t* payload) const override {
    std::vector<float> u(rule.block_elements), packed(rule.block_elements);
    const uint32_t blocks = kernels::BlockCount(part.elements, rule.block_elements);
    uint32_t first_not_packed = blocks;
    ForEachBlock(part, rule.block_elements, [&](const Segment& block) {
      const size_t begin = block.chunk_offset - part.chunk_offset;
      const absl::Span<float> input = absl::MakeSpan(u).first(block.elements);
      const absl::Span<float> output = absl::MakeSpan(packed).first(block.elements);
      for (size_t i = 0; i < input.size(); ++i) input[i] = values[begin + i] + error[begin + i];
      if (Pack(input, At(block, payload), output)) {
        for (size_t i = 0; i < input.size(); ++i) error[begin + i] = input[i] - output[i];
      } else {
        first_not_packed = std::min(first_not_packed, block.first_block - part.first_block);
      }
    });
    return first_not_packed;
  }

  size_t Aggregate(const BlockRule& rule, const Chunk& chunk, const Segment& part,
                   absl::Span<const uint8_t* const> contributions, float inverse_count,
                   absl::Span<float> error, uint8_t* out) const override {
    std::vector<std::vector<float>> ranks(contributions.size(),
                                          std::vector<float>(rule.block_elements));
    std::vector<const uint8_t*> as_dense;
    for (const std::vector<float>& rank : ranks) {
      as_dense.push_back(reinterpret_cast<const uint8_t*>(rank.data()));
    }
    std::vector<float> mean(rule.block_elements);
    const uint32_t blocks = kernels::BlockCount(part.elements, rule.block_elements);
    uint32_t first_not_packed = blocks;
    ForEachBlock(part, rule.block_elements, [&](const Segment& block) {
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        Decompress(rule, chunk, block, contributions[rank],
                   absl::MakeSpan(ranks[rank]).first(block.elements));
      }
      kernels::AggregateDense(kernels::DenseType::kFloat32, as_dense, block.elements, inverse_count,
                              /*error=*/{}, reinterpret_cast<uint8_t*>(mean.data()));
      const absl::Span<float> error_there =
          error.subspan(block.chunk_offset - part.chunk_offset, block.elements);
      if (Compress(rule, chunk, block, absl::MakeConstSpan(mean).first(block.elements), error_there,
                   out) == 0) {
        first_not_packed = std::min(first_not_packed, block.first_block - part.first_block);
      }
    });
    return first_not_packed;
  }

  void Decompress(const BlockRule& rule, const Chunk&, const Segment& part, const uint8_t* payload,
                  absl::Span<float> values) const override {
    ForEachBlock(part, rule.block_elements, [&](const Segment& block) {
      const size_t begin = block.chunk_offset - part.chunk_offset;
      const absl::Span<float> there = values.subspan(begin, block.elements);
      // CheckFrame has had it decompressed: a codec that fails now does not keep its promises.
      if (Unpack(At(block, payload), there)) return;
      std::fill(there.begin(), there.end(), kernels::kNotPacked);
    });
  }

  void Add(const BlockRule& rule, const Chunk& chunk, const Segment& part, const uint8_t* payload,
           float factor, absl::Span<float> accumulator) const override {
    std::vector<float> values(part.elements);
    Decompress(rule, chunk, part, payload, absl::MakeSpan(values));
    for (size_t i = 0; i < values.size(); ++i) {
      accumulator[i] = accumulator[i] + factor * values[i];
    }
  }

  bool IsPacked(const Chunk&, const Segment& part, const uint8_t* payload) const override {
    return *At(part, payload) == kPackedMark;
  }

  absl::Status CheckCodecItself(const Layout& layout, uint32_t chunk, uint32_t block,
                                const uint8_t* payload) const override {
    if (absl::Status status = CheckThatItWorks(); !status.ok()) return status;
    if (payload[stride_ * block] != kCodecFailedMark) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(
        "codec '", codec_->name(), "' cannot decompress what it made of finite numbers in block ",
        block, " (", layout.DescribeBlock(chunk, block),
        "): 'signpost codec check' shows what it does wrong"));
  }

 private:
  template <class Bytes>
  Bytes* At(const Segment& block, Bytes* payload) const {
    return payload + stride_ * block.first_block;
  }

  // Writes a block, and what it stands for to `packed`; or that it is not packed.
  bool Pack(absl::Span<const float> input, uint8_t* at, absl::Span<float> packed) const {
    const size_t bytes = std::min(codec_->BlockBytes(input.size()), stride_ - 1);
    std::memset(at + 1 + bytes, 0, stride_ - 1 - bytes);
    *at = kNotPackedMark;
    if (!AreWithinRange(input)) return false;
    if (!codec_->Compress(input, at + 1)) {
      std::memset(at + 1, 0, stride_ - 1);  // whatever was in this memory before
      *at = kCodecFailedMark;
      return false;
    }
    const bool is_unpacked = codec_->Decompress(at + 1, packed.size(), packed.data());
    if (is_unpacked && AreWithinRange(packed)) {
      *at = kPackedMark;
      return true;
    }
    const auto is_finite = [](float value) { return std::isfinite(value); };
    if (!is_unpacked || !absl::c_all_of(packed, is_finite)) *at = kCodecFailedMark;
    return false;
  }

  bool Unpack(const uint8_t* at, absl::Span<float> values) const {
    return codec_->Decompress(at + 1, values.size(), values.data()) && AreWithinRange(values);
  }

  bool HasZerosBehind(const uint8_t* at, const Segment& block) const {
    const uint8_t* const end = at + 1 + codec_->BlockBytes(block.elements);
    return std::all_of(end, at + stride_, [](uint8_t byte) { return byte == 0; });
  }

  const std::unique_ptr<const OpenState> codec_;
  const uint32_t block_elements_;
  const size_t stride_;
  const uint32_t digest_;
};

// What this process has loaded, which stays, and what of it is open.
class Codecs {
 public:
  using Shared = std::shared_ptr<const CodecFromOutside>;

  static Codecs& OfProcess() {
    static auto* const codecs = new Codecs();
    return *codecs;
  }

  absl::Status Add(const std::string& path, const signpost_codec_v2& codec)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    const auto [before, is_new] = libraries_.try_emplace(codec.name, &codec);
    if (is_new || before->second == &codec) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": another codec '", codec.name, "' is loaded already"));
  }

  const signpost_codec_v2* Find(const std::string& name) const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    const auto library = libraries_.find(name);
    return library == libraries_.end() ? nullptr : library->second;
  }

  std::string Names() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    std::string names;
    for (const auto& [name, library] : libraries_) {
      absl::StrAppend(&names, names.empty() ? "" : ", ", name, " ", library->version);
    }
    return names.empty() ? "none" : names;
  }

  // Opens it, unless it is.
  absl::StatusOr<Shared> Open(const signpost_codec_v2& codec, const std::string& options,
                              uint32_t block_elements) ABSL_LOCKS_EXCLUDED(mutex_, opening_) {
    if (block_elements == 0 || block_elements > kMaxCodecBlock) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "blocks of %d numbers (block_elements, or as DeepSpeed those of the largest tensor); a "
          "codec takes 1 to %d",
          block_elements, kMaxCodecBlock));
    }
    if (options.find('\0') != std::string::npos) {
      return absl::InvalidArgumentError("a codec's options end with a 0, and have none before");
    }
    // As a string field must be: what is not does not travel.
    if (!google::protobuf::internal::IsStructurallyValidUTF8(options.data(),
                                                             static_cast<int>(options.size()))) {
      return absl::InvalidArgumentError("a codec's options (codec_options) must be UTF-8");
    }
    const Key key = {codec.name, options, block_elements};
    if (Shared open = FindOpen(key)) return open;
    // Codecs that are open need not wait for one that takes its time to open.
    absl::MutexLock opening(&opening_);
    if (Shared open = FindOpen(key)) return open;
    if (CountOpen() >= kMostOpen) {
      return absl::ResourceExhaustedError(absl::StrCat(
          kMostOpen,
          " codecs are open, of other names, options or blocks: the most that may be at a time"));
    }
    absl::StatusOr<Shared> opened = OpenAnew(codec, options, block_elements);
    if (!opened.ok()) return opened;
    absl::MutexLock lock(&mutex_);
    open_[key] = *opened;
    return opened;
  }

 private:
  using Key = std::tuple<std::string, std::string, uint32_t>;  // name, options, block_elements

  static constexpr size_t kMostOpen = 64;  // jobs come from anybody

  // Null if it is not open, or open and good for nothing more.
  Shared FindOpen(const Key& key) const ABSL_LOCKS_EXCLUDED(mutex_) {
    Shared found;
    {
      absl::MutexLock lock(&mutex_);
      const auto open = open_.find(key);
      if (open != open_.end()) found = open->second.lock();
    }
    return found != nullptr && found->CheckThatItWorks().ok() ? found : nullptr;
  }

  size_t CountOpen() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    std::erase_if(open_, [](const auto& open) { return open.second.expired(); });
    return open_.size();
  }

  // Closes it again if it breaks the rules for a block's bytes.
  static absl::StatusOr<Shared> OpenAnew(const signpost_codec_v2& codec, const std::string& options,
                                         uint32_t block_elements) {
    char error[1024] = "";
    void* opened = nullptr;
    const std::string thrown =
        ThrownBy([&] { opened = codec.open(options.c_str(), error, sizeof error); });
    if (!thrown.empty()) {
      return absl::InternalError(absl::StrCat("codec '", codec.name, "': open has ", thrown));
    }
    error[sizeof error - 1] = '\0';
    if (opened == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("codec '", codec.name, "' does not take the options '", options,
                       "': ", *error == '\0' ? "it does not say why" : error));
    }
    auto state = std::make_unique<const OpenState>(codec, opened);
    const size_t most = state->BlockBytes(block_elements);
    if (most > size_t{16} * block_elements + 4096) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "codec '%s' wants %d bytes for a block of %d numbers", codec.name, most, block_elements));
    }
    for (uint32_t elements = 1; elements <= block_elements; ++elements) {
      const size_t bytes = state->BlockBytes(elements);
      if (const std::string why = state->thrown(); !why.empty()) {
        return absl::InternalError(absl::StrCat("codec '", codec.name, "': ", why));
      }
      if (bytes >= 1 && bytes <= most) continue;
      return absl::InvalidArgumentError(absl::StrFormat(
          "codec '%s' wants %d bytes for a block of %d numbers, and %d for one of %d; it must be "
          "at least 1, and no more for fewer",
          codec.name, bytes, elements, most, block_elements));
    }
    auto made = std::make_shared<const CodecFromOutside>(std::move(state), block_elements, most);
    const std::string trouble =
        made->WhatItWritesOutside(FixedNumbers(block_elements, /*has_small_ones=*/false));
    if (trouble.empty()) return made;
    return absl::InvalidArgumentError(
        absl::StrCat("codec '", codec.name, "': ", trouble, ", of ", block_elements, " numbers"));
  }

  absl::Mutex opening_;  // held while a codec opens
  mutable absl::Mutex mutex_;
  std::map<std::string, const signpost_codec_v2*> libraries_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, std::weak_ptr<const CodecFromOutside>> open_ ABSL_GUARDED_BY(mutex_);
};

bool IsName(const char* name) {
  if (name == nullptr || *name == '\0' || std::strlen(name) > kMaxNameBytes) return false;
  return std::all_of(name, name + std::strlen(name), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
  });
}

}  // namespace

absl::StatusOr<std::string> LoadCodecLibrary(const std::string& path) {
  // With a slash, or the loader looks elsewhere.
  const std::string file = path.find('/') == std::string::npos ? absl::StrCat("./", path) : path;
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("codec library ", path, ": ", dlerror()));
  }
  const auto entry =
      reinterpret_cast<const signpost_codec_v2* (*)()>(dlsym(library, "signpost_codec"));
  if (entry == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("codec library ", path, " has no function signpost_codec (signpost_codec.h)"));
  }
  const signpost_codec_v2* codec = nullptr;
  if (const std::string thrown = ThrownBy([&] { codec = entry(); }); !thrown.empty()) {
    return absl::InternalError(
        absl::StrCat("codec library ", path, ": signpost_codec has ", thrown));
  }
  if (codec == nullptr || codec->abi != SIGNPOST_CODEC_ABI) {
    return absl::InvalidArgumentError(
        absl::StrCat("codec library ", path, " is for another version of signpost_codec.h: ",
                     codec == nullptr ? 0 : codec->abi, ", wanted ", SIGNPOST_CODEC_ABI));
  }
  if (!IsName(codec->name) || !IsName(codec->version)) {
    return absl::InvalidArgumentError(
        absl::StrCat("codec library ", path,
                     ": name and version are wanted, of small letters, digits, '-', '_' and '.'"));
  }
  if (codec->open == nullptr || codec->block_bytes == nullptr || codec->compress == nullptr ||
      codec->decompress == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("codec library ", path,
                     " lacks a function: open, block_bytes, compress and decompress are wanted"));
  }
  if (absl::Status status = Codecs::OfProcess().Add(path, *codec); !status.ok()) return status;
  return codec->name;
}

absl::StatusOr<OpenCustomCodec> OpenCodec(const std::string& name, const std::string& options,
                                          uint32_t block_elements) {
  const signpost_codec_v2* const codec = Codecs::OfProcess().Find(name);
  if (codec == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("no codec '", name, "' has been loaded"));
  }
  absl::StatusOr<Codecs::Shared> open = Codecs::OfProcess().Open(*codec, options, block_elements);
  if (!open.ok()) return open.status();
  OpenCustomCodec opened;
  opened.description.set_name(name);
  opened.description.set_version(codec->version);
  opened.description.set_options(options);
  opened.description.set_block_elements(block_elements);
  opened.description.set_block_bytes((*open)->block_bytes());
  opened.description.set_digest((*open)->digest());
  opened.codec = *std::move(open);
  return opened;
}

std::string WhatItWritesOutside(const OpenCustomCodec& codec, absl::Span<const float> values) {
  return static_cast<const CodecFromOutside&>(*codec.codec).WhatItWritesOutside(values);
}

absl::StatusOr<std::shared_ptr<const NumberCodec>> OpenCodecOf(const CustomCodec& wanted,
                                                               uint32_t block_elements) {
  if (wanted.name().size() > kMaxNameBytes || wanted.options().size() > kMaxOptionsBytes) {
    return absl::InvalidArgumentError("the custom codec's name or options are too long");
  }
  const signpost_codec_v2* const codec = Codecs::OfProcess().Find(wanted.name());
  if (codec == nullptr || wanted.version() != codec->version) {
    return absl::FailedPreconditionError(
        absl::StrCat("the job wants codec '", wanted.name(), "' of version ", wanted.version(),
                     "; codecs loaded here: ", Codecs::OfProcess().Names(),
                     ". Workers and aggregators need the same shared object (--codec-library)"));
  }
  const absl::StatusOr<OpenCustomCodec> opened =
      OpenCodec(wanted.name(), wanted.options(), block_elements);
  if (!opened.ok()) return opened.status();
  const CustomCodec& here = opened->description;
  if (wanted.block_bytes() != here.block_bytes() || wanted.block_elements() != block_elements) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "codec '%s' of version %s takes %d bytes for a block of %d here, and %d at the worker: it "
        "is not the same",
        wanted.name(), wanted.version(), here.block_bytes(), block_elements, wanted.block_bytes()));
  }
  if (wanted.digest() == here.digest()) return opened->codec;
  return absl::FailedPreconditionError(absl::StrFormat(
      "codec '%s' of version %s makes something else of the same numbers here than at the worker "
      "(digest %08x, wanted %08x): it has changed without a new version. Workers and aggregators "
      "need the same shared object (--codec-library)",
      wanted.name(), wanted.version(), here.digest(), wanted.digest()));
}

}  // namespace signpost
