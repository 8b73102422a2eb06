// libFuzzer target: what an aggregator reads of its state directory when it starts.
//
//   input = kind (uint8: 0 a snapshot, 1 late rounds, 2 identity, 3 epochs,
//           4 the entries of a directory of this machine) bytes
//
// Snapshots and late rounds as section_input.h has files, and once more as they are. Directories as
// crafted_directory.h has them.

#include <google/protobuf/stubs/logging.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/internal/raw_logging.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "fuzzing/crafted_directory.h"
#include "fuzzing/memory_disk.h"
#include "fuzzing/section_input.h"
#include "fuzzing/seeds.h"
#include "server/bell.h"
#include "server/job.h"
#include "server/snapshot.h"
#include "server/state_dir.h"

namespace signpost {
namespace {

using fuzzing::CraftedDirectory;
using fuzzing::FileOf;
using fuzzing::InputOf;
using fuzzing::MemoryDisk;

constexpr absl::string_view kSnapshot = "signpost snapshot 2\n";
constexpr absl::string_view kLate = "signpost late rounds 1\n";
constexpr char kSnapshotName[] = "0000000000000007-0000000000000001.snapshot";
constexpr char kLateName[] = "0000000000000007.late";

// A job may be as large as its file says, so what is done with it is done with small ones.
constexpr uint64_t kMostElements = 1 << 16;

std::string WriteState(const JobState& state) {
  MemoryDisk disk;
  std::vector<uint32_t> chunks;
  for (const ChunkState& chunk : state.chunks) chunks.push_back(chunk.chunk);
  size_t next = 0;
  const auto save = [&](uint32_t, ChunkState& to) {
    to = state.chunks[next++];
    return absl::OkStatus();
  };
  JobState job = state;
  job.chunks.clear();
  ChunkState scratch;
  ABSL_RAW_CHECK(WriteSnapshot(disk, "s", job, {chunks, save}, scratch).ok(), "memory is a disk");
  return disk.files["s"];
}

absl::StatusOr<JobState> ReadState(const std::string& file) {
  MemoryDisk disk;
  disk.files["s"] = file;
  return ReadSnapshot(disk, "s");
}

void TrySnapshot(const std::string& file) {
  const absl::StatusOr<JobState> state = ReadState(file);
  if (!state.ok()) {
    ABSL_RAW_CHECK(absl::IsDataLoss(state.status()), "what cannot be read is damaged");
    return;
  }
  const std::string written = WriteState(*state);
  const absl::StatusOr<JobState> again = ReadState(written);
  ABSL_RAW_CHECK(again.ok() && WriteState(*again) == written, "it is the same, written again");
  uint64_t elements = 0;
  int64_t last = -1;
  for (const ChunkState& chunk : state->chunks) {
    ABSL_RAW_CHECK(std::exchange(last, chunk.chunk) < chunk.chunk, "each chunk is there once");
    ABSL_RAW_CHECK(chunk.closed.size() <= chunk.open_step, "what is closed was open");
    elements += chunk.error.size();
  }
  if (Layout::Create(state->tensors, state->options)->elements() > kMostElements) return;
  ABSL_RAW_CHECK(elements <= kMostElements, "errors are of the job's elements");
  Bell bell;
  auto job = Job::Restore(*state, {0, 1}, &bell, /*generation=*/2, absl::UnixEpoch());
  if (job.ok()) (*job)->late_rounds();
}

void TryLateRounds(const std::string& file) {
  MemoryDisk disk;
  disk.files["l"] = file;
  const absl::StatusOr<LateRounds> rounds = ReadLateRounds(disk, "l");
  if (!rounds.ok()) return;
  ABSL_RAW_CHECK(WriteLateRounds(disk, "l", *rounds).ok(), "memory is a disk");
  const absl::StatusOr<LateRounds> again = ReadLateRounds(disk, "l");
  ABSL_RAW_CHECK(again.ok() && *again == *rounds, "they are the same, written again");
}

// All that is in a directory, as Server::Start has it.
void TryDirectory(std::map<std::string, std::string> files) {
  for (const bool allow_error_reset : {false, true}) {
    MemoryDisk disk;
    disk.files = files;
    const auto directory = StateDir::Open(disk, {0, 1});
    if (!directory.ok()) return;
    ABSL_RAW_CHECK((*directory)->generation() >= 1, "generations are not 0");
    const auto recovered = (*directory)->Recover(allow_error_reset);
    if (recovered.ok()) {
      for (const JobState& job : recovered->jobs) {
        for (const ChunkState& chunk : job.chunks) {
          for (const auto& [step, ranks] : chunk.late_ranks) {
            for (const uint32_t rank : ranks) {
              ABSL_RAW_CHECK(rank < job.incarnations.size(), "late ranks are the job's");
            }
          }
        }
      }
    }
    if ((*directory)->generation() == std::numeric_limits<uint64_t>::max()) return;
    const auto again = StateDir::Open(disk, {0, 1});
    ABSL_RAW_CHECK(again.ok() && (*again)->generation() > (*directory)->generation(),
                   "each start is a generation");
  }
}

// Two workers, two chunks: one with an error and a closed round, one with neither.
JobState GoodState() {
  JobState state;
  state.id = {"job", 7};
  state.incarnations = {11, 12};
  for (const char* name : {"a", "b"}) {
    Tensor& tensor = state.tensors.emplace_back();
    tensor.set_name(name);
    tensor.add_shape(16);
  }
  state.options.set_block_elements(8);
  state.options.set_chunk_elements(16);
  state.options.set_gamma(1.35f);
  state.chunks.resize(2);
  ChunkState& chunk = state.chunks[0];
  chunk.open_step = 4;
  chunk.error.assign(16, 0.5f);
  Answer answer{{}, Payload(10)};  // a scale for each block, and a bit for each element
  answer.header.set_codec(ONE_BIT);
  answer.header.set_step(3);
  chunk.closed.push_back({std::make_shared<Answer>(std::move(answer)), {{ONE_BIT}, {ONE_BIT}}, {}});
  state.chunks[1].chunk = 1;
  state.chunks[1].open_step = 3;
  return state;
}

std::string LateFile(const LateRounds& rounds) {
  MemoryDisk disk;
  ABSL_RAW_CHECK(WriteLateRounds(disk, "l", rounds).ok(), "memory is a disk");
  return disk.files["l"];
}

// Opens a crafted directory. Checks that nothing outside the directory changes.
void TryRealDirectory(absl::string_view input) {
  static const auto* const names = [] {
    auto* made = new std::vector<CraftedDirectory::Name>;
    const std::string identity = "signpost state 1\nshard 0 of 1\ngeneration 5\n";
    const std::string epochs = "signpost epochs 1\n0000000000000007\n";
    const std::string snapshot = WriteState(GoodState());
    const std::string late = LateFile({{0, {{5, {0, 1}}}}});
    for (const auto& [name, good] : {std::pair<std::string, std::string>{"identity", identity},
                                     {"epochs", epochs},
                                     {kSnapshotName, snapshot},
                                     {"0000000000000007-0000000000000002.snapshot", snapshot},
                                     {kLateName, late},
                                     {"lock", ""},
                                     {"sub/file", "?"}}) {
      made->push_back({name, good});
      made->push_back({name + ".tmp", good});
      made->push_back({name + ".damaged", good});
    }
    return made;
  }();
  const CraftedDirectory crafted(input, *names);
  for (const bool allow_error_reset : {false, true}) {
    const auto directory = StateDir::Open(crafted.path(), {0, 1});
    ABSL_RAW_CHECK(crafted.IsOutsideUnchanged(), "nothing outside is changed");
    if (!directory.ok()) return;
    const auto recovered = (*directory)->Recover(allow_error_reset);
    ABSL_RAW_CHECK(crafted.IsOutsideUnchanged(), "nothing outside is changed");
    (*directory)->SaveLateRounds(7, {{0, {{5, {0}}}}}).IgnoreError();
    if (recovered.ok()) (*directory)->Forget(7).IgnoreError();
    ABSL_RAW_CHECK(crafted.IsOutsideUnchanged(), "nothing outside is changed");
  }
}

void TryInput(absl::string_view input) {
  // It has much to say about damage.
  [[maybe_unused]] static auto* const handler = google::protobuf::SetLogHandler(nullptr);
  if (input.empty()) return;
  const absl::string_view bytes = input.substr(1);
  const auto snapshots = {FileOf(kSnapshot, bytes), absl::StrCat(kSnapshot, bytes)};
  const auto late_rounds = {FileOf(kLate, bytes), absl::StrCat(kLate, bytes)};
  switch (static_cast<uint8_t>(input[0]) % 5) {
    case 0:
      for (const std::string& file : snapshots) {
        TrySnapshot(file);
        TryDirectory({{kSnapshotName, file}});
      }
      break;
    case 1:
      for (const std::string& file : late_rounds) {
        TryLateRounds(file);
        TryDirectory({{kSnapshotName, WriteState(GoodState())}, {kLateName, file}});
      }
      break;
    case 2:
      TryDirectory({{"identity", std::string(bytes)}});
      break;
    case 4:
      TryRealDirectory(bytes);
      break;
    default:
      TryDirectory({{"epochs", std::string(bytes)}, {kSnapshotName, WriteState(GoodState())}});
  }
}

}  // namespace

std::vector<std::string> fuzzing::Seeds() {
  const LateRounds late = {{0, {{5, {0, 1}}, {6, {1}}}}, {1, {{3, {1}}}}};
  return {std::string(1, '\0') + InputOf(kSnapshot, WriteState(GoodState())),
          "\1" + InputOf(kLate, LateFile(late)),
          "\2signpost state 1\nshard 0 of 1\ngeneration 18446744073709551614\n",
          "\3signpost epochs 1\n0000000000000007\n",
          // Links at what is to be written, a pipe, a sparse file.
          std::string("\4\1\0\0\2\1\0\2\4\0\4\6\0\6\11\0", 16),
          // A good directory, in which a link leads out.
          std::string("\4\1\0\0\1\3\0\1\6\0\3\22\0\2\3\0", 16)};
}

}  // namespace signpost

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  signpost::TryInput({reinterpret_cast<const char*>(data), size});
  return 0;
}
