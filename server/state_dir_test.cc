#include "server/state_dir.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/snapshot.h"
#include "server/test_job.h"
#include "server/test_state.h"
#include "storage/block_vector.h"
#include "storage/faulty_disk.h"
#include "storage/section_file.h"

namespace signpost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

void ExpectSame(const JobState& a, const JobState& b) {
  EXPECT_EQ(a.id.name, b.id.name);
  EXPECT_EQ(a.id.epoch, b.id.epoch);
  EXPECT_EQ(a.options.SerializeAsString(), b.options.SerializeAsString());
  EXPECT_EQ(a.incarnations, b.incarnations);
  EXPECT_EQ(a.left_ranks, b.left_ranks);
  EXPECT_EQ(a.given_up_ranks, b.given_up_ranks);
  EXPECT_EQ(a.returning_ranks, b.returning_ranks);
  ASSERT_EQ(a.chunks.size(), b.chunks.size());
  for (size_t i = 0; i < a.chunks.size(); ++i) {
    EXPECT_EQ(a.chunks[i].open_step, b.chunks[i].open_step);
    EXPECT_EQ(a.chunks[i].error, b.chunks[i].error);
    EXPECT_EQ(a.chunks[i].late_ranks, b.chunks[i].late_ranks);
    ASSERT_EQ(a.chunks[i].closed.size(), b.chunks[i].closed.size());
    for (size_t j = 0; j < a.chunks[i].closed.size(); ++j) {
      const ClosedRound& ours = a.chunks[i].closed[j];
      const ClosedRound& theirs = b.chunks[i].closed[j];
      EXPECT_EQ(BytesOf(*ours.answer), BytesOf(*theirs.answer));
      EXPECT_EQ(ours.contributions, theirs.contributions);
      EXPECT_EQ(ours.rates.SerializeAsString(), theirs.rates.SerializeAsString());
    }
  }
}

class StateDirTest : public ::testing::Test {
 protected:
  StateDirTest() : path_(absl::StrCat(testing::TempDir(), "/a/b")) {
    std::filesystem::remove_all(path_);
  }

  std::unique_ptr<StateDir> Open(ShardId shard = kShard) {
    absl::StatusOr<std::unique_ptr<StateDir>> state_dir = StateDir::Open(path_, shard);
    EXPECT_TRUE(state_dir.ok()) << state_dir.status();
    return state_dir.ok() ? *std::move(state_dir) : nullptr;
  }

  // As another process would.
  absl::StatusOr<StateDir::Recovered> Recover(bool allow_error_reset = false) {
    return Open()->Recover(allow_error_reset);
  }

  std::vector<std::string> Snapshots() const {
    std::vector<std::string> names = *OpenDirectory(path_)->List();
    std::erase_if(names,
                  [](const std::string& name) { return !absl::EndsWith(name, ".snapshot"); });
    return names;
  }

  std::string Read(const std::string& name) const {
    return *OpenDirectory(path_)->Read(name, 1 << 20);
  }
  void Write(const std::string& name, absl::string_view contents) const {
    ASSERT_TRUE(Replace(*OpenDirectory(path_), name, {contents}).ok());
  }

  const std::string path_;
};

// An attacker has made links and a pipe under the names of the directory's files.
TEST_F(StateDirTest, OpensNoFileThatIsNoneOfItsOwn) {
  std::filesystem::create_directories(path_);
  const std::string victim = ::testing::TempDir() + "/victim";
  std::ofstream(victim) << "precious";
  std::filesystem::create_symlink(victim, path_ + "/identity.tmp");
  std::filesystem::create_symlink(victim, path_ + "/epochs");
  ASSERT_EQ(mkfifo((path_ + "/0000000000000007-0000000000000001.snapshot").c_str(), 0600), 0);
  auto recovered = Recover(/*allow_error_reset=*/true);
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  EXPECT_THAT(recovered->warnings,
              ElementsAre(HasSubstr("epochs is damaged"), HasSubstr(".snapshot is no regular file"),
                          HasSubstr("the job of epoch 7 is given up")));
  EXPECT_FALSE(std::filesystem::is_symlink(path_ + "/identity"));
  std::stringstream text;
  text << std::ifstream(victim).rdbuf();
  EXPECT_EQ(text.str(), "precious");
}

TEST_F(StateDirTest, IsNotOpenedWhereItsIdentityOrLockIsNoFile) {
  std::filesystem::create_directories(path_);
  const auto error = [this] { return StateDir::Open(path_, kShard).status(); };
  ASSERT_EQ(mkfifo((path_ + "/identity").c_str(), 0600), 0);
  EXPECT_TRUE(absl::IsFailedPrecondition(error())) << error();
  EXPECT_THAT(error().message(), HasSubstr("/identity is no regular file"));
  std::filesystem::remove(path_ + "/identity");
  std::ofstream(path_ + "/identity");
  std::filesystem::resize_file(path_ + "/identity", uint64_t{1} << 42);
  EXPECT_THAT(error().message(), HasSubstr("/identity has 4398046511104 bytes; 128 are the most"));
  std::filesystem::remove(path_ + "/identity");
  std::filesystem::remove(path_ + "/lock");
  std::filesystem::create_symlink("/dev/null", path_ + "/lock");
  EXPECT_THAT(error().message(), HasSubstr("/lock: Too many levels of symbolic links"));
  std::filesystem::remove(path_ + "/lock");
  ASSERT_EQ(mkfifo((path_ + "/lock").c_str(), 0600), 0);
  EXPECT_THAT(error().message(), HasSubstr("/lock is no regular file"));
}

TEST_F(StateDirTest, CanBeAskedWhoseItIsWithoutBeingServed) {
  EXPECT_TRUE(StateDir::CheckShard(path_, kShard).ok());  // there is nothing
  const uint64_t generation = Open({0, 2})->generation();
  EXPECT_TRUE(StateDir::CheckShard(path_, {0, 2}).ok());
  EXPECT_THAT(StateDir::CheckShard(path_, {1, 2}).message(),
              HasSubstr("it belongs to shard 0 of 2, and this aggregator is shard 1 of 2"));
  EXPECT_GT(Open({0, 2})->generation(), generation);
}

TEST_F(StateDirTest, BringsBackWhatWasSaved) {
  ASSERT_TRUE(Save(*Open(), TestState()).ok());
  const auto recovered = Recover();
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  EXPECT_THAT(recovered->warnings, IsEmpty());
  ASSERT_THAT(recovered->jobs, SizeIs(1));
  ExpectSame(recovered->jobs[0], TestState());
}

TEST_F(StateDirTest, ErrorsBeginAtABlockOfTheDisk) {
  JobState state = TestState();
  state.options.set_chunk_elements(2048);
  state.tensors.resize(1);
  state.tensors[0].clear_shape();
  state.tensors[0].add_shape(5000);
  state.chunks.clear();
  const Layout layout = *Layout::Create(state.tensors, state.options);
  for (const Chunk& chunk : layout.chunks()) {
    ChunkState& to = state.chunks.emplace_back();
    to.chunk = state.chunks.size() - 1;
    to.open_step = 100 * to.chunk;  // so that what comes before the error has another length
    to.error.assign(chunk.elements, 0.5f + to.chunk);
  }
  ASSERT_THAT(state.chunks, SizeIs(3));
  ASSERT_TRUE(Save(*Open(), state).ok());
  const std::string file = Read(Snapshots().front());
  for (const ChunkState& chunk : state.chunks) {
    const std::string error(BytesOf(absl::MakeConstSpan(chunk.error)));
    const size_t begin = file.find(error);
    ASSERT_NE(begin, std::string::npos);
    EXPECT_EQ(begin % kBlockBytes, 0) << chunk.chunk;
  }
  const auto recovered = Recover();
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  ExpectSame(recovered->jobs[0], state);
}

TEST_F(StateDirTest, GenerationsGrow) {
  const uint64_t first = Open()->generation();
  EXPECT_GT(Open()->generation(), first);
}

TEST_F(StateDirTest, AnOlderCopyHasNoGenerationAgain) {
  Open();
  const std::string identity = Read("identity");
  const uint64_t second = Open()->generation();
  Write("identity", identity);
  absl::SleepFor(absl::Milliseconds(2));  // generations are times
  EXPECT_GT(Open()->generation(), second);
}

TEST_F(StateDirTest, ASnapshotUnderTheNameOfAnotherJobIsDamaged) {
  ASSERT_TRUE(Save(*Open(), TestState(/*epoch=*/7)).ok());
  const std::string name = Snapshots()[0];
  Write("00000000000000ff" + name.substr(16), Read(name));
  EXPECT_THAT(std::string(Recover().status().message()), HasSubstr("is damaged: it is of epoch 7"));
}

TEST_F(StateDirTest, KeepsTheNewestTwoOfEachJob) {
  auto state_dir = Open();
  for (uint64_t step = 1; step < 6; ++step) {
    ASSERT_TRUE(Save(*state_dir, TestState(/*epoch=*/7, step)).ok());
    ASSERT_TRUE(Save(*state_dir, TestState(/*epoch=*/8, step)).ok());
  }
  EXPECT_THAT(Snapshots(), SizeIs(4));
  ASSERT_TRUE(state_dir->Forget(7).ok());
  EXPECT_THAT(Snapshots(), SizeIs(2));
  state_dir.reset();
  const auto recovered = Recover();
  ASSERT_THAT(recovered->jobs, SizeIs(1));
  ExpectSame(recovered->jobs[0], TestState(/*epoch=*/8, /*open_step=*/5));
}

TEST_F(StateDirTest, KnowsWhichJobsWereForgotten) {
  for (const uint64_t epoch : {9, 7}) {
    auto state_dir = Open();
    ASSERT_TRUE(state_dir->Recover(false).ok());
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(Save(*state_dir, TestState(epoch)).ok());
    ASSERT_TRUE(state_dir->Forget(epoch).ok());
  }
  for (int i = 0; i < 2; ++i) EXPECT_THAT(Recover()->known, ElementsAre(9, 7));
}

TEST_F(StateDirTest, DoesNotKnowWhatWasGivenUp) {
  ASSERT_TRUE(Save(*Open(), TestState(/*epoch=*/7)).ok());
  Write(Snapshots().front(), "rubbish");
  {
    auto state_dir = Open();
    const auto recovered = state_dir->Recover(/*allow_error_reset=*/true);
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    EXPECT_THAT(recovered->known, IsEmpty());
  }
  EXPECT_THAT(Recover()->known, IsEmpty());
  {
    auto state_dir = Open();
    ASSERT_TRUE(state_dir->Recover(false).ok());
    ASSERT_TRUE(Save(*state_dir, TestState(/*epoch=*/9)).ok());
  }
  EXPECT_THAT(Recover()->known, ElementsAre(9));
}

TEST_F(StateDirTest, KnowsTheLastOfMany) {
  std::string epochs = "signpost epochs 1\n";
  for (int epoch = 0; epoch < 1024; ++epoch) epochs += absl::StrFormat("%016x\n", 100 + epoch);
  {
    auto state_dir = Open();
    Write("epochs", epochs);
    ASSERT_TRUE(state_dir->Recover(false).ok());
    ASSERT_TRUE(Save(*state_dir, TestState(/*epoch=*/7)).ok());
    ASSERT_TRUE(state_dir->Forget(7).ok());
  }
  const auto recovered = Recover();
  ASSERT_THAT(recovered->known, SizeIs(1024));
  EXPECT_EQ(recovered->known.front(), 101);
  EXPECT_EQ(recovered->known.back(), 7);
}

TEST_F(StateDirTest, DamagedEpochsAreSetAsideAndTheJobsGoOn) {
  const std::string good = "signpost epochs 1\n0000000000000009\n";
  for (const std::string& damaged :
       {std::string(), good.substr(0, good.size() - 1), good + "x", good + "               -1\n",
        std::string("signpost epochs 2\n")}) {
    ASSERT_TRUE(Save(*Open(), TestState()).ok());
    Write("epochs", damaged);
    const auto recovered = Recover();
    ASSERT_TRUE(recovered.ok()) << recovered.status();
    EXPECT_THAT(recovered->known, IsEmpty()) << damaged;
    EXPECT_THAT(recovered->warnings, ElementsAre(HasSubstr("epochs is damaged")));
    EXPECT_THAT(recovered->jobs, SizeIs(1));
    EXPECT_EQ(Read("epochs.damaged"), damaged);
  }
}

TEST_F(StateDirTest, OfADamagedSnapshotTheOneBeforeIsTaken) {
  auto state_dir = Open();
  for (const uint64_t step : {4, 5}) ASSERT_TRUE(Save(*state_dir, TestState(7, step)).ok());
  state_dir.reset();
  const std::string newest = Snapshots().back();
  std::string contents = Read(newest);
  contents[contents.size() / 2] ^= 4;
  Write(newest, contents);

  const auto recovered = Recover();
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  ASSERT_THAT(recovered->jobs, SizeIs(1));
  ExpectSame(recovered->jobs[0], TestState(7, 4));
  ASSERT_THAT(recovered->warnings, SizeIs(1));
  EXPECT_THAT(recovered->warnings[0], HasSubstr("CRC-32C"));
  EXPECT_TRUE(std::filesystem::exists(absl::StrCat(path_, "/", newest, ".damaged")));
}

TEST_F(StateDirTest, NeverTakesASnapshotThatWasCutOrChanged) {
  ASSERT_TRUE(Save(*Open(), TestState()).ok());
  const std::string name = Snapshots().front();
  const std::string contents = Read(name);
  const std::unique_ptr<Disk> disk = OpenDirectory(path_);
  for (size_t size = 0; size < contents.size(); ++size) {
    Write(name, contents.substr(0, size));
    EXPECT_TRUE(absl::IsDataLoss(ReadSnapshot(*disk, name).status())) << size;
    std::string changed = contents;
    changed[size] ^= static_cast<char>(1 << (size % 8));
    Write(name, changed);
    EXPECT_TRUE(absl::IsDataLoss(ReadSnapshot(*disk, name).status())) << size;
  }
  Write(name, contents + "x");
  EXPECT_TRUE(absl::IsDataLoss(ReadSnapshot(*disk, name).status()));
}

TEST_F(StateDirTest, ASnapshotOfARankThatTheJobDoesNotHaveIsDamaged) {
  for (const auto ranks :
       {&JobState::left_ranks, &JobState::given_up_ranks, &JobState::returning_ranks}) {
    JobState state = TestState();
    (state.*ranks).push_back(state.incarnations.size());
    const std::unique_ptr<StateDir> state_dir = Open();
    ASSERT_TRUE(Save(*state_dir, state).ok());
    const std::unique_ptr<Disk> disk = OpenDirectory(path_);
    const absl::Status status = ReadSnapshot(*disk, Snapshots().front()).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    std::filesystem::remove_all(path_);
  }
}

TEST_F(StateDirTest, WithoutAReadableSnapshotItRefusesUnlessTold) {
  ASSERT_TRUE(Save(*Open(), TestState()).ok());
  Write(Snapshots().front(), "rubbish");
  const absl::Status refused = Recover().status();
  EXPECT_TRUE(absl::IsDataLoss(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("--allow-error-reset"));
  EXPECT_TRUE(absl::IsDataLoss(Recover().status())) << "refusing must change nothing";

  const auto recovered = Recover(/*allow_error_reset=*/true);
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  EXPECT_THAT(recovered->jobs, IsEmpty());
  EXPECT_THAT(recovered->given_up, ElementsAre(7));
  EXPECT_THAT(recovered->warnings, ElementsAre(HasSubstr("is damaged"), HasSubstr("given up")));
}

TEST_F(StateDirTest, ADiskThatFailsForTheMomentDamagesNothing) {
  FaultyDisk disk(path_);
  auto state_dir = *StateDir::Open(disk, kShard);
  ASSERT_TRUE(Save(*state_dir, TestState()).ok());
  const std::vector<std::string> before = Snapshots();
  disk.fails_to_read = true;
  const absl::Status status = state_dir->Recover(/*allow_error_reset=*/true).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(Snapshots(), before);
  disk.fails_to_read = false;
  const auto recovered = state_dir->Recover(/*allow_error_reset=*/false);
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  EXPECT_EQ(recovered->jobs.size(), 1u);
  EXPECT_THAT(recovered->warnings, IsEmpty());
}

TEST_F(StateDirTest, LateRoundsComeBackWithTheirChunks) {
  {
    auto state_dir = Open();
    ASSERT_TRUE(Save(*state_dir, TestState()).ok());
    ASSERT_TRUE(state_dir->SaveLateRounds(7, {{0, {{5, {1}}}}}).ok());
    ASSERT_TRUE(state_dir->SaveLateRounds(7, {{0, {{5, {1}}, {6, {0}}}}, {1, {{5, {0}}}}}).ok());
    ASSERT_TRUE(state_dir->SaveLateRounds(8, {{0, {{1, {0}}}}}).ok());  // whose job is gone
  }
  auto state_dir = Open();
  const auto recovered = state_dir->Recover(/*allow_error_reset=*/false);
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  ASSERT_EQ(recovered->jobs.size(), 1);
  const LateRanks expected[] = {{{5, {1}}, {6, {0}}}, {{5, {0}}}};
  for (int chunk : {0, 1}) EXPECT_EQ(recovered->jobs[0].chunks[chunk].late_ranks, expected[chunk]);
  EXPECT_FALSE(std::filesystem::exists(path_ + "/0000000000000008.late"));
  ASSERT_TRUE(state_dir->Forget(7).ok());
  EXPECT_FALSE(std::filesystem::exists(path_ + "/0000000000000007.late"));
}

TEST_F(StateDirTest, DamagedLateRoundsAreSetAsideAndTheJobGoesOn) {
  {
    auto state_dir = Open();
    ASSERT_TRUE(Save(*state_dir, TestState()).ok());
    ASSERT_TRUE(state_dir->SaveLateRounds(7, {{0, {{5, {1}}}}}).ok());
  }
  const std::string path = path_ + "/0000000000000007.late";
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  const auto recovered = Recover();
  ASSERT_TRUE(recovered.ok()) << recovered.status();
  EXPECT_THAT(recovered->warnings, ElementsAre(HasSubstr("0000000000000007.late is damaged")));
  ASSERT_THAT(recovered->jobs, SizeIs(1));
  ExpectSame(recovered->jobs[0], TestState());
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_TRUE(std::filesystem::exists(path + ".damaged"));
}

TEST_F(StateDirTest, OfAJobThatIsGivenUpTheLateRoundsGoToo) {
  {
    auto state_dir = Open();
    ASSERT_TRUE(Save(*state_dir, TestState()).ok());
    ASSERT_TRUE(state_dir->SaveLateRounds(7, {{0, {{5, {1}}}}}).ok());
  }
  Write(Snapshots().front(), "rubbish");
  ASSERT_TRUE(Recover(/*allow_error_reset=*/true).ok());
  EXPECT_FALSE(std::filesystem::exists(path_ + "/0000000000000007.late"));
}

TEST_F(StateDirTest, LeavesItsPathOutForPeers) {
  const auto state_dir = Open();
  const std::string path = std::filesystem::path(path_).lexically_normal();
  EXPECT_EQ(state_dir->WithoutPath(absl::StrCat("cannot write ", path, "/7.snapshot: full")),
            "cannot write 7.snapshot: full");
  EXPECT_EQ(state_dir->WithoutPath(absl::StrCat("cannot open ", path)),
            "cannot open the state directory");
}

TEST_F(StateDirTest, IsForOneShardAndVersionOnly) {
  Open({0, 2}).reset();
  const absl::Status other = StateDir::Open(path_, {1, 2}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(other));
  EXPECT_THAT(std::string(other.message()), HasSubstr("shard 0 of 2"));
  EXPECT_THAT(std::string(other.message()), HasSubstr("shard 1 of 2"));
  EXPECT_THAT(std::string(other.message()), HasSubstr(path_));

  Write("identity", "signpost state 2\nsomething else\n");
  const absl::Status version = StateDir::Open(path_, {0, 2}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(version));
  EXPECT_THAT(std::string(version.message()), HasSubstr("another version"));
}

TEST_F(StateDirTest, IsServedByOneProcessAtATime) {
  auto first = Open();
  const absl::Status second = StateDir::Open(path_, kShard).status();
  EXPECT_TRUE(absl::IsUnavailable(second)) << second;
  EXPECT_THAT(std::string(second.message()), HasSubstr(path_));
}

TEST_F(StateDirTest, AFileInItsWayIsNamed) {
  std::filesystem::create_directories(std::filesystem::path(path_).parent_path());
  std::ofstream(path_) << "a file";
  const absl::Status status = StateDir::Open(path_, kShard).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(path_));
  std::filesystem::remove(path_);
}

}  // namespace
}  // namespace signpost
