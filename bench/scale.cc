#include "bench/scale.h"

#include <algorithm>
#include <bit>
#include <deque>
#include <limits>
#include <vector>

namespace signpost::bench {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// Which of many has the least time. A change costs a way up the tree of pairwise winners.
class Agenda {
 public:
  explicit Agenda(uint32_t entries)
      : leaves_(std::bit_ceil(entries)), times_(leaves_, kNever), winners_(2 * leaves_) {
    for (uint32_t i = 0; i < leaves_; ++i) winners_[leaves_ + i] = i;
    for (uint32_t node = leaves_; node-- > 1;) winners_[node] = Winner(node);
  }

  void Set(uint32_t entry, double time) {
    times_[entry] = time;
    for (uint32_t node = (leaves_ + entry) / 2; node > 0; node /= 2) winners_[node] = Winner(node);
  }

  uint32_t first() const { return winners_[1]; }  // the lowest of those with the least time
  double time(uint32_t entry) const { return times_[entry]; }

 private:
  uint32_t Winner(uint32_t node) const {
    const uint32_t left = winners_[2 * node], right = winners_[2 * node + 1];
    return times_[right] < times_[left] ? right : left;
  }

  const uint32_t leaves_;
  std::vector<double> times_;
  std::vector<uint32_t> winners_;  // winners_[1] of all; node n has the children 2n and 2n + 1
};

// When what does one thing at a time is free again.
struct Server {
  double free_s = 0;

  double Serve(double arrival_s, double service_s) {
    free_s = std::max(free_s, arrival_s) + service_s;
    return free_s;
  }
};

struct PlayedWorker {
  Server thread, sending, receiving;
  uint64_t compressed = 0;      // chunks
  uint64_t sent = 0;            // likewise: are, or have been, on the link
  std::vector<double> ready_s;  // to be sent: by chunk, modulo the window
};

struct PlayedShard {
  struct RoundsAnswer {
    uint64_t chunk;
    double done_s;
  };

  Server sums, sending, receiving;
  std::deque<RoundsAnswer> answers;  // the first is on its way to the ranks from next_rank on
  uint32_t next_rank = 0;
  double ready_s = kNever;  // to be sent to it
};

struct PlayedHost {
  Server out, in;
  uint64_t frames_out = 0;
  std::vector<uint32_t> shards;
};

class Player {
 public:
  Player(const Cluster& cluster, const ChunkTimes& chunk, double latency_s)
      : cluster_(cluster),
        chunk_(chunk),
        latency_s_(latency_s / 2),
        window_(std::min<uint64_t>(cluster.window(), chunk.chunks)),
        hosts_(cluster.workers + (cluster.colocated ? 0 : cluster.shards)),
        workers_(cluster.workers),
        shards_(cluster.shards),
        contributions_(chunk.chunks),
        agenda_(hosts_.size()) {
    for (uint32_t shard = 0; shard < cluster.shards; ++shard) {
      hosts_[HostOfShard(shard)].shards.push_back(shard);
    }
  }

  // Returns when the last answer has been applied.
  double Play() {
    for (PlayedWorker& worker : workers_) {
      worker.ready_s.resize(window_);
      while (worker.compressed < window_) Compress(worker);
    }
    for (uint32_t host = 0; host < hosts_.size(); ++host) Plan(host);
    while (agenda_.time(agenda_.first()) < kNever) SendFrom(agenda_.first());
    double end_s = 0;
    for (const PlayedWorker& worker : workers_) end_s = std::max(end_s, worker.thread.free_s);
    return end_s;
  }

  uint64_t most_frames_out() const {
    uint64_t most = 0;
    for (const PlayedHost& host : hosts_) most = std::max(most, host.frames_out);
    return most;
  }

 private:
  uint32_t HostOfShard(uint32_t shard) const {
    return cluster_.colocated ? shard % cluster_.workers : cluster_.workers + shard;
  }

  double ReadyOfWorker(uint32_t host) const {
    if (host >= workers_.size()) return kNever;
    const PlayedWorker& worker = workers_[host];
    return worker.sent < worker.compressed ? worker.ready_s[worker.sent % window_] : kNever;
  }

  // The host's shard that has something to send first, of those that come before `least_s`.
  PlayedShard* FirstShard(uint32_t host, double& least_s) {
    PlayedShard* first = nullptr;
    for (const uint32_t shard : hosts_[host].shards) {
      if (shards_[shard].ready_s >= least_s) continue;
      first = &shards_[shard];
      least_s = first->ready_s;
    }
    return first;
  }

  // Notes when the host's link takes its next frame.
  void Plan(uint32_t host) {
    double ready_s = ReadyOfWorker(host);
    FirstShard(host, ready_s);
    agenda_.Set(host, std::max(ready_s, hosts_[host].out.free_s));
  }

  // Sends what is the first to be sent from this host.
  void SendFrom(uint32_t host) {
    double ready_s = ReadyOfWorker(host);
    PlayedShard* const shard = FirstShard(host, ready_s);
    const uint32_t to = shard == nullptr ? SendFrame(host) : SendAnswer(host, *shard);
    Plan(host);
    if (to != host) Plan(to);
  }

  // A worker's next chunk, to its shard. Returns the host that has it then.
  uint32_t SendFrame(uint32_t host) {
    const uint64_t chunk = workers_[host].sent++;
    PlayedShard& shard = shards_[chunk % shards_.size()];
    const uint32_t to = HostOfShard(chunk % shards_.size());
    const double received_s =
        shard.receiving.Serve(Carry(host, to) + latency_s_, chunk_.transport_s);
    if (++contributions_[chunk] < workers_.size()) return to;
    shard.answers.push_back({chunk, shard.sums.Serve(received_s, chunk_.aggregate_s)});
    if (shard.answers.size() == 1) PrepareAnswer(shard);
    return to;
  }

  // The shard's first answer, to the next rank.
  uint32_t SendAnswer(uint32_t host, PlayedShard& shard) {
    const uint32_t rank = shard.next_rank++;
    PlayedWorker& worker = workers_[rank];
    const double received_s =
        worker.receiving.Serve(Carry(host, rank) + latency_s_, chunk_.transport_s);
    worker.thread.Serve(received_s, chunk_.apply_s);
    if (worker.compressed < chunk_.chunks) Compress(worker);
    if (shard.next_rank == workers_.size()) {
      shard.answers.pop_front();
      shard.next_rank = 0;
    }
    PrepareAnswer(shard);
    return rank;
  }

  // The thread comes from the last chunk, or from an answer that has made room in the window.
  void Compress(PlayedWorker& worker) {
    const double compressed_s = worker.thread.Serve(0, chunk_.compress_s);
    worker.ready_s[worker.compressed++ % window_] =
        worker.sending.Serve(compressed_s, chunk_.transport_s);
  }

  void PrepareAnswer(PlayedShard& shard) {
    shard.ready_s = shard.answers.empty()
                        ? kNever
                        : shard.sending.Serve(shard.answers.front().done_s, chunk_.transport_s);
  }

  // Returns when a frame that leaves now is there.
  double Carry(uint32_t from, uint32_t to) {
    const double now_s = agenda_.time(from);
    if (from == to) return now_s;
    hosts_[from].out.Serve(now_s, chunk_.link_s);
    ++hosts_[from].frames_out;
    return hosts_[to].in.Serve(now_s, chunk_.link_s);
  }

  const Cluster cluster_;
  const ChunkTimes chunk_;
  const double latency_s_;  // one way
  const uint64_t window_;
  std::vector<PlayedHost> hosts_;  // the workers', by rank; then the shards', if they have any
  std::vector<PlayedWorker> workers_;
  std::vector<PlayedShard> shards_;
  std::vector<uint32_t> contributions_;  // by chunk
  Agenda agenda_;                        // of the hosts' links
};

}  // namespace

PlayedExchange PlayExchange(const Cluster& cluster, uint64_t parameters, const CodecCosts& codec,
                            const TransportCosts& transport) {
  const ChunkTimes chunk = ChunkTimesOf(cluster, parameters, codec, transport);
  Player player(cluster, chunk, transport.latency_s);
  PlayedExchange played;
  played.exchange_s = player.Play();
  const double chunks = static_cast<double>(chunk.chunks);
  const auto chunks_of_shard =
      static_cast<double>(MostChunksOfAShard(chunk.chunks, cluster.shards));
  const double frames_of_shard = chunks_of_shard * cluster.workers;
  played.link_s = static_cast<double>(player.most_frames_out()) * chunk.link_s;
  played.worker_s = chunks * (chunk.compress_s + chunk.apply_s);
  played.aggregator_s = chunks_of_shard * chunk.aggregate_s;
  played.transport_s = std::max(chunks, frames_of_shard) * chunk.transport_s;
  const double worker_host_s = chunks * (chunk.kernels_s + 2 * chunk.transport_s);
  const double shard_host_s = played.aggregator_s + 2 * frames_of_shard * chunk.transport_s;
  const uint64_t owning_shards = std::min<uint64_t>(cluster.shards, chunk.chunks);
  const uint64_t shards_per_host = (owning_shards - 1) / cluster.workers + 1;
  played.cores_s = cluster.colocated
                       ? worker_host_s + static_cast<double>(shards_per_host) * shard_host_s
                       : std::max(worker_host_s, shard_host_s);
  played.cores_s /= cluster.cores_per_host;
  played.exchange_s = std::max(played.exchange_s, played.cores_s);
  played.frames = 2 * chunk.chunks * cluster.workers;
  return played;
}

}  // namespace signpost::bench
