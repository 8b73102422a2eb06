#include "config/session_keys.h"

namespace signpost::config {

absl::Span<const SessionKey> SessionKeys() {
  static constexpr SessionKey kKeys[] = {
      {"aggregators", "SIGNPOST_AGGREGATORS", "list of HOST:PORT", "",
       "where the aggregator of each shard listens, in shard order"},
      {"job", "SIGNPOST_JOB", "text", "", "the job's name"},
      {"rank", "SIGNPOST_RANK", "number", "", "which of the job's workers this is, from 0 on"},
      {"world-size", "SIGNPOST_WORLD_SIZE", "number", "", "the job's workers"},
      {"node", "SIGNPOST_NODE", "unix:PATH", "",
       "the worker of this node (`signpost worker`), to which the process attaches"},
      {"failure-timeout", "SIGNPOST_FAILURE_TIMEOUT", "duration", "10s",
       "a peer without sign of life for this long is given up and looked for anew"},
      {"join-timeout", "SIGNPOST_JOIN_TIMEOUT", "duration", "5m",
       "how long a rank waits for the others to join"},
      {"exchange-timeout", "SIGNPOST_EXCHANGE_TIMEOUT", "duration", "1m",
       "how long a step goes on without an answer, and a checkpoint waits for a rank"},
      {"connections", "SIGNPOST_CONNECTIONS", "number", "1",
       "to each aggregator, for where one TCP connection does not fill the link"},
      {"min-workers", "SIGNPOST_MIN_WORKERS", "number", "",
       "least workers in a round, with round-deadline; none: rounds wait for all"},
      {"round-deadline", "SIGNPOST_ROUND_DEADLINE", "duration", "",
       "rounds close without workers that are so much later than the first"},
      {"threads", "SIGNPOST_THREADS", "number", "its share of the processors, up to 8",
       "that compress and apply"},
      {"tls-dir", "SIGNPOST_TLS_DIR", "directory", "",
       "mTLS with the ca.crt, tls.crt and tls.key in it; none: plain text, on loopback only"},
      {"token-file", "SIGNPOST_TOKEN_FILE", "file", "",
       "a Kubernetes service account's token, shown to aggregators"},
      {"trace", "SIGNPOST_TRACE", "directory", "",
       "where the process writes down what it does when, for `signpost trace`"},
      {"insecure-i-understand", "SIGNPOST_INSECURE_I_UNDERSTAND", "true or false", "false",
       "plain text beyond loopback"},
  };
  return kKeys;
}

const SessionKey* SessionKeyOf(absl::string_view variable) {
  for (const SessionKey& key : SessionKeys()) {
    if (key.variable == variable) return &key;
  }
  return nullptr;
}

}  // namespace signpost::config
