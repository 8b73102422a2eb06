"""Trainers of others with an optimizer of Signpost, on two ranks: they end where a plain loop does."""

import inspect
import re
import sys
from pathlib import Path

import pytest
import signpost
from ranks_test import digests_of, printed_in, run

JOB = str(Path(__file__).with_name("trainers_job.py"))
RANKS = 2
TRAINERS = ["transformers", "accelerate", "lightning"]
MODES = ["trains", "clips", "accumulates", "bf16"]


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Runs all scenarios; returns the lines that the ranks printed in each."""
    directory = tmp_path_factory.mktemp("saved")
    scenarios = [f"trains {name} {mode}" for name in TRAINERS for mode in MODES]
    saved = [
        f"resumes {name} {directory} {which}" for name in TRAINERS for which in ("all", "rank_0")
    ]
    saved += [f"skorch_fits {directory} {norm}" for norm in ("0", "0.05")]
    words = " + ".join(scenarios + saved).split()
    code, output = run(RANKS, 2, sys.executable, JOB, *words, GLOO_SOCKET_IFNAME="lo")
    assert code == 0, output
    printed = printed_in(scenarios + saved, output)
    return {scenario.replace(f" {directory}", ""): text for scenario, text in printed.items()}


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_ends_where_a_plain_loop_does(together, name, mode):
    plain, of_trainer = digests_of(together[f"trains {name} {mode}"], RANKS)
    assert plain == of_trainer


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_that_resumes_has_the_bits_of_one_that_was_not_interrupted(together, name):
    uninterrupted, resumed = digests_of(together[f"resumes {name} all"], RANKS)
    assert uninterrupted == resumed
    assert "warned" not in together[f"resumes {name} all"]


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_resumes_from_what_rank_0_has_saved(together, name):
    [digest] = digests_of(together[f"resumes {name} rank_0"], RANKS)
    assert re.findall(
        r"^\[rank (\d)\] warned", together[f"resumes {name} rank_0"], re.MULTILINE
    ) == ["1"]


@pytest.mark.parametrize("norm", ["0", "0.05"])
def test_skorch_ends_where_a_plain_loop_does_also_when_it_resumes(together, norm):
    plain, fitted, resumed = digests_of(together[f"skorch_fits {norm}"], RANKS)
    assert plain == fitted == resumed


@pytest.mark.parametrize("name", TRAINERS)
def test_an_integration_has_a_page_at_most(name):
    module = __import__(f"signpost.integrations.{name}", fromlist=["x"])
    assert len(inspect.getsource(module).splitlines()) < 150


@pytest.mark.parametrize("name", TRAINERS)
def test_an_example_learns_and_has_five_changed_lines_at_most(name, tmp_path):
    example = Path(signpost.__file__).with_name("examples") / f"with_{name}.py"
    assert 3 <= len(re.findall("# Signpost$", example.read_text(), re.MULTILINE)) <= 5
    arguments = ["--steps", "60"] + ([] if name == "accelerate" else ["--output", str(tmp_path)])
    command = [sys.executable, str(example), *arguments]
    code, output = run(RANKS, 1, *command, GLOO_SOCKET_IFNAME="lo", HF_HOME=str(tmp_path))
    assert code == 0
    first, last = map(float, re.search(r"loss ([\d.]+), in the end ([\d.]+)", output).groups())
    assert last < 0.7 * first
