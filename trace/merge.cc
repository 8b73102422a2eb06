#include "trace/merge.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <system_error>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "trace/chrome_trace.h"
#include "trace/recording.h"

namespace signpost::trace {
namespace {

// What cannot be looked at is none; opening it says why.
bool IsDirectory(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error);
}

// In a fixed order.
absl::StatusOr<std::vector<std::string>> RecordingsIn(const std::string& directory) {
  std::vector<std::string> paths;
  std::error_code error;
  for (std::filesystem::directory_iterator at(directory, error), end; !error && at != end;
       at.increment(error)) {
    const std::string path = at->path().string();
    if (absl::EndsWith(path, kRecordingSuffix)) paths.push_back(path);
  }
  if (error) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot list ", directory, ": ", error.message()));
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::string Milliseconds(int64_t nanoseconds) {
  return absl::StrFormat("%.3f ms", nanoseconds / 1e6);
}

// Of frames and answers, and of exchanges, to which nothing belongs.
std::vector<std::string> DescribeUnmatched(const Timeline& timeline) {
  std::set<std::pair<size_t, size_t>> exchanges;
  for (const Arrow& arrow : timeline.arrows) {
    const EventId exchange =
        timeline.At(arrow.from).kind == Kind::kExchange ? arrow.from : arrow.to;
    exchanges.insert({exchange.process, exchange.event});
  }
  absl::flat_hash_set<RoundKey> rounds;
  for (const Process& process : timeline.processes) {
    for (const Event& event : process.events) {
      if (event.kind == Kind::kRound) rounds.insert(KeyOf(event));
    }
  }
  size_t at_aggregators = 0, at_workers = 0, not_taken = 0;
  for (size_t process = 0; process < timeline.processes.size(); ++process) {
    const std::vector<Event>& events = timeline.processes[process].events;
    for (size_t i = 0; i < events.size(); ++i) {
      if (events[i].kind == Kind::kFrame || events[i].kind == Kind::kAnswer) ++at_aggregators;
      if (events[i].kind != Kind::kExchange || exchanges.contains({process, i})) continue;
      ++(rounds.contains(KeyOf(events[i])) ? not_taken : at_workers);
    }
  }
  at_aggregators -= timeline.arrows.size();
  std::vector<std::string> what, lines;
  if (at_aggregators > 0) {
    what.push_back(absl::StrCat(at_aggregators, " frames and answers of aggregators"));
  }
  if (at_workers > 0) what.push_back(absl::StrCat(at_workers, " exchanges of workers"));
  if (!what.empty()) {
    lines.push_back(absl::StrCat(absl::StrJoin(what, " and "),
                                 " have no arrows: their other ends were recorded by nobody, were "
                                 "overwritten, had not come yet, or had failed"));
  }
  if (not_taken > 0) {
    lines.push_back(absl::StrCat(not_taken,
                                 " exchanges of workers have no arrows: their rounds had closed "
                                 "without them, an aggregator that was started again asked for "
                                 "earlier frames, or they failed"));
  }
  return lines;
}

std::string DescribeClock(const HostClock& host, const HostClock& first) {
  const std::string offset =
      absl::StrCat("the clock of ", host.host, " is ", Milliseconds(std::abs(host.offset)),
                   host.offset < 0 ? " behind" : " ahead of", " that of ", first.host);
  if (!host.bound) {
    return absl::StrCat(offset,
                        " by the system's time; no messages in both directions bound the error");
  }
  return absl::StrCat(offset, ", give or take ", Milliseconds(*host.bound),
                      host.is_contradictory ? "; they run at different speeds" : "");
}

}  // namespace

absl::StatusOr<Timeline> ReadRecordings(const std::vector<std::string>& inputs) {
  std::vector<Recording> recordings;
  std::vector<std::string> left_out;
  for (const std::string& input : inputs) {
    const bool is_directory = IsDirectory(input);
    const absl::StatusOr<std::vector<std::string>> paths =
        is_directory ? RecordingsIn(input) : std::vector<std::string>{input};
    if (!paths.ok()) return paths.status();
    for (const std::string& path : *paths) {
      absl::StatusOr<Recording> recording = ReadRecording(path);
      if (recording.ok()) {
        recordings.push_back(*std::move(recording));
      } else if (is_directory) {
        left_out.push_back(absl::StrCat("left out: ", recording.status().message()));
      } else {
        return recording.status();
      }
    }
  }
  if (recordings.empty() && !left_out.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is nothing to merge: ", absl::StrJoin(left_out, "; ")));
  }
  if (recordings.empty()) {
    return absl::NotFoundError(
        absl::StrCat("there is nothing to merge: no file whose name ends with ", kRecordingSuffix,
                     "; was a process of the job started with SIGNPOST_TRACE or --trace?"));
  }
  Timeline timeline = Join(std::move(recordings));
  timeline.left_out = std::move(left_out);
  return timeline;
}

absl::StatusOr<Timeline> ReadTrace(const std::vector<std::string>& inputs) {
  const bool is_merged =
      inputs.size() == 1 && !IsDirectory(inputs[0]) && !absl::EndsWith(inputs[0], kRecordingSuffix);
  if (!is_merged) return ReadRecordings(inputs);
  std::ifstream file(inputs[0], std::ios::binary);
  if (!file) {
    return absl::NotFoundError(absl::StrCat("cannot read ", inputs[0], ": ", std::strerror(errno)));
  }
  return ReadChromeTrace(file, inputs[0]);
}

absl::Status CheckOutput(const std::string& path, const std::vector<std::string>& inputs) {
  std::error_code error;
  const auto is_it = [&](const std::string& input) {
    return std::filesystem::equivalent(path, input, error);
  };
  absl::string_view what;
  if (std::filesystem::is_directory(path, error)) {
    what = "a directory";
  } else if (std::filesystem::exists(std::filesystem::symlink_status(path, error)) &&
             !std::filesystem::is_regular_file(path, error)) {
    what = "neither a file nor a link to one";  // a FIFO's opening below would not return
  } else if (IsRecording(path)) {
    what = "a recording of a process, or called as one";
  } else if (std::any_of(inputs.begin(), inputs.end(), is_it)) {
    what = "one of the files to merge";
  } else {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the trace cannot be written to ", path, ", which is ", what));
}

absl::Status WriteTrace(const Timeline& timeline, const std::string& path) {
  if (absl::Status status = CheckOutput(path, {}); !status.ok()) return status;
  std::error_code error;
  const std::string target = std::filesystem::weakly_canonical(path, error).string();
  const std::string temporary = absl::StrCat(target, ".tmp");
  errno = error.value();
  if (!error) {
    // A link there would lead to a file that is to be kept.
    std::remove(temporary.c_str());
    const int created =
        open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    std::ofstream file;
    if (created >= 0) {
      file.open(absl::StrCat("/proc/self/fd/", created), std::ios::binary);  // not by name again
      close(created);
    }
    WriteChromeTrace(timeline, file);
    file.close();
    if (file && std::rename(temporary.c_str(), target.c_str()) == 0) return absl::OkStatus();
  }
  const int reason = errno;
  std::remove(temporary.c_str());
  return absl::InvalidArgumentError(
      absl::StrCat("the trace cannot be written to ", path, ": ", std::strerror(reason)));
}

std::vector<std::string> Describe(const Timeline& timeline) {
  size_t events = 0;
  std::vector<std::string> lines;
  for (const Process& process : timeline.processes) {
    events += process.events.size();
    if (process.dropped > 0) {
      lines.push_back(absl::StrFormat("%s has recorded %d events more than were kept, the oldest",
                                      process.name, process.dropped));
    }
    if (process.refused_labels > 0) {
      lines.push_back(absl::StrFormat(
          "%s had no room for a job's or codec's name %d times: some of its events have none",
          process.name, process.refused_labels));
    }
  }
  lines.insert(lines.end(), timeline.left_out.begin(), timeline.left_out.end());
  for (std::string& unmatched : DescribeUnmatched(timeline)) {
    lines.push_back(std::move(unmatched));
  }
  for (size_t host = 1; host < timeline.hosts.size(); ++host) {
    lines.push_back(DescribeClock(timeline.hosts[host], timeline.hosts[0]));
  }
  lines.insert(lines.begin(),
               absl::StrFormat("%d events of %d processes on %d host%s, %d arrows", events,
                               timeline.processes.size(), timeline.hosts.size(),
                               timeline.hosts.size() == 1 ? "" : "s", timeline.arrows.size()));
  return lines;
}

}  // namespace signpost::trace
