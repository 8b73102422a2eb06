"""The example trains, alone and as four ranks, which end with the same parameters."""

import importlib.util
import os
import re
import subprocess
import sys

EXAMPLE = "client/python/examples/language_model.py"
SMALL = ["--steps=60", "--width=64", "--layers=1", "--context=32", "--batch=8"]
FOUR_RANKS = [sys.executable, "-m", "signpost", "run", "-n", "4", "--aggregators", "2", "--"]


def run(launch, output, *arguments):
    command = [*launch, sys.executable, EXAMPLE, *SMALL, f"--output={output}", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(output)}
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    print(ended.stdout)
    assert ended.returncode == 0
    return ended.stdout


def validation_loss(output):
    return float(re.search(r"validation loss ([0-9.]+) bits per byte", output)[1])


def test_trains_as_four_ranks_in_one_bit(tmp_path):
    output = run(FOUR_RANKS, tmp_path, "--optimizer=onebit_adam")
    digests = re.findall("done: parameters ([0-9a-f]{8})", output)
    assert len(digests) == 4 and len(set(digests)) == 1
    assert validation_loss(output) < 6  # bits per byte; 8 is knowing nothing
    assert float(re.findall(r"([0-9.]+)x fewer bytes", output)[-1]) > 20


def test_trains_alone_and_goes_on_from_a_checkpoint(tmp_path):
    wanted = run([], tmp_path, "--optimizer=adam")
    saving = ["--optimizer=adam", f"--checkpoints={tmp_path / 'checkpoints'}", "--save-every=40"]
    run([], tmp_path, *saving)
    resumed = run([], tmp_path, *saving)
    assert re.findall("^step ([0-9]+)", resumed, re.MULTILINE)[0] == "42"  # went on behind 40
    assert re.findall("done.*", resumed) == re.findall("done.*", wanted)
    assert validation_loss(resumed) == validation_loss(wanted)
    drawn = (tmp_path / "loss.png").exists()
    assert drawn == (importlib.util.find_spec("matplotlib") is not None)
