#include "storage/disk.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "storage/block_vector.h"

// What the system is asked for, and refuses, in this process.
namespace {
std::vector<std::string>* synced = nullptr;  // paths, if anybody wants to know
const char* refused = nullptr;               // a directory that is not made...
int refused_with = 0;                        // ...for this reason
bool is_of_another_group = false;            // than directories are
}  // namespace

extern "C" int fsync(int fd) {
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  if (synced != nullptr) synced->push_back(std::filesystem::read_symlink(link));
  return syscall(SYS_fsync, fd);
}

extern "C" int mkdirat(int directory, const char* path, mode_t mode) {
  std::string absolute = path;
  if (directory != AT_FDCWD) {
    const std::string link = "/proc/self/fd/" + std::to_string(directory);
    absolute = std::filesystem::read_symlink(link).string() + "/" + path;
  }
  if (refused == nullptr || absolute != refused) {
    return syscall(SYS_mkdirat, directory, path, mode);
  }
  errno = refused_with;
  return -1;
}

extern "C" int mkdir(const char* path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

extern "C" gid_t getegid() { return syscall(SYS_getegid) + (is_of_another_group ? 1 : 0); }

namespace signpost {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr uint64_t kMost = 64 << 20;

class DirectoryTest : public ::testing::Test {
 protected:
  DirectoryTest() : path_(std::filesystem::path(::testing::TempDir() + "/a/b").lexically_normal()) {
    std::filesystem::remove_all(path_);
    EXPECT_TRUE(MakeDirectory(path_).ok());
    disk_ = OpenDirectory(path_);
  }

  const std::string path_;
  std::unique_ptr<Disk> disk_;
};

TEST_F(DirectoryTest, SubdirectoriesComeWithTheirFirstFileAndGoWithTheirLast) {
  ASSERT_TRUE(Replace(*disk_, "top", {"1"}).ok());
  ASSERT_TRUE(Replace(*disk_, "sub/first", {"2", "3"}).ok());
  ASSERT_TRUE(Replace(*disk_, "sub/second", {"4"}).ok());
  EXPECT_THAT(*disk_->List(), ElementsAre("sub/first", "sub/second", "top"));
  EXPECT_EQ(*disk_->Read("sub/first", kMost), "23");
  ASSERT_TRUE(disk_->Remove("sub/first").ok());
  EXPECT_TRUE(std::filesystem::exists(path_ + "/sub"));
  ASSERT_TRUE(disk_->Remove("sub/second").ok());
  EXPECT_FALSE(std::filesystem::exists(path_ + "/sub"));
  EXPECT_TRUE(disk_->SyncDirectory().ok());
  EXPECT_THAT(*disk_->List(), ElementsAre("top"));
}

// Whole blocks, and what is none: at its end, at its place in memory, or at that in the file.
TEST_F(DirectoryTest, PartsOfAnySizeAndPlaceComeOneAfterTheOther) {
  BlockVector<char> memory(130 * kBlockBytes);  // twice what is gathered, and more
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<char>(i * i / 7);
  const absl::string_view bytes(memory.data(), memory.size());
  for (const size_t first : {size_t{0}, size_t{1}, kBlockBytes - 1, kBlockBytes, 2 * kBlockBytes,
                             64 * kBlockBytes - 1, 65 * kBlockBytes}) {
    for (const size_t second : {size_t{0}, size_t{1}, kBlockBytes, 70 * kBlockBytes + 1}) {
      const std::vector<absl::string_view> parts = {bytes.substr(0, first), bytes.substr(0, second),
                                                    bytes.substr(1, second), bytes};
      ASSERT_TRUE(Replace(*disk_, "file", parts).ok());
      EXPECT_TRUE(*disk_->Read("file", kMost) == absl::StrJoin(parts, ""))
          << first << ", " << second << " bytes";
    }
  }
}

TEST_F(DirectoryTest, WholeBlocksAreNotLeftInTheSystemsCache) {
  struct statfs file_system;
  ASSERT_EQ(statfs(path_.c_str(), &file_system), 0);
  if (file_system.f_type == TMPFS_MAGIC) GTEST_SKIP() << "its files are in memory";
  BlockVector<char> memory(4 << 20, 'x');
  ASSERT_TRUE(Replace(*disk_, "file", {absl::string_view(memory.data(), memory.size())}).ok());

  const int fd = open((path_ + "/file").c_str(), O_RDONLY | O_DIRECT);
  if (fd < 0) GTEST_SKIP() << "the file system has no O_DIRECT";
  void* const mapped = mmap(nullptr, memory.size(), PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  std::vector<unsigned char> is_cached(memory.size() / kBlockBytes);
  ASSERT_EQ(mincore(mapped, memory.size(), is_cached.data()), 0);
  EXPECT_THAT(is_cached, Each(0));
  munmap(mapped, memory.size());
  close(fd);
}

TEST_F(DirectoryTest, AFileThatIsNotFilledLeavesTheOneBefore) {
  ASSERT_TRUE(Replace(*disk_, "file", {"before"}).ok());
  const absl::Status status = Replace(*disk_, "file", [](Disk::Append append) {
    EXPECT_TRUE(append("torn").ok());
    return absl::InternalError("no more");
  });
  EXPECT_EQ(status, absl::InternalError("no more"));
  EXPECT_THAT(*disk_->List(), ElementsAre("file"));
  EXPECT_EQ(*disk_->Read("file", kMost), "before");
}

// Another rank may have made it a moment ago, and not have come to this yet.
TEST_F(DirectoryTest, ThatItIsThereSurvivesACrashWhoeverHasMadeIt) {
  std::vector<std::string> paths;
  synced = &paths;
  const absl::Status status = MakeDirectory(path_);
  synced = nullptr;
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(paths, ::testing::Contains(std::filesystem::canonical(path_).parent_path()));
}

TEST_F(DirectoryTest, NoRoomForADirectoryIsAFullDisk) {
  const std::string path = path_ + "/new";
  refused = path.c_str();
  refused_with = ENOSPC;
  const absl::Status status = MakeDirectory(path + "/inside");
  refused = nullptr;
  EXPECT_EQ(status, absl::ResourceExhaustedError(absl::StrCat("cannot create the directory ", path,
                                                              ": No space left on device")));
}

// Trying again helps only where the system may come to another answer by itself.
TEST_F(DirectoryTest, ThatItMayNotBeWrittenToDoesNotPassByItself) {
  const std::string path = path_ + "/sub";
  refused = path.c_str();
  std::vector<absl::StatusCode> codes;
  for (const int error : {EACCES, EPERM, EROFS, ENOTDIR, ENOSPC, EDQUOT, ENOENT, EIO, EMFILE}) {
    refused_with = error;
    const absl::Status status = Replace(*disk_, "sub/file", {"1"});
    codes.push_back(status.code());
    EXPECT_EQ(status.message(), absl::StrCat("cannot create ", path, ": ", std::strerror(error)));
  }
  refused = nullptr;
  using Code = absl::StatusCode;
  EXPECT_THAT(codes, ElementsAre(Code::kFailedPrecondition, Code::kFailedPrecondition,
                                 Code::kFailedPrecondition, Code::kFailedPrecondition,
                                 Code::kResourceExhausted, Code::kResourceExhausted,
                                 Code::kNotFound, Code::kUnavailable, Code::kUnavailable));
}

// Nobody but root can look into it, and whoever has the volume need not be root.
TEST_F(DirectoryTest, OfAFileSystemsRootIsListedWithoutItsLostFiles) {
  ASSERT_TRUE(Replace(*disk_, "lost+found/#12", {"1"}).ok());
  ASSERT_TRUE(Replace(*disk_, "top", {"2"}).ok());
  EXPECT_THAT(*disk_->List(), ElementsAre("top"));
}

TEST_F(DirectoryTest, LinksInItAreListedAndNotFollowed) {
  const std::string outside = path_ + "-outside";
  std::filesystem::create_directories(outside);
  std::ofstream(outside + "/victim") << "precious";
  for (const char* name : {"nowhere", "loop"}) {
    std::filesystem::create_symlink("loop", path_ + "/" + name);
  }
  std::filesystem::create_symlink(outside, path_ + "/sub");
  std::filesystem::create_symlink(outside + "/victim", path_ + "/file");
  std::filesystem::create_symlink(outside + "/victim", path_ + "/file.tmp");
  EXPECT_THAT(*disk_->List(), ElementsAre("file", "file.tmp", "loop", "nowhere", "sub"));
  EXPECT_EQ(disk_->Read("file", kMost).status(),
            absl::DataLossError(path_ + "/file is no regular file"));
  EXPECT_TRUE(absl::IsFailedPrecondition(disk_->Read("sub/victim", kMost).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(Replace(*disk_, "sub/victim", {"changed"})));
  EXPECT_TRUE(absl::IsFailedPrecondition(disk_->Remove("sub/victim")));
  ASSERT_TRUE(Replace(*disk_, "file", {"new"}).ok());
  EXPECT_TRUE(std::filesystem::is_regular_file(std::filesystem::symlink_status(path_ + "/file")));
  std::string text;
  std::ifstream(outside + "/victim") >> text;
  EXPECT_EQ(text, "precious");
}

TEST_F(DirectoryTest, NamesDoNotLeadOutOfIt) {
  for (const char* name : {"../file", "..", "sub/..", "sub/../file", "/etc/passwd", "./file"}) {
    EXPECT_FALSE(Replace(*disk_, name, {"1"}).ok()) << name;
    EXPECT_FALSE(disk_->Read(name, kMost).ok()) << name;
    EXPECT_FALSE(disk_->Remove(name).ok()) << name;
  }
  EXPECT_FALSE(std::filesystem::exists(path_ + "/../file"));
}

TEST_F(DirectoryTest, NothingButARegularFileOfASizeThatIsRightIsRead) {
  ASSERT_EQ(mkfifo((path_ + "/pipe").c_str(), 0600), 0);
  std::filesystem::create_directory(path_ + "/directory");
  ASSERT_TRUE(Replace(*disk_, "file", {"12345"}).ok());
  for (const char* name : {"pipe", "directory"}) {
    EXPECT_EQ(disk_->Read(name, kMost).status(),
              absl::DataLossError(absl::StrCat(path_, "/", name, " is no regular file")));
  }
  EXPECT_EQ(*disk_->Read("file", 5), "12345");
  EXPECT_TRUE(absl::IsDataLoss(disk_->Read("file", 4).status()));
  std::filesystem::resize_file(path_ + "/file", uint64_t{1} << 42);
  EXPECT_TRUE(absl::IsResourceExhausted(
      disk_->Read("file", std::numeric_limits<uint64_t>::max()).status()));
  ASSERT_TRUE(Replace(*disk_, "pipe", {"1"}).ok());  // no reader is waited for
}

TEST_F(DirectoryTest, IsNotTakenWhereOthersMayWrite) {
  using std::filesystem::perms;
  const auto made_with = [this](perms mode) {
    std::filesystem::permissions(path_, mode);
    return MakeDirectory(path_);
  };
  EXPECT_TRUE(made_with(perms::owner_all | perms::group_read | perms::others_read).ok());
  EXPECT_TRUE(made_with(perms::owner_all | perms::group_all).ok());  // this process's own group
  const absl::Status status = made_with(perms::all);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(status.message(), ::testing::AllOf(::testing::HasSubstr(path_ + " (its mode is 0777"),
                                                 ::testing::HasSubstr("chmod go-w")));
  is_of_another_group = true;
  EXPECT_TRUE(absl::IsFailedPrecondition(made_with(perms::owner_all | perms::group_all)));
  EXPECT_TRUE(made_with(perms::owner_all | perms::group_read).ok());
  is_of_another_group = false;
  setenv("SIGNPOST_SHARED_DIRECTORIES", "1", 1);
  EXPECT_TRUE(made_with(perms::all).ok());
  unsetenv("SIGNPOST_SHARED_DIRECTORIES");
}

TEST_F(DirectoryTest, WhatIsNotThereIsNotFoundAndNamed) {
  const absl::Status status = disk_->Read("sub/none", kMost).status();
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(path_ + "/sub/none"));
  EXPECT_TRUE(absl::IsNotFound(disk_->Remove("sub/none")));
  EXPECT_TRUE(absl::IsNotFound(OpenDirectory(path_ + "/none")->List().status()));
  EXPECT_THAT(*disk_->List(), IsEmpty());
}

}  // namespace
}  // namespace signpost
