"""What becomes of a job when one of its processes ends."""

import os
import subprocess
import sys

import pytest

PROGRAM = [sys.executable, "-m", "signpost"]

JOIN = """
import array, signpost
values = array.array("f", range(8))
parameter = signpost.Parameter("x", (8,), values.buffer_info()[0], values)
session = signpost.Session(signpost.init().next_job(), [parameter])
report = session.step([parameter.address], [signpost.Rates(learning_rate=0.1)])
assert (report.step, session.steps, report.one_bit) == (0, 1, False)
assert values[7] < 7
"""


@pytest.fixture
def aggregator():
    """The address of one."""
    command = [*PROGRAM, "aggregator", "--drain-grace=0s"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process.stdout.readline().split()[-1]
        process.terminate()


def run(aggregator, script, **more):
    variables = {"AGGREGATORS": aggregator, "JOB": "test", "RANK": "0", "WORLD_SIZE": "1", **more}
    environment = {f"SIGNPOST_{name}": value for name, value in variables.items()}
    return subprocess.run([sys.executable, "-c", script], env={**os.environ, **environment})


def status(aggregator):
    command = [*PROGRAM, "status", "--aggregators", aggregator]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_a_process_that_ends_has_left_its_job(aggregator):
    assert run(aggregator, JOIN).returncode == 0
    assert "test" not in status(aggregator)


def test_a_process_that_ends_by_an_exception_leaves_that_to_its_launcher(aggregator):
    assert run(aggregator, JOIN + "raise ValueError", LAUNCHER="x").returncode == 1
    assert "test" in status(aggregator)


def test_a_process_that_ends_by_an_exception_and_has_no_launcher_has_left(aggregator):
    assert run(aggregator, JOIN + "raise ValueError").returncode == 1
    assert "test" not in status(aggregator)
    assert run(aggregator, JOIN + "raise KeyboardInterrupt").returncode == -2
    assert "test" not in status(aggregator)


def test_a_job_whose_process_is_gone_can_be_started_again(aggregator):
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    for _ in range(2):
        assert run(aggregator, JOIN + killed).returncode == -9
    assert "job test has no connection to rank 0" in status(aggregator)
    assert run(aggregator, JOIN).returncode == 0


STOP = """
import os, signal, sys
with signpost.StopRequest() as stop:
    stop.check()
    os.kill(os.getpid(), signal.SIGTERM)
    session.step([parameter.address], [signpost.Rates(learning_rate=0.1)])
    assert stop.made and session.steps == 2
    {then}
print("not reached")
"""


def test_a_process_that_is_asked_to_stop_finishes_its_step_and_leaves(aggregator):
    assert run(aggregator, JOIN + STOP.format(then="stop.check()")).returncode == 75
    assert "test" not in status(aggregator)


def test_a_request_excuses_what_fails_after_it_and_nothing_else(aggregator):
    fails = "raise signpost.FailedPreconditionError('rank 1 has left', 9, 76)"
    assert run(aggregator, JOIN + STOP.format(then=fails)).returncode == 75
    assert run(aggregator, JOIN + STOP.format(then="raise ValueError")).returncode == 1
    unasked = "with signpost.StopRequest():\n    " + fails
    assert run(aggregator, JOIN + unasked).returncode == 76


def test_a_second_request_ends_the_process_as_ever(aggregator):
    twice = "os.kill(os.getpid(), signal.SIGTERM)"
    assert run(aggregator, JOIN + STOP.format(then=twice)).returncode == -15


def test_a_session_that_is_dropped_has_left_its_job(aggregator):
    dropped = JOIN + "del session\n" + "import gc; gc.collect()\n"
    still = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run(aggregator, dropped + still).returncode == -9
    assert "test" not in status(aggregator)


def test_a_forked_child_ends_and_leaves_its_parents_job_alone(aggregator):
    fork = "import os, sys\nif os.fork() == 0:\n    sys.exit(0)\nassert os.wait()[1] == 0\n"
    assert run(aggregator, JOIN + fork).returncode == 0
    assert "test" not in status(aggregator)
