#!/usr/bin/env bash
# The wheel, installed in a clean virtual environment, runs a job, and the demo; and a codec, and a
# program, can be built with what is in it.
set -euo pipefail
wheel=$PWD/$1 job=$PWD/$2
torch=$(client/python/in_environment.sh -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')
cd "$TEST_TMPDIR"
/usr/bin/python3 -m venv environment
environment/bin/pip install --quiet --no-index "$wheel"
for packages in environment/lib/python3.*/site-packages; do
  echo "$torch" >"$packages/torch.pth"
done
# The manual and completions lie where a shell with this environment looks.
grep -q '^\.TH "SIGNPOST" 1' environment/share/man/man1/signpost.1
for file in bash-completion/completions/signpost zsh/site-functions/_signpost \
  fish/vendor_completions.d/signpost.fish; do
  grep -q ' complete -- ' "environment/share/$file"
done
export OMP_NUM_THREADS=1
output=$(environment/bin/signpost run -n 2 --aggregators 2 -- environment/bin/python "$job" train 2>&1) ||
  { echo "$output"; exit 1; }
echo "$output"
(($(grep -c 'steps 30 parameters' <<<"$output") == 2))
environment/bin/signpost demo --torch -n 2 --steps 8 --freeze-step 2 --width 32 --layers 1 --context 16 --batch 2
include=$(environment/bin/python -c 'import signpost; print(signpost.INCLUDE)')
cc -shared -fPIC -O2 -I "$include" "$include/../examples/topk.c" -o libtopk.so -lm
environment/bin/signpost codec check ./libtopk.so --options ratio=0.05
cc "$include/../examples/two_tensors.c" -I "$include" -L "$include/.." -Wl,-rpath,"$include/.." \
  -lsignpost -lm -o two_tensors
environment/bin/signpost run -n 2 -- ./two_tensors
