"""`signpost demo --torch` trains both ways in PyTorch, and compares."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import signpost

PROGRAM = Path(signpost.__file__).with_name("signpost").resolve()
SMALL = ["-n2", "--steps=40", "--width=64", "--layers=1", "--context=32", "--batch=4"]
SMALL += ["--freeze-step=6"]


def demo(*arguments, **environment):
    command = [PROGRAM, "demo", "--torch", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_prints_the_table_and_writes_the_figures(tmp_path):
    figures = tmp_path / "figures.json"
    ended = demo(*SMALL, f"--output={tmp_path}", f"--json={figures}", f"--python={sys.executable}")
    print(ended.stdout, ended.stderr)
    assert ended.returncode == 0
    for line in (
        "Adam: 2 workers, 2 aggregators, 40 steps\n",
        "1-bit Adam: 2 workers, 2 aggregators, 40 steps\n",
        " parameters, 2 workers; 1-bit Adam sends one bit in 34 of 40 steps\n",
        "\nreplicas identical, CRC-32C            yes, ",
    ):
        assert line in ended.stdout
    figures = json.loads(figures.read_text())
    assert figures["steps"] == 40
    # 64 per byte, position and bias, and 12 times its square in the layer's matrices
    assert 64 * (256 + 32) + 12 * 64**2 < figures["parameters"] < 64 * (256 + 32 + 16) + 12 * 64**2
    assert figures["replicas_identical"]
    assert figures["val_bpb_adam"] < 7 and figures["val_bpb_onebit"] < 7
    # In a model so small, headers are some of the bytes.
    assert 1 < figures["wire_bits_per_param_up"] < 1.3
    assert 1 < figures["wire_bits_per_param_down"] < 1.3
    assert (tmp_path / "loss.svg").exists()
    assert len((tmp_path / "loss.csv").read_text().splitlines()) == 1 + 2 * 20


def test_hands_the_models_flags_on(tmp_path):
    text = tmp_path / "text"
    text.write_text("To be, or not to be. " * 100)
    flags = ["--seed=2", "--learning-rate=0.002", f"--text={text}", f"--output={tmp_path}"]
    ended = demo(*SMALL, *flags, SIGNPOST_PYTHON="echo")
    # Echo is content with all of them, but leaves no results.
    handed_on = "--steps=40 --seed=2 --batch 4 --learning-rate 0.002 --context 32 --layers 1"
    assert f" {handed_on} --width 64 --text {text} --optimizer=adam --results=" in ended.stdout
    assert f" {handed_on} --width 64 --text {text} --optimizer=onebit_adam --freeze-step=6" in ended.stdout
    assert ended.returncode == 64 and "rank-0" in ended.stderr


def test_says_that_pytorch_is_missing(tmp_path):
    without = tmp_path / "python"
    without.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # nor Debian's packages
    without.chmod(0o755)
    ended = demo(f"--python={without}", f"--output={tmp_path}")
    assert ended.returncode == 64
    assert "No module named 'torch'" in ended.stderr
    assert "-m pip install torch" in ended.stderr
    assert "Adam:" not in ended.stdout


@pytest.mark.parametrize("flag", ["--hidden=8", "--embedding=8"])
def test_refuses_flags_of_the_other_model(flag):
    ended = demo(flag)
    assert ended.returncode == 64 and flag.split("=")[0] in ended.stderr
