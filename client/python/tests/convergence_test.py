"""The convergence suite's arithmetic, and that it goes on where it was interrupted."""

import importlib
import re
import sys

import convergence
import pytest
from convergence import TASKS, Interval

SMALL = ["--examples", "resnet", "--seeds", "2", "--steps", "20"]


def test_interval_is_students():
    interval = convergence.confidence_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert interval.mean == 3
    # 2.776 in a table of t for four degrees of freedom, times sqrt(2.5 / 5)
    assert interval.low == pytest.approx(3 - 2.776 * 0.5**0.5, abs=1e-3)
    assert interval.high == pytest.approx(3 + 2.776 * 0.5**0.5, abs=1e-3)


def test_differences_are_relative_to_adams_of_the_same_seed():
    adam, onebit = [{"validation": 2.0}, {"validation": 4.0}], [
        {"validation": 2.1},
        {"validation": 3},
    ]
    assert convergence.relative_differences(adam, onebit) == pytest.approx([5, -25])


@pytest.mark.parametrize(
    "interval, lower_is_good, higher_is_good",
    [
        (Interval(2, -1, 5), True, True),  # may be chance
        (Interval(0.9, 0.8, 1), True, True),  # is none, but small
        (Interval(2, 1, 3), False, True),
        (Interval(-2, -3, -1), True, False),
    ],
)
def test_only_a_certain_and_large_gap_is_too_much(interval, lower_is_good, higher_is_good):
    assert convergence.is_good_enough(TASKS["language_model"], interval) == lower_is_good
    assert convergence.is_good_enough(TASKS["resnet"], interval) == higher_is_good


# Of a run, beside its metric and its curve.
FIGURES = dict(parameters=1e6, steps=100, freeze_step=15, wire_sent=1e8, seconds=1)


def test_makes_each_run_once_and_reports_what_was_tried(tmp_path, capsys, monkeypatch):
    def train(task, optimizer, seed, arguments):
        validation = 90 + seed + (optimizer == "onebit_adam") * len(arguments)
        return {**FIGURES, "seed": seed, "validation": validation, "curve": [[100, 1, validation]]}

    monkeypatch.setattr(convergence, "train", train)
    arguments = [*SMALL, "--runs", str(tmp_path / "runs"), "--docs", str(tmp_path)]
    assert convergence.main(arguments) == 0
    assert capsys.readouterr().out.count(" seed ") == 4
    report = (tmp_path / "convergence.md").read_text()
    assert "What was tried" not in report
    # Two arguments, so 1-bit Adam reads two more of a hundred.
    assert "| ResNet on digits | 1 | 91.0000 | 93.0000 | +2.20% |" in report
    assert "| ResNet on digits | 2 | 92.0000 | 94.0000 | +2.17% |" in report
    assert " | 4.0x | – | yes |" in report  # fp32 would be 400 MB
    assert (tmp_path / "convergence-resnet.png").stat().st_size < 60000

    convergence.main([*arguments, "--", "--freeze-step=10"])
    printed = capsys.readouterr().out
    assert printed.count(" seed ") == 2 and printed.count(" onebit_adam ") == 2
    report = (tmp_path / "convergence.md").read_text()
    command = '`bazel run //client/python:convergence -- --compressed="--freeze-step=10"`'
    assert command in report
    assert "| ResNet on digits | none | 2 | +2.19%" in report[report.index("What was tried") :]
    assert "`. Those of the ResNet on digits were chosen on the seeds that this table" in report

    by_hand = "\n## Other measurements\n\nThese runs took a minute.\n\n## On a Tuesday\n"
    (tmp_path / "convergence.md").write_text(report + by_hand)
    convergence.main([*arguments, "--first-seed=3", "--", "--freeze-step=10"])
    report = (tmp_path / "convergence.md").read_text()
    assert "\n2 seeds from 3 on; β₂ is 0.99 in all of them. The difference" in report
    assert re.findall(r"^\| ResNet on digits \| (\d+) \| 9", report, re.MULTILINE) == ["3", "4"]
    assert "were chosen" not in report
    assert report.endswith("|\n" + by_hand) and report.count("Other measurements") == 1
    assert '`bazel run //client/python:convergence -- --first-seed=3 --compressed="--fr' in report


@pytest.fixture
def trained(monkeypatch):
    """The runs that were made, (optimizer, arguments), and none of them for real."""
    trained = []

    def train(task, optimizer, seed, arguments):
        trained.append((optimizer, arguments))
        return {**FIGURES, "validation": 90 + seed, "curve": [[100, 1, 90 + seed]]}

    monkeypatch.setattr(convergence, "train", train)
    return trained


def test_compares_another_optimizer_with_its_own_dense_one_in_its_own_report(trained, tmp_path):
    paths = ["--runs", str(tmp_path / "runs"), "--docs", str(tmp_path)]
    both = ["--both=--learning-rate=1e-2", "--both", "resnet: --width=8 --seed=3"]
    both += ["--both", "language_model: --width=64"]
    lamb = [*SMALL, "--optimizer", "onebit_lamb", "--batch-factor", "8", *both, *paths]
    convergence.main([*lamb, "--", "--gamma=1"])
    common = (*TASKS["resnet"].arguments, "--steps=20", "--batch=256")
    common += ("--learning-rate=1e-2", "--width=8", "--seed=3")
    assert trained == 2 * [("lamb", common), ("onebit_lamb", (*common, "--gamma=1"))]
    assert not (tmp_path / "convergence.md").exists()
    report = (tmp_path / "convergence-onebit_lamb.md").read_text()
    assert report.startswith("# Convergence of 1-bit LAMB\n\nLAMB and 1-bit LAMB on the")
    assert (
        "`bazel run //client/python:convergence -- --optimizer=onebit_lamb --batch-factor=8 "
        '--both="--learning-rate=1e-2" --both="resnet: --width=8 --seed=3" '
        '--both="language_model: --width=64" --compressed="--gamma=1"`'
    ) in report
    assert "![ResNet on digits](convergence-onebit_lamb-resnet.png)" in report


def test_an_example_may_have_options_of_its_own(trained, tmp_path):
    paths = ["--runs", str(tmp_path / "runs"), "--docs", str(tmp_path)]
    options = ["--compressed", "resnet: --freeze-step=10"]
    options += ["--compressed", "language_model: --freeze-step=75"]
    convergence.main([*SMALL, *options, *paths])
    common = (*TASKS["resnet"].arguments, "--steps=20")
    assert trained == 2 * [("adam", common), ("onebit_adam", (*common, "--freeze-step=10"))]
    report = (tmp_path / "convergence.md").read_text()
    assert "Options of 1-bit Adam: `resnet: --freeze-step=10`, `language_model: --" in report


@pytest.mark.parametrize("frozen_wire_sent, holds", [(6.2e6, "yes"), (6.5e6, "NO")])
def test_zero_one_adam_may_send_six_tenths_of_a_bit(frozen_wire_sent, holds, tmp_path, monkeypatch):
    def train(task, optimizer, seed, arguments):
        sent = {"frozen_wire_sent": frozen_wire_sent}
        return {**FIGURES, **sent, "validation": 90 + seed, "curve": [[100, 1, 90 + seed]]}

    monkeypatch.setattr(convergence, "train", train)
    paths = ["--runs", str(tmp_path / "runs"), "--docs", str(tmp_path)]
    code = convergence.main(["--optimizer", "zero_one_adam", *SMALL, *paths])
    report = (tmp_path / "convergence-zero_one_adam.md").read_text()
    bits = 8 * frozen_wire_sent / 85e6
    assert f" | {bits:.3f} | {holds} |" in report
    assert "and sends at most 0.6 bits. Bytes" in report
    assert code == (holds == "NO")


def test_what_both_were_given_is_no_option_that_was_tried(trained, tmp_path):
    paths = ["--runs", str(tmp_path / "runs"), "--docs", str(tmp_path)]
    kind = ["--optimizer", "zero_one_adam", *SMALL, *paths]
    convergence.main([*kind, "--both=--batch=64"])
    assert convergence.main(kind) == 1, "of these runs nobody knows the bits"
    report = (tmp_path / "convergence-zero_one_adam.md").read_text()
    assert [optimizer for optimizer, _ in trained] == 4 * ["adam", "zero_one_adam"]
    assert "What was tried" not in report


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_knows_the_batch_of_each_example(task, monkeypatch):
    monkeypatch.syspath_prepend(convergence.PACKAGE / "examples")
    monkeypatch.setattr(sys, "argv", [task.name])
    example = importlib.import_module(task.name)
    assert example.parse_arguments().batch == task.batch


def test_trains_an_example():
    run = convergence.train(TASKS["resnet"], "onebit_adam", 1, ("--steps=20",))
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
        (["--variance-refresh-interval=4", "--variance-codec=int8"], 13),
    ],
)
def test_varies_which_rounds_are_in_one_bit(options, one_bit_steps):
    run = convergence.train(TASKS["resnet"], "onebit_adam", 1, ("--steps=20", *options))
    assert run["one_bit_steps"] == one_bit_steps


def test_counts_zero_one_adams_rounds_and_bits():
    arguments = ["--steps=20", "--freeze-step=8", "--var-update-scaler=2"]
    arguments += ["--local-step-scaler=4", "--local-step-clipper=4"]
    run = convergence.train(TASKS["resnet"], "zero_one_adam", 1, arguments)
    # Of steps 0 to 7 those bring one bit that do not update the variance: 3, 5 and 7.
    # Rounds are after steps 8 to 11, 13, 15, 19.
    assert (run["one_bit_steps"], run["freeze_step"]) == (3 + 7, 8)
    assert run["curve"][-1][2] == run["validation"] > 0
    assert 7 / 12 < convergence.bits_after_freeze(run) < 1.1 * 7 / 12


def test_validates_after_a_synchronisation():
    run = convergence.train(
        TASKS["resnet"],
        "zero_one_adam",
        1,
        ("--steps=20", "--freeze-step=2", "--local-step-scaler=2", "--local-step-clipper=8"),
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
        convergence.train(TASKS["resnet"], "onebit_adam", 1, (option,))
