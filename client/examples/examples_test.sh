#!/usr/bin/env bash
# Runs the example programs under `signpost run` and checks that they trained, and trained alike.
set -euo pipefail
signpost=$1 linear_regression=$2 two_tensors=$3

# run WORKERS AGGREGATORS PROGRAM: the program's output; all ranks must end with the same parameters.
run() {
  local output
  output=$("$signpost" run -n "$1" --aggregators "$2" -- "$3" 2>&1) || { echo "$output"; exit 1; }
  echo "$output"
  local digests
  digests=$(grep -o 'parameters [0-9a-f]*' <<<"$output" | sort -u | wc -l)
  [[ $digests == 1 ]] || { echo "$3: ranks end with $digests different sets of parameters"; exit 1; }
  [[ $(grep -c 'done: parameters' <<<"$output") == "$1" ]] || { echo "$3: not all ranks ended"; exit 1; }
}

output=$(run 4 2 "$linear_regression")
echo "$output"
final=$(grep -o 'step 599 .*squared error [0-9.]*' <<<"$output" | grep -o '[0-9.]*$')
grep -q 'step 599  one-bit' <<<"$output" || { echo "the last step was not one-bit"; exit 1; }
awk -v final="$final" 'BEGIN { exit !(final < 0.05) }' || { echo "squared error is still $final"; exit 1; }

run 3 1 "$two_tensors"
