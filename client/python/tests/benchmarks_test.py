"""The benchmarks run; what they measure is for docs/measurements.md."""

import os
import subprocess
import sys

import pytest

BENCHMARKS = "client/python/benchmarks"


def output_of(*command):
    return subprocess.run(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def test_step_time_compares_with_pytorch():
    program = f"{BENCHMARKS}/step_time.py"
    output = output_of(program, "--tensors=2", "--width=64", "--steps=2")
    assert output.startswith("8192 parameters")
    assert output.count("OneBitAdam takes") == 2


def test_overlap_measures_both_stages():
    probe = f"signpost-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe]).returncode != 0:
        pytest.skip("there may be no named network namespace here")
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    small = ["--rounds=1", "--steps=1", "--batch=1", "--context=8", "--width=64", "--layers=1"]
    output = output_of(f"{BENCHMARKS}/overlap.py", *small, "--idle-ms=1")
    assert output.count("of the longer one") == 2
