#include "proto/layout.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <limits>
#include <queue>
#include <string>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/base/internal/raw_logging.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/stubs/common.h"
#include "kernels/block.h"

namespace signpost {
namespace {

// Error feedback diverges from here on (ARCHITECTURE.md).
constexpr float kGammaLimit = 1.6f;

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// As many digits as tell it from every other float: "1.35".
std::string Shortest(float value) {
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof(text), value).ptr);
}

absl::Status CheckOptions(const JobOptions& options) {
  const uint32_t block = options.block_elements();
  if (block == 0 || block % 8 != 0 || block > kMaxBlockElements) {
    return Invalid("option block_elements is ", block,
                   "; it must be a positive multiple of 8, at most ", kMaxBlockElements);
  }
  const uint32_t chunk = options.chunk_elements();
  if (chunk == 0 || chunk % block != 0 || chunk > kMaxChunkElements) {
    return Invalid("option chunk_elements is ", chunk,
                   "; it must be a positive multiple of block_elements (", block, "), at most ",
                   kMaxChunkElements);
  }
  if (!(options.gamma() > 0 && options.gamma() < kGammaLimit)) {
    return Invalid("option gamma is ", Shortest(options.gamma()),
                   "; it must be above 0 and below 1.6, from where on error feedback diverges");
  }
  if (options.optimizer().size() > kMaxOptimizerBytes) {
    return Invalid("option optimizer has ", options.optimizer().size(), " bytes; at most ",
                   kMaxOptimizerBytes);
  }
  if (options.state_numbers() > kMaxStateNumbers) {
    return Invalid("option state_numbers is ", options.state_numbers(), "; at most ",
                   kMaxStateNumbers);
  }
  return absl::OkStatus();
}

// As a string field must be: what is not does not travel.
bool IsUtf8(absl::string_view text) {
  return google::protobuf::internal::IsStructurallyValidUTF8(text.data(),
                                                             static_cast<int>(text.size()));
}

absl::Status CheckTensor(const Tensor& tensor, size_t index) {
  if (tensor.name().empty()) return Invalid("tensor ", index, " has no name");
  if (!IsUtf8(tensor.name())) return Invalid("the name of tensor ", index, " is not UTF-8");
  if (tensor.name().size() > kMaxTensorNameBytes) {
    return Invalid("the name of tensor ", index, " has ", tensor.name().size(), " bytes; at most ",
                   kMaxTensorNameBytes);
  }
  if (tensor.shape_size() > kMaxTensorDimensions) {
    return Invalid("tensor ", index, " has ", tensor.shape_size(), " dimensions; at most ",
                   kMaxTensorDimensions);
  }
  for (const uint64_t dimension : tensor.shape()) {
    if (dimension == 0) {
      return Invalid("tensor ", index, ", ", DescribeTensor(tensor), ", has a zero dimension");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTensors(absl::Span<const Tensor> tensors) {
  if (tensors.empty()) return Invalid("a job needs at least one tensor");
  if (tensors.size() > kMaxTensors) {
    return Invalid("the job has ", tensors.size(), " tensors; at most ", kMaxTensors);
  }
  absl::flat_hash_set<absl::string_view> names;
  uint64_t elements = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (absl::Status status = CheckTensor(tensors[i], i); !status.ok()) return status;
    if (!names.insert(tensors[i].name()).second) {
      return Invalid("tensor ", i, ", ", DescribeTensor(tensors[i]),
                     ", has the name of an earlier one");
    }
    const uint64_t count = ElementCount(tensors[i]);
    if (count > kMaxElements - elements) {
      return Invalid("with tensor ", i, ", ", DescribeTensor(tensors[i]),
                     ", the job has more than ", kMaxElements, " elements");
    }
    elements += count;
  }
  return absl::OkStatus();
}

// Where blocks begin and end, as positions in the job's elements. There can be 2^37 of them, so
// they are computed from where the tensors begin, never listed.
class Boundaries {
 public:
  Boundaries(absl::Span<const Tensor> tensors, uint64_t block_elements)
      : block_elements_(block_elements) {
    tensor_begins_.reserve(tensors.size() + 1);
    tensor_begins_.push_back(0);
    for (const Tensor& tensor : tensors) {
      tensor_begins_.push_back(tensor_begins_.back() + ElementCount(tensor));
    }
  }

  uint64_t end() const { return tensor_begins_.back(); }
  uint64_t TensorBegin(size_t tensor) const { return tensor_begins_[tensor]; }

  // The tensor that the element belongs to; element < end().
  size_t TensorOf(uint64_t element) const {
    return std::upper_bound(tensor_begins_.begin(), tensor_begins_.end(), element) -
           tensor_begins_.begin() - 1;
  }

  uint64_t AtOrBefore(uint64_t element) const {
    if (element >= end()) return end();
    const uint64_t begin = TensorBegin(TensorOf(element));
    return begin + (element - begin) / block_elements_ * block_elements_;
  }

  uint64_t AtOrAfter(uint64_t element) const {
    const uint64_t before = AtOrBefore(element);
    if (before >= element) return before;
    return std::min(before + block_elements_, TensorBegin(TensorOf(element) + 1));
  }

  // The earlier one of two that are equally near.
  uint64_t Nearest(uint64_t element) const {
    const uint64_t before = AtOrBefore(element), after = AtOrAfter(element);
    return element - before <= after - element ? before : after;
  }

 private:
  uint64_t block_elements_;
  std::vector<uint64_t> tensor_begins_;  // and the end of the last one
};

// For each chunk of the least number of chunks, the earliest boundary at which it may begin such
// that it and those behind it hold the rest of the job: chunks filled from the back. Empty when
// that takes more than kMaxChunks.
std::vector<uint64_t> EarliestBegins(const Boundaries& boundaries, uint64_t chunk_elements) {
  std::vector<uint64_t> begins;
  for (uint64_t begin = boundaries.end(); begin > 0;) {
    if (begins.size() == kMaxChunks) return {};
    begin = begin > chunk_elements ? boundaries.AtOrAfter(begin - chunk_elements) : 0;
    begins.push_back(begin);
  }
  std::reverse(begins.begin(), begins.end());
  return begins;
}

// Where each chunk begins: at the boundary nearest to its even share of the job, but neither so
// early that the rest does not fit nor so late that the chunk before overflows. Both ends of that
// range are boundaries and it is never empty: begin[k-1] >= earliest[k-1] >= earliest[k] -
// chunk_elements. No chunk is empty, because without it fewer chunks would do.
std::vector<uint64_t> ChunkBegins(const Boundaries& boundaries, uint64_t chunk_elements) {
  const std::vector<uint64_t> earliest = EarliestBegins(boundaries, chunk_elements);
  std::vector<uint64_t> begins;
  begins.reserve(earliest.size());
  for (uint64_t k = 0; k < earliest.size(); ++k) {
    if (k == 0) {
      begins.push_back(0);
      continue;
    }
    // At most 2^40 elements times 2^20 chunks: no overflow.
    const uint64_t even = boundaries.Nearest(boundaries.end() * k / earliest.size());
    const uint64_t latest = boundaries.AtOrBefore(begins.back() + chunk_elements);
    begins.push_back(std::clamp(even, earliest[k], latest));
  }
  return begins;
}

Chunk MakeChunk(const Boundaries& boundaries, uint64_t begin, uint64_t end,
                uint32_t block_elements) {
  Chunk chunk;
  chunk.first_element = begin;
  for (size_t tensor = boundaries.TensorOf(begin); begin < end; ++tensor) {
    const uint64_t segment_end = std::min(end, boundaries.TensorBegin(tensor + 1));
    Segment segment;
    segment.tensor = static_cast<uint32_t>(tensor);
    segment.tensor_offset = begin - boundaries.TensorBegin(tensor);
    segment.elements = static_cast<uint32_t>(segment_end - begin);
    segment.chunk_offset = chunk.elements;
    segment.first_block = chunk.blocks;
    segment.bits_offset = chunk.sign_bytes;
    chunk.elements += segment.elements;
    chunk.blocks += kernels::BlockCount(segment.elements, block_elements);
    chunk.sign_bytes += kernels::SignBytes(segment.elements);
    chunk.segments.push_back(segment);
    begin = segment_end;
  }
  return chunk;
}

// FNV-1a over little-endian bytes: http://www.isthe.com/chongo/tech/comp/fnv/
class Fnv1a {
 public:
  void Add(absl::string_view bytes) {
    Add(bytes.size());
    for (const char byte : bytes) AddByte(static_cast<uint8_t>(byte));
  }
  void Add(uint64_t number) {
    for (int shift = 0; shift < 64; shift += 8) AddByte(static_cast<uint8_t>(number >> shift));
  }
  uint64_t hash() const { return hash_; }

 private:
  void AddByte(uint8_t byte) { hash_ = (hash_ ^ byte) * 0x100000001b3; }

  uint64_t hash_ = 0xcbf29ce484222325;
};

// What one side says about tensor `index`.
std::string DescribeEntry(absl::Span<const Tensor> tensors, size_t index) {
  return index < tensors.size() ? DescribeTensor(tensors[index]) : "missing";
}

bool SameTensor(const Tensor& a, const Tensor& b) {
  return a.name() == b.name() &&
         std::equal(a.shape().begin(), a.shape().end(), b.shape().begin(), b.shape().end());
}

template <typename... Hint>
absl::Status Differs(absl::string_view what, absl::string_view here, absl::string_view in_the_job,
                     const Hint&... hint) {
  return absl::FailedPreconditionError(
      absl::StrCat(what, " is ", here, " here but ", in_the_job, " in the job", hint...));
}

absl::Status CheckSameTensors(absl::Span<const Tensor> theirs, absl::Span<const Tensor> jobs) {
  const size_t common = std::min(theirs.size(), jobs.size());
  size_t first = 0;
  while (first < common && SameTensor(theirs[first], jobs[first])) ++first;
  if (first == theirs.size() && first == jobs.size()) return absl::OkStatus();
  return Differs(absl::StrCat("tensor ", first), DescribeEntry(theirs, first),
                 DescribeEntry(jobs, first));
}

// What JobOptions.optimizer leaves out where it is so.
constexpr absl::string_view kUnlessSaid[] = {"codec=onebit", "variance_codec=fp32", "compat=none"};

std::vector<std::string> WordsOf(const std::string& optimizer) {
  std::vector<std::string> words = absl::StrSplit(optimizer, ' ');
  for (const absl::string_view word : kUnlessSaid) {
    const absl::string_view option = word.substr(0, word.find('=') + 1);
    if (absl::c_none_of(words, [&](const auto& said) { return absl::StartsWith(said, option); })) {
      words.emplace_back(word);
    }
  }
  return words;
}

// "'freeze_step=5'": the words of one job's optimizer that are not in another's.
std::string WordsNotIn(const std::string& other, const std::string& optimizer) {
  const std::vector<std::string> others = WordsOf(other);
  std::vector<std::string> words = WordsOf(optimizer);
  std::erase_if(words,
                [&](const std::string& word) { return absl::c_linear_search(others, word); });
  return absl::StrCat("'", absl::Utf8SafeCHexEscape(absl::StrJoin(words, " ")), "'");
}

std::string Describe(const CustomCodec& codec) {
  if (codec.name().empty()) return "none";
  return absl::StrFormat(
      "'%s' version '%s' with options '%s', %d bytes for a block of %d",
      absl::Utf8SafeCHexEscape(codec.name()), absl::Utf8SafeCHexEscape(codec.version()),
      absl::Utf8SafeCHexEscape(codec.options()), codec.block_bytes(), codec.block_elements());
}

// An aggregator compares a rank's with its own before: those of a job that is resumed are left.
absl::Status CheckSameDigest(const CustomCodec& theirs, const CustomCodec& jobs) {
  // 0 is not known: checkpoints had none once.
  const bool both_are_known = theirs.digest() != 0 && jobs.digest() != 0;
  if (!both_are_known || theirs.digest() == jobs.digest()) return absl::OkStatus();
  return Differs(absl::StrFormat("the digest of what codec '%s' of version '%s' makes of numbers",
                                 absl::Utf8SafeCHexEscape(jobs.name()),
                                 absl::Utf8SafeCHexEscape(jobs.version())),
                 absl::StrFormat("%08x", theirs.digest()), absl::StrFormat("%08x", jobs.digest()),
                 ": it has changed without a new version; use the shared object that the job had");
}

absl::Status CheckSameOptions(const JobOptions& theirs, const JobOptions& jobs) {
  if (theirs.block_elements() != jobs.block_elements()) {
    return Differs("option block_elements", absl::StrCat(theirs.block_elements()),
                   absl::StrCat(jobs.block_elements()));
  }
  if (theirs.chunk_elements() != jobs.chunk_elements()) {
    return Differs("option chunk_elements", absl::StrCat(theirs.chunk_elements()),
                   absl::StrCat(jobs.chunk_elements()));
  }
  if (theirs.gamma() != jobs.gamma()) {
    return Differs("option gamma", Shortest(theirs.gamma()), Shortest(jobs.gamma()));
  }
  if (theirs.optimizer() != jobs.optimizer()) {
    return Differs("option optimizer", WordsNotIn(jobs.optimizer(), theirs.optimizer()),
                   WordsNotIn(theirs.optimizer(), jobs.optimizer()));
  }
  if (theirs.state_numbers() != jobs.state_numbers()) {
    return Differs("option state_numbers", absl::StrCat(theirs.state_numbers()),
                   absl::StrCat(jobs.state_numbers()));
  }
  if (Describe(theirs.custom_codec()) != Describe(jobs.custom_codec())) {
    return Differs("option custom_codec", Describe(theirs.custom_codec()),
                   Describe(jobs.custom_codec()));
  }
  absl::Status digest = CheckSameDigest(theirs.custom_codec(), jobs.custom_codec());
  if (!digest.ok()) return digest;
  if (theirs.sum() != jobs.sum()) {
    return Differs("option sum", theirs.sum() ? "true" : "false", jobs.sum() ? "true" : "false");
  }
  if (theirs.round_deadline_us() != jobs.round_deadline_us()) {
    return Differs("option round_deadline_us", absl::StrCat(theirs.round_deadline_us()),
                   absl::StrCat(jobs.round_deadline_us()));
  }
  if (theirs.min_workers() != jobs.min_workers()) {
    return Differs("option min_workers", absl::StrCat(theirs.min_workers()),
                   absl::StrCat(jobs.min_workers()));
  }
  if (theirs.first_step() != jobs.first_step()) {
    return Differs("option first_step", absl::StrCat(theirs.first_step()),
                   absl::StrCat(jobs.first_step()),
                   ": all workers must start anew, or resume from the same checkpoint");
  }
  if (theirs.local_steps() != jobs.local_steps()) {
    return Differs("option local_steps", absl::StrCat(theirs.local_steps()),
                   absl::StrCat(jobs.local_steps()),
                   ": all workers must resume from the same checkpoint");
  }
  if (theirs.parameters_crc32c() != jobs.parameters_crc32c()) {
    return Differs("option parameters_crc32c", absl::StrFormat("%08x", theirs.parameters_crc32c()),
                   absl::StrFormat("%08x", jobs.parameters_crc32c()),
                   ": all workers must start from the same parameters; use the same seed or "
                   "load the same checkpoint");
  }
  return absl::OkStatus();
}

}  // namespace

// Whether a terminal that shows the UTF-8 may do otherwise than to show it: C1's control characters
// (U+0080 to 9F), and those that end lines or turn their direction (U+200E, 200F, 2028 to 202E,
// 2066 to 2069).
bool HasHiddenControls(absl::string_view name) {
  for (size_t i = 0; i + 1 < name.size(); ++i) {
    const auto byte = [&](size_t k) {
      return i + k < name.size() ? static_cast<uint8_t>(name[i + k]) : 0;
    };
    if (byte(0) == 0xc2 && byte(1) >= 0x80 && byte(1) < 0xa0) return true;
    if (byte(0) != 0xe2) continue;
    const uint32_t point = 0x2000 | (byte(1) & 0x3f) << 6 | (byte(2) & 0x3f);
    if (point == 0x200e || point == 0x200f || (point >= 0x2028 && point <= 0x202e) ||
        (point >= 0x2066 && point <= 0x2069)) {
      return true;
    }
  }
  return false;
}

absl::Status CheckJobName(absl::string_view name) {
  if (name.empty() || name.size() > kMaxJobNameBytes) {
    return Invalid("a job's name has 1 to ", kMaxJobNameBytes, " bytes; this one has ",
                   name.size());
  }
  if (IsUtf8(name) && std::none_of(name.begin(), name.end(), absl::ascii_iscntrl) &&
      !HasHiddenControls(name)) {
    return absl::OkStatus();
  }
  return Invalid("the job's name '", absl::CHexEscape(name),
                 "' is not text in UTF-8 without control characters");
}

absl::StatusOr<Layout> Layout::Create(absl::Span<const Tensor> tensors, const JobOptions& options) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  if (absl::Status status = CheckTensors(tensors); !status.ok()) return status;
  const Boundaries boundaries(tensors, options.block_elements());
  std::vector<uint64_t> begins = ChunkBegins(boundaries, options.chunk_elements());
  if (begins.empty()) {
    return Invalid("the job's ", boundaries.end(), " elements make more than ", kMaxChunks,
                   " chunks of chunk_elements = ", options.chunk_elements(),
                   "; make chunk_elements larger");
  }
  Layout layout;
  layout.tensors_.assign(tensors.begin(), tensors.end());
  layout.options_ = options;
  layout.elements_ = boundaries.end();
  layout.chunks_.reserve(begins.size());
  begins.push_back(boundaries.end());
  for (size_t k = 0; k + 1 < begins.size(); ++k) {
    layout.chunks_.push_back(
        MakeChunk(boundaries, begins[k], begins[k + 1], options.block_elements()));
  }
  return layout;
}

std::vector<uint32_t> Layout::ShardOfChunk(uint32_t shard_count) const {
  using Load =
      std::pair<uint64_t, uint32_t>;  // elements, shard: the order in which shards are chosen
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> loads;
  for (uint32_t shard = 0; shard < OwningShards(shard_count); ++shard) loads.emplace(0, shard);
  std::vector<uint32_t> shards;
  shards.reserve(chunks_.size());
  for (const Chunk& chunk : chunks_) {
    const auto [elements, shard] = loads.top();
    loads.pop();
    loads.emplace(elements + chunk.elements, shard);
    shards.push_back(shard);
  }
  return shards;
}

Layout::ChunkRange Layout::ChunksOf(size_t tensor) const {
  const auto first = std::partition_point(
      chunks_.begin(), chunks_.end(),
      [tensor](const Chunk& chunk) { return chunk.segments.back().tensor < tensor; });
  const auto end = std::partition_point(first, chunks_.end(), [tensor](const Chunk& chunk) {
    return chunk.segments.front().tensor <= tensor;
  });
  return {static_cast<uint32_t>(first - chunks_.begin()),
          static_cast<uint32_t>(end - chunks_.begin())};
}

uint32_t Layout::OwningShards(uint32_t shard_count) const {
  return static_cast<uint32_t>(std::min<uint64_t>(shard_count, chunks_.size()));
}

uint64_t Layout::Fingerprint() const {
  Fnv1a fnv;
  fnv.Add(uint64_t{options_.block_elements()});
  fnv.Add(uint64_t{options_.chunk_elements()});
  fnv.Add(uint64_t{tensors_.size()});
  for (const Tensor& tensor : tensors_) {
    fnv.Add(tensor.name());
    fnv.Add(static_cast<uint64_t>(tensor.shape_size()));
    for (const uint64_t dimension : tensor.shape()) fnv.Add(dimension);
  }
  // A build that cuts the same tensors differently must not pass for the same.
  fnv.Add(uint64_t{chunks_.size()});
  for (const Chunk& chunk : chunks_) fnv.Add(uint64_t{chunk.elements});
  return fnv.hash();
}

uint64_t Layout::PayloadBytes(Codec codec, uint32_t chunk) const {
  const Chunk& c = chunks_[chunk];
  switch (codec) {
    case FLOAT32:
      return uint64_t{4} * c.elements;
    case BFLOAT16:
    case FLOAT16:
      return uint64_t{2} * c.elements;
    case INT8:
      return uint64_t{4} * c.blocks + uint64_t{8} * c.sign_bytes;
    case INT4:
      return uint64_t{4} * c.blocks + uint64_t{4} * c.sign_bytes;
    case ONE_BIT:
      return uint64_t{4} * c.blocks + c.sign_bytes;
    case CUSTOM:
      return (uint64_t{1} + options_.custom_codec().block_bytes()) * c.blocks;
    case SKIP:
      return 4;
    case RESTORE:
      return uint64_t{4} * c.elements;
    case STATE:
      return uint64_t{4} * (options_.state_numbers() == 0 ? 3 : options_.state_numbers()) *
             c.elements;
    case FETCH:
    case LISTEN:
      return 0;
    default:
      break;
  }
  ABSL_RAW_LOG(FATAL, "codec %d has no payload", static_cast<int>(codec));
  return 0;
}

std::string Layout::DescribeBlock(uint32_t chunk, uint32_t block) const {
  const std::vector<Segment>& segments = chunks_[chunk].segments;
  const auto behind = std::upper_bound(
      segments.begin(), segments.end(), block,
      [](uint32_t wanted, const Segment& segment) { return wanted < segment.first_block; });
  const Segment& segment = *(behind - 1);
  const uint64_t into_segment = uint64_t{block - segment.first_block} * options_.block_elements();
  const uint64_t first = segment.tensor_offset + into_segment;
  const uint64_t last =
      segment.tensor_offset +
      std::min<uint64_t>(into_segment + options_.block_elements(), segment.elements) - 1;
  return absl::StrCat("tensor ", DescribeTensor(tensors_[segment.tensor]), ", elements ", first,
                      " to ", last);
}

uint32_t SuitableChunkElements(uint64_t elements, uint32_t block_elements, uint32_t workers) {
  constexpr uint64_t kMi = uint64_t{1} << 20;
  elements = std::min(elements, kMaxElements);
  uint64_t chunks = 1;
  for (const uint64_t more : {2, 4, 8, 24, 48}) {
    if (elements >= more * kMi * 3 / 8) chunks = more;
  }
  if (elements > 48 * kMi * 4 / 5) {
    const auto by_24 = [elements](uint64_t most_elements) {
      return (elements + 24 * most_elements - 1) / (24 * most_elements) * 24;
    };
    chunks = std::max(std::min<uint64_t>(by_24(kMi * 4 / 5), 120), by_24(2 * kMi));
  }
  if (workers == 1 && chunks > 8) chunks = std::max<uint64_t>(8, elements / (4 * kMi));
  // Chunks end with blocks: with room for one more they need not be more.
  const uint64_t block = std::max<uint32_t>(block_elements, 1);
  const uint64_t chunk = (elements / chunks / block + 2) * block;
  return static_cast<uint32_t>(std::min<uint64_t>(chunk, kMaxChunkElements / block * block));
}

uint64_t ElementCount(const Tensor& tensor) {
  uint64_t count = 1;
  for (const uint64_t dimension : tensor.shape()) {
    if (__builtin_mul_overflow(count, dimension, &count))
      return std::numeric_limits<uint64_t>::max();
  }
  return count;
}

std::string DescribeTensor(const Tensor& tensor) {
  return absl::StrCat("'", absl::Utf8SafeCHexEscape(tensor.name()), "' [",
                      absl::StrJoin(tensor.shape(), ", "), "]");
}

absl::Status CheckSameJob(absl::Span<const Tensor> theirs, const JobOptions& their_options,
                          const Layout& job) {
  if (absl::Status status = CheckSameTensors(theirs, job.tensors()); !status.ok()) return status;
  return CheckSameOptions(their_options, job.options());
}

}  // namespace signpost
