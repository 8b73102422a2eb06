// A channel to an aggregator in the same process: no network, the same contract.

#ifndef SIGNPOST_TESTS_LOOPBACK_CHANNEL_H_
#define SIGNPOST_TESTS_LOOPBACK_CHANNEL_H_

#include <memory>

#include "server/aggregator.h"
#include "worker/channel.h"

namespace signpost::testing {

// `aggregator` must outlive the channel and the callbacks that it still holds for it.
std::unique_ptr<Channel> LoopbackTo(Aggregator& aggregator);

}  // namespace signpost::testing

#endif  // SIGNPOST_TESTS_LOOPBACK_CHANNEL_H_
