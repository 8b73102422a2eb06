"""The convergence suite's arithmetic, and that it goes on where it was interrupted."""

import importlib
import math
import re
import sys

import convergence
import pytest
from convergence import TASKS, Interval

SMALL = ["--examples", "resnet", "--seeds", "2", "--steps", "20", "--factors", "1", "2"]
LANGUAGE, RESNET = TASKS["language_model"], TASKS["resnet"]


def test_interval_is_students():
    interval = convergence.confidence_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert interval.mean == 3
    # 2.132 in a table of t for four degrees of freedom and 5% on each side, times sqrt(2.5 / 5)
    assert interval.low == pytest.approx(3 - 2.132 * 0.5**0.5, abs=1e-3)
    assert interval.high == pytest.approx(3 + 2.132 * 0.5**0.5, abs=1e-3)


def run_of(*validations, **figures):
    return {"curve": [[step, 1, value] for step, value in enumerate(validations)], **figures}


def test_differences_are_of_the_best_validation_of_the_same_seed_and_above_0_where_it_is_worse():
    dense, compressed = [run_of(3, 2, 9), run_of(4)], [run_of(2.1), run_of(9, 3, math.nan)]
    assert convergence.relative_differences(LANGUAGE, dense, compressed) == pytest.approx([5, -25])
    dense, compressed = [run_of(90, 80)], [run_of(0, 81)]
    assert convergence.relative_differences(RESNET, dense, compressed) == pytest.approx([10])


@pytest.mark.parametrize(
    "interval, is_equivalent",
    [
        (Interval(0, -0.5, 0.5), True),
        (Interval(0.3, 0.2, 0.4), True),  # it differs, by less than what matters
        (Interval(0, -0.6, 0.4), False),  # better or equal, which is not the same
        (Interval(0, -5, 5), False),  # nobody knows
    ],
)
def test_equivalent_is_what_is_within_the_margin_for_certain(interval, is_equivalent):
    assert interval.is_equivalent == is_equivalent


# A run's figures, beside its curve.
FIGURES = dict(parameters=1e6, steps=100, freeze_step=15, seconds=1)
FIGURES.update(wire_sent=2e7, wire_received=2.5e7)


@pytest.fixture
def trained(monkeypatch):
    """The runs that were made, (optimizer, seed, arguments), and none of them for real. A higher learning rate is
    better for those that compress, and worse for the others."""
    trained = []

    def train(task, optimizer, seed, arguments, workers):
        trained.append((optimizer, seed, arguments))
        rate = float(arguments[-1].partition("=")[2]) if "rate" in arguments[-1] else 0
        sign = 1 if optimizer in convergence.DENSE else -1
        return run_of(50, 90 + seed % 1000 / 100 + sign * rate, **FIGURES)

    monkeypatch.setattr(convergence, "train", train)
    return trained


def test_tunes_both_on_a_seed_of_its_own_and_makes_each_run_once(trained, tmp_path, capsys):
    arguments = [*SMALL, "--runs", str(tmp_path / "runs"), "--docs", str(tmp_path)]
    assert convergence.main(arguments) == 0
    common = (*RESNET.arguments, "--steps=20")
    low, high = (*common, "--learning-rate=0.002"), (*common, "--learning-rate=0.004")
    sweep = [(kind, 1000, of) for kind in ("adam", "onebit_adam") for of in (low, high)]
    assert trained[:4] == sweep
    assert trained[4:] == [
        (kind, seed, low if kind == "adam" else high)
        for seed in (1, 2)
        for kind in ("adam", "onebit_adam")
    ]
    report = (tmp_path / "convergence.md").read_text()
    assert "| ResNet on digits | 1 | 90.0080 | 90.0140 | -0.01% |" in report
    assert "| ResNet on digits | Adam | 0.002 (taken) | 89.9980 |" in report
    assert "| ResNet on digits | 1-bit Adam | 0.004 (taken) | 90.0040 |" in report
    assert " | yes | 1.60 / 2.00 |" in report
    assert (tmp_path / "convergence-resnet.png").stat().st_size < 60000

    convergence.main([*arguments, "--", "--freeze-step=10"])
    assert len(trained) == 8 + 4, "of Adam's runs all are there"
    report = (tmp_path / "convergence.md").read_text()
    assert 'convergence -- --factors 1 2 --compressed="--freeze-step=10"`' in report

    by_hand = "\n## Other measurements\n\nThese runs took a minute.\n\n## On a Tuesday\n"
    (tmp_path / "convergence.md").write_text(report + by_hand)
    convergence.main([*arguments, "--first-seed=3", "--workers=2", "--", "--freeze-step=10"])
    report = (tmp_path / "convergence.md").read_text()
    assert "examples](../client/python/examples): 2 workers" in report
    assert "and 2 seeds from 3 on; β₂ is 0.99" in report
    assert re.findall(r"^\| ResNet on digits \| (\d+) \| 9", report, re.MULTILINE) == ["3", "4"]
    assert report.endswith("|\n" + by_hand) and report.count("Other measurements") == 1
    assert "convergence -- --first-seed=3 --workers=2 --factors 1 2 --compressed=" in report


def test_a_learning_rate_at_which_it_diverges_is_not_taken(tmp_path, monkeypatch):
    def train(task, optimizer, seed, arguments, workers):
        diverges = optimizer == "onebit_adam" and "--learning-rate=0.004" in arguments
        return {"curve": [], "seconds": math.nan} if diverges else run_of(90 + seed % 3, **FIGURES)

    monkeypatch.setattr(convergence, "train", train)
    arguments = [*SMALL, "--runs", str(tmp_path / "runs"), "--docs", str(tmp_path)]
    convergence.main(arguments)
    report = (tmp_path / "convergence.md").read_text()
    assert "| ResNet on digits | 1-bit Adam | 0.002 (taken) |" in report
    assert "| ResNet on digits | 1-bit Adam | 0.004 | -inf |" in report
    with pytest.raises(SystemExit, match="ResNet on digits: 1-bit Adam diverged with seed 1"):
        convergence.main([*arguments, "--factors", "2"])


def test_learning_rates_are_given_as_factors(tmp_path):
    with pytest.raises(SystemExit):
        convergence.main([*SMALL, "--both=--learning-rate=1"])


def test_says_where_equivalence_was_not_shown(tmp_path, monkeypatch):
    def train(task, optimizer, seed, arguments, workers):
        return run_of(90 + seed % 3 * (optimizer == "adam"), **FIGURES)

    monkeypatch.setattr(convergence, "train", train)
    arguments = [*SMALL, "--runs", str(tmp_path / "runs"), "--docs", str(tmp_path)]
    assert convergence.main(arguments) == 1
    assert " | not shown | " in (tmp_path / "convergence.md").read_text()


def test_compares_another_optimizer_with_its_own_dense_one_in_its_own_report(trained, tmp_path):
    paths = ["--runs", str(tmp_path / "runs"), "--docs", str(tmp_path)]
    both = ["--both=--gamma=1", "--both", "resnet: --width=8 --seed=3"]
    both += ["--both", "language_model: --width=64"]
    lamb = [*SMALL, "--optimizer", "onebit_lamb", "--batch-factor", "8", *both, *paths]
    convergence.main([*lamb, "--", "--freeze-step=7"])
    common = (*RESNET.arguments, "--steps=20", "--batch=256", "--gamma=1", "--width=8", "--seed=3")
    assert trained[0] == ("lamb", 1000, (*common, "--learning-rate=0.002"))
    compressed = [arguments for kind, _, arguments in trained if kind == "onebit_lamb"]
    assert compressed[0] == (*common, "--learning-rate=0.002", "--freeze-step=7")
    assert not (tmp_path / "convergence.md").exists()
    report = (tmp_path / "convergence-onebit_lamb.md").read_text()
    assert report.startswith("# Convergence of 1-bit LAMB\n\nLAMB and 1-bit LAMB on the")
    assert (
        "`bazel run //client/python:convergence -- --optimizer=onebit_lamb --batch-factor=8 "
        "--factors 1 2 "
        '--both="--gamma=1" --both="resnet: --width=8 --seed=3" '
        '--both="language_model: --width=64" --compressed="--freeze-step=7"`'
    ) in report
    assert "![ResNet on digits](convergence-onebit_lamb-resnet.png)" in report


def test_an_example_may_have_options_of_its_own(trained, tmp_path):
    paths = ["--runs", str(tmp_path / "runs"), "--docs", str(tmp_path)]
    options = ["--compressed", "resnet: --freeze-step=10"]
    options += ["--compressed", "language_model: --freeze-step=75"]
    convergence.main([*SMALL, *options, *paths])
    assert {arguments[-1] for kind, _, arguments in trained if kind == "onebit_adam"} == {
        "--freeze-step=10"
    }
    report = (tmp_path / "convergence.md").read_text()
    assert "Options of 1-bit Adam: `resnet: --freeze-step=10`, `language_model: --" in report


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_knows_the_batch_of_each_example(task, monkeypatch):
    monkeypatch.syspath_prepend(convergence.PACKAGE / "examples")
    monkeypatch.setattr(sys, "argv", [task.name])
    example = importlib.import_module(task.name)
    assert example.parse_arguments().batch == task.batch


def test_trains_an_example():
    run = convergence.train(RESNET, "onebit_adam", 1, ("--steps=20", "--freeze-step=3"), 2)
    assert (run["steps"], run["freeze_step"], run["world_size"]) == (20, 3, 2)
    assert run["one_bit_steps"] == 12, "from step 11 on five refresh the variance"
    assert 1 < 8 * run["one_bit_wire_sent"] / run["parameters"] / 12 < 1.1  # bits
    assert 0 < run["validation"] <= 100  # percent
    assert len(run["curve"]) == 20 and run["curve"][-1][2] == run["validation"]


@pytest.mark.parametrize(
    "options, one_bit_steps",
    [
        (["--freeze-step=auto"], 0),
        # 13 of 20 steps, behind the third.
        (["--freeze-step=3", "--variance-refresh-interval=4", "--variance-codec=int8"], 13),
    ],
)
def test_varies_which_rounds_are_in_one_bit(options, one_bit_steps):
    run = convergence.train(RESNET, "onebit_adam", 1, ("--steps=20", *options), 2)
    assert run["one_bit_steps"] == one_bit_steps


def test_counts_zero_one_adams_rounds_and_bits():
    arguments = ["--steps=20", "--freeze-step=8", "--var-update-scaler=2"]
    arguments += ["--local-step-scaler=4", "--local-step-clipper=4"]
    run = convergence.train(RESNET, "zero_one_adam", 1, arguments, 2)
    # Of steps 0 to 7 those bring one bit that do not update the variance: 3, 5 and 7.
    # Rounds are after steps 8 to 11, 13, 15, 19.
    assert (run["one_bit_steps"], run["freeze_step"]) == (3 + 7, 8)
    assert run["curve"][-1][2] == run["validation"] > 0
    bits = 8 * run["frozen_wire_sent"] / run["parameters"] / (run["steps"] - run["freeze_step"])
    assert 7 / 12 < bits < 1.1 * 7 / 12
    assert bits < convergence.bits(run, "sent") < 32


def test_validates_after_a_synchronisation():
    run = convergence.train(
        RESNET,
        "zero_one_adam",
        1,
        ("--steps=20", "--freeze-step=2", "--local-step-scaler=2", "--local-step-clipper=8"),
        2,
    )
    # From step 2 on: after 2, 3, 5, 9, 17, and 25 though there are 20.
    assert [point[0] for point in run["curve"]] == [1, 2, 3, 4, 6, 10, 18, 26]


@pytest.mark.parametrize(
    "option, complaint",
    [
        ("--freeze-stop=3", "unrecognized arguments: --freeze-stop=3"),
        ("--gamma=2", "gamma"),
    ],
)
def test_shows_what_a_run_that_fails_has_to_say(option, complaint):
    with pytest.raises(SystemExit, match=complaint):
        convergence.train(RESNET, "onebit_adam", 1, (option,), 2)
