#!/usr/bin/env bash
# Breaks the system on purpose, one way at a time, in a copy of the tree, and expects tests to go red.
#
#   tests/mutations.sh            all mutations, some minutes
#   tests/mutations.sh sign-bit   those whose name contains the word
#   tests/mutations.sh --check    none: only whether their texts stand in the code
#
# Each mutation replaces a piece of text that must stand exactly once in its file: one that no longer
# matches fails here and wants mending.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
only=${1:-} checks_only=
[[ $only != --check ]] || only='' checks_only=true
survivors=0
if [[ ! $checks_only ]]; then
  copy=$(mktemp -d)
  trap 'bazel --output_base="$copy/output" shutdown >/dev/null 2>&1 || true; chmod -R u+w "$copy"; rm -rf "$copy"' EXIT
  git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$copy"
fi

# mutate NAME FILE OLD NEW: replaces OLD with NEW, runs the tests, puts FILE back.
mutate() {
  local name=$1 old=$3 new=$4 status=0
  [[ $name == *"$only"* ]] || return 0
  OLD=$old perl -0ne '$n += () = /\Q$ENV{OLD}\E/g; END { exit($n == 1 ? 0 : 1) }' "$2" || {
    echo "$name: its text does not stand exactly once in $2"
    exit 1
  }
  [[ ! $checks_only ]] || return 0
  local file=$copy/$2
  cp "$file" "$copy/original"
  OLD=$old NEW=$new perl -0pi -e 's/\Q$ENV{OLD}\E/$ENV{NEW}/' "$file"
  (cd "$copy" && bazel --output_base="$copy/output" test //kernels/... //server/... //worker/... \
    //tests/... --test_output=summary) >"$copy/log" 2>&1 || status=$?
  mv "$copy/original" "$file"
  case $status in
    3) echo "$name: red, in $(grep -cE '^//.* FAILED' "$copy/log") test targets" ;;
    0) echo "$name: SURVIVED, no test notices"; survivors=$((survivors + 1)) ;;
    *) tail -30 "$copy/log"; echo "$name: does not build"; exit 1 ;;
  esac
}

mutate flipped-sign-bit kernels/onebit_reference.cc \
  'std::signbit(u[i]) <<' '!std::signbit(u[i]) <<'
mutate flipped-sign-bit-simd kernels/onebit-inl.h \
  'StoreSigns(u, bits' 'StoreSigns(Map([](Vector v) HWY_ATTR { return hn::Neg(v); }, u), bits'
mutate server-error-dropped server/round.cc \
  'answer.payload = *std::move(payload);' 'answer.payload = *std::move(payload); for (float& e : error) e = 0;'
mutate sum-in-arrival-order server/round.cc \
  'for (const std::optional<Frame>& frame : frames_) {
    if (frame) contributions.push_back(frame->payload.data());' \
  'for (size_t i = 0; i < frames_.size(); ++i) {
    const std::optional<Frame>& frame = frames_[(*first_rank_ + i) % frames_.size()];
    if (frame) contributions.push_back(frame->payload.data());'
mutate server-error-committed-twice server/round.cc \
  'const size_t packed =' \
  'number_codec.Aggregate(rule, chunk, segment, contributions, InverseCount(layout), error_there, out.data()); const size_t packed ='
mutate retry-after-close-refused server/owned_chunk.cc \
  'if (header.step() < open_step_ && header.step() >= oldest_answer()) {' 'if (false) {'
mutate worker-error-dropped worker/host_adam_state.cc \
  'const absl::Span<float> error = ErrorOf(chunk, part);' \
  'const absl::Span<float> error = ErrorOf(chunk, part);
    for (float& e : error) e = 0;'
mutate contribution-not-taken-back worker/worker.cc \
  'optimizer_.TakeBack(chunk, state.packed->data());' ''
mutate one-chunk-at-a-time worker/worker.cc 'window_(WindowOf(channels.size())),' 'window_(1),'
mutate bias-correction-ignored worker/onebit_adam.cc \
  'corrects ? 1 / (1 - Power(group.beta1' '!corrects ? 1 / (1 - Power(group.beta1'
mutate aggregator-error-not-restored worker/worker.cc \
  'const auto found = errors.find(chunk);' 'const auto found = errors.end();'
mutate worker-error-not-restored worker/onebit_adam.cc \
  'if (has_error_[c]) state_->Set(AdamState::Field::kError, c, error.data());' ''
mutate lamb-ratio-not-clipped worker/onebit_lamb.cc \
  'scale.set_ratio(std::clamp(ratio, lamb.min_coeff, lamb.max_coeff));' 'scale.set_ratio(ratio);'
mutate lamb-decay-takes-part-in-the-factor worker/onebit_lamb.cc 'largest * share + (1 - share)' 'largest'
mutate lamb-scales-not-restored worker/onebit_adam.cc 'SetScales(state.scales);' ''
mutate zero-one-interval-by-the-last-rate worker/zero_one_adam.cc \
  'sums.set_decay(sums.decay() + rates.learning_rate * rates.weight_decay);' \
  'sums.set_decay(rates.learning_rate * rates.weight_decay);'
mutate zero-one-floor-of-another-update worker/zero_one_adam.cc \
  'if (floors_of_ == update) return;' 'if (floors_of_) return;'
mutate zero-one-momentum-left-after-a-skip worker/zero_one_adam.cc \
  'state().Set(AdamState::Field::kMomentum, chunk, zeros.data());' ''
mutate checkpoint-section-not-checked storage/section_file.cc 'if (Crc32c(bytes) != crc) {' 'if (false) {'
mutate manifest-written-before-the-parts worker/worker_checkpoint.cc \
  'status = AwaitRanks(dir, id);' \
  'status.Update(absl::OkStatus());'
mutate directory-of-two-runs-not-noticed worker/worker_checkpoint.cc \
  'is_of_this_run(entries.front())' 'true'
mutate rank-without-a-connection-given-up-at-once worker/worker_checkpoint.cc \
  'if (now - since < kReconnectPatience) continue;' ''
mutate connection-known-before-it-is-told worker/presence.cc \
  'if (!IsAnswer(status)) is_known_ = false;' ''
mutate checkpoint-pruned-to-one worker/checkpoint_dir.cc 'kGenerations = 2' 'kGenerations = 1'
mutate node-gradients-summed-not-averaged node/host_place.cc \
  '1.0f / static_cast<float>(gradients_.size())' '1.0f'
mutate node-forgets-its-first-process node/host_place.cc \
  'for (const Numbers* gradient : gradients) gradients_' 'for (const Numbers* gradient : gradients.subspan(gradients.size() > 1)) gradients_'
mutate node-sends-before-its-last-process node/arrivals.cc \
  'if (--missing_[tensor] == 0)' 'if (--missing_[tensor] == (has_arrived_.size() > 1 ? 1 : 0))'
mutate node-on-a-gpu-answers-too-early node/training.cc \
  'if (absl::Status status = place_->Await(); !status.ok()) return Failed(status);' ''

[[ $survivors == 0 ]]
