"""Each example trains, alone and as several ranks, which end with the same parameters."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import signpost

EXAMPLES = Path(signpost.__file__).with_name("examples")
TRANSFORMER = ["--steps=60", "--width=64", "--layers=1", "--context=32", "--batch=8"]
SMALL = {
    "language_model": TRANSFORMER,
    "masked_language_model": [*TRANSFORMER, "--learning-rate=4e-3"],
    "resnet": ["--steps=60", "--width=8"],
}
METRIC = {
    "language_model": r"validation loss ([0-9.]+) bits per byte",
    "masked_language_model": r"validation loss ([0-9.]+) bits per masked word",
    "resnet": r"validation accuracy ([0-9.]+) %",
}
RANKS = 2
RANKS_RUN = [sys.executable, "-m", "signpost", "run", f"-n{RANKS}", "--aggregators=2", "--"]


@pytest.fixture
def training(monkeypatch):
    """The module that all examples share."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("training")


each_example = pytest.mark.parametrize("example", SMALL)


def run(launch, example, output, *arguments):
    script = [sys.executable, EXAMPLES / f"{example}.py", *SMALL[example]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(output)}
    ended = subprocess.run(
        [*launch, *script, f"--output={output}", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    print(ended.stdout)
    assert ended.returncode == 0
    return ended.stdout


def assert_replicas_are_identical(output):
    digests = re.findall("done: parameters ([0-9a-f]{8})", output)
    assert len(digests) == RANKS and len(set(digests)) == 1


def metric(example, output):
    return float(re.search(METRIC[example], output)[1])


@each_example
def test_trains_as_several_ranks_in_one_bit(example, tmp_path):
    frozen = ["--freeze-step=9", "--variance-refresh-interval=0"]
    output = run(RANKS_RUN, example, tmp_path, "--optimizer=onebit_adam", *frozen)
    assert_replicas_are_identical(output)
    assert float(re.findall(r"([0-9.]+)x fewer bytes", output)[-1]) > 20
    learned = metric(example, output)
    if example == "language_model":
        assert learned < 6  # bits per byte; 8 is knowing nothing
    elif example == "masked_language_model":
        assert learned < 8.5  # bits per word; 11 is knowing nothing
    else:
        assert learned > 50  # percent; 10 is knowing nothing


@pytest.mark.parametrize(
    "optimizer, learning_rate, bits",
    [
        ("lamb", "2e-2", 32),
        # Frozen at step 18; refreshed in five of the steps from 26 on, from 39 on and from 54 on.
        ("onebit_lamb", "2e-2", 33 / 60 * 8 + 27 / 60),
        # 12 steps are dense, and in 52, the last of which end an interval, there are 23 rounds.
        ("zero_one_adam", "2e-3", 12 / 64 * 8 + 23 / 64),
    ],
)
def test_trains_with_other_optimizers_too(optimizer, learning_rate, bits, tmp_path):
    arguments = [f"--optimizer={optimizer}", f"--learning-rate={learning_rate}"]
    output = run(RANKS_RUN, "resnet", tmp_path, *arguments)
    assert_replicas_are_identical(output)
    sent = float(re.search("sent ([0-9.]+) bits per parameter and step", output)[1])
    assert sent == pytest.approx(bits, abs=0.1)
    assert metric("resnet", output) > 30  # percent; 10 is knowing nothing


def test_trains_adam_in_bytes(tmp_path):
    output = run([], "resnet", tmp_path, "--optimizer=adam", "--codec=int8")
    sent = float(re.search("sent ([0-9.]+) bits per parameter and step", output)[1])
    assert sent == pytest.approx(8, abs=0.2)


@pytest.mark.parametrize(
    "optimizer, wrong",
    [("adam", "--warm-up-codec=int8"), ("adam", "--freeze-step=9"), ("lamb", "--compat=deepspeed")],
)
def test_refuses_options_that_the_optimizer_does_not_have(training, optimizer, wrong):
    parser = training.argument_parser("", steps=1, batch=1, batch_unit="", learning_rate=1)
    arguments = parser.parse_args([f"--optimizer={optimizer}", wrong])
    refused = f"{optimizer} never freezes, and has no {wrong.split('=')[0]}"
    with pytest.raises(SystemExit, match=refused):
        training.make_optimizer([], arguments)


def test_trains_as_deepspeed(tmp_path):
    output = run(RANKS_RUN, "resnet", tmp_path, "--compat=deepspeed")
    assert_replicas_are_identical(output)
    assert metric("resnet", output) > 30  # percent; 10 is knowing nothing


def test_trains_alone_and_goes_on_from_a_checkpoint(tmp_path):
    wanted = run([], "language_model", tmp_path, "--optimizer=adam")
    saving = ["--optimizer=adam", f"--checkpoints={tmp_path / 'checkpoints'}", "--save-every=40"]
    run([], "language_model", tmp_path, *saving)
    resumed = run([], "language_model", tmp_path, *saving)
    assert re.findall("^step ([0-9]+)", resumed, re.MULTILINE)[0] == "42"  # went on behind 40
    assert re.findall("done.*", resumed) == re.findall("done.*", wanted)
    assert metric("language_model", resumed) == metric("language_model", wanted)
    drawn = (tmp_path / "loss.png").exists()
    assert drawn == (importlib.util.find_spec("matplotlib") is not None)


@each_example
def test_trains_on_the_device_that_is_named(example):
    command = [sys.executable, EXAMPLES / f"{example}.py", *SMALL[example], "--device=meta"]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert re.search("parameter 0 .* is on meta; Signpost trains", ended.stderr)


def test_does_not_count_validation_as_computing(training, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(training.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(training.signpost, "world_size", lambda: 1)
    arguments = SimpleNamespace(optimizer="adam", steps=10)
    progress = training.Progress(elements=100, arguments=arguments, first_step=0)
    report = SimpleNamespace(
        step=0, one_bit=False, wire_s=0.1, wait_s=0.2, sent_bytes=400, received_bytes=400
    )
    progress.begin_step()
    now[0] = 0.6
    progress.add(1.0, report)
    now[0] = 1.0  # after the validation
    progress.end_interval(figure=0.5)
    assert "1000 ms (compute 30% wire 10% wait 20% other 40%)" in capsys.readouterr().out


def test_says_what_to_install_for_the_digits(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ImportError('No module named sklearn')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    command = [sys.executable, EXAMPLES / "resnet.py"]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert ended.returncode == 1
    assert ended.stderr.endswith("scikit-learn's: apt-get install python3-sklearn\n")
