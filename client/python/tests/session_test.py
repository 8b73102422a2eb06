"""What becomes of a job when one of its processes ends."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import signpost

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
STEP = "session.step([parameter.address], [signpost.Rates(learning_rate=0.1)])\n"


@pytest.fixture
def aggregator():
    """The address of one."""
    command = [*PROGRAM, "aggregator", "--drain-grace=0s"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process.stdout.readline().split()[-1]
        process.terminate()


def environment_of(aggregator, rank=0, world_size=1, **more):
    variables = {"AGGREGATORS": aggregator, "JOB": "test", **more}
    variables.update({"RANK": rank, "WORLD_SIZE": world_size})
    return {**os.environ, **{f"SIGNPOST_{name}": str(value) for name, value in variables.items()}}


def run(aggregator, script, **more):
    environment = environment_of(aggregator, **more)
    return subprocess.run([sys.executable, "-c", script], env=environment)


def status(aggregator):
    command = [*PROGRAM, "status", "--aggregators", aggregator]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def await_status(aggregator, text):
    """Looks until it is there."""
    command = [*PROGRAM, "status", "--watch", "--interval=100ms", "--aggregators", aggregator]
    end = time.monotonic() + 40
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        found = False
        while not found and time.monotonic() < end:
            found = text in process.stdout.readline()
        process.terminate()
    assert found


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


@pytest.fixture
def two_ranks(aggregator):
    """Processes of ranks 0 and 1 that have taken a step; 0 waits in the next for 1, which takes it
    when it is told to."""
    processes = []
    for rank, then in enumerate(["", "print('ready', flush=True)\ninput()\n"]):
        script = "import signal\nsignal.alarm(50)\n" + JOIN + then + STEP
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", script],
                env=environment_of(aggregator, rank, 2),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    assert processes[1].stdout.readline() == "ready\n"
    await_status(aggregator, "rank 1 for")
    yield processes
    for process in processes:
        process.kill()


def test_ctrl_c_ends_a_step_that_waits_and_the_others_are_told(two_ranks):
    two_ranks[0].send_signal(signal.SIGINT)
    _, errors = two_ranks[0].communicate()
    assert two_ranks[0].returncode == -signal.SIGINT, errors
    assert "KeyboardInterrupt" in errors
    _, errors = two_ranks[1].communicate("go on\n")
    assert two_ranks[1].returncode == 75, errors
    assert "rank 0 has left" in errors


INTERRUPTED = """
import array, gc, signpost, threading, weakref
world = signpost.init()
values = array.array("f", range(8))
kept = weakref.ref(values)
print("ready", flush=True)
try:
    address = values.buffer_info()[0]
    signpost.Session(world.next_job(), [signpost.Parameter("x", (8,), address, values)])
except KeyboardInterrupt:
    print("interrupted", flush=True)
del values
gc.collect()
assert kept() is not None
[join] = [thread for thread in threading.enumerate() if thread.name == "signpost join"]
join.join()
del join
gc.collect()
assert kept() is None
print("left", flush=True)
input()
"""


def test_a_join_that_ctrl_c_has_ended_keeps_its_memory_and_then_leaves(aggregator):
    interrupted = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        env=environment_of(aggregator, 1, 2),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert interrupted.stdout.readline() == "ready\n"
    await_status(aggregator, "1/2")
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.stdout.readline() == "interrupted\n"
    script = "import signal\nsignal.alarm(50)\n" + JOIN
    other = subprocess.run(
        [sys.executable, "-c", script],
        env=environment_of(aggregator, 0, 2),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert other.returncode == 75, other.stderr
    assert "rank 1 has left" in other.stderr
    assert interrupted.communicate("\n")[0] == "left\n"
    assert interrupted.returncode == 0


WRITES_NOTHING = """
import array, signpost, threading
world = signpost.init()
values = array.array("f", [7] * 8)
print("ready", flush=True)
try:
    parameter = signpost.Parameter("x", (8,), values.buffer_info()[0], values)
    signpost.Session(world.next_job(), [parameter])
except KeyboardInterrupt:
    print("interrupted", flush=True)
[join] = [thread for thread in threading.enumerate() if thread.name == "signpost join"]
join.join()
print(list(values), flush=True)
"""


def waiting_for_another(aggregator, script):
    """A rank that has said "ready", and has joined, of two."""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment_of(aggregator, 1, 2),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    await_status(aggregator, "1/2")
    return process


def test_a_join_that_ctrl_c_has_ended_writes_nothing_when_the_others_come(aggregator):
    interrupted = waiting_for_another(aggregator, WRITES_NOTHING)
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.stdout.readline() == "interrupted\n"
    other = run(aggregator, JOIN, world_size=2)
    assert other.returncode == 75
    assert interrupted.communicate()[0] == f"{[7.0] * 8}\n"


STOPPED = """
import signal
signal.alarm(50)
with {stop}:
    world = signpost.init()
    values = array.array("f", range(8))
    parameter = signpost.Parameter("x", (8,), values.buffer_info()[0], values)
    print("ready", flush=True)
    {before_it}
    signpost.Session(world.next_job(), [parameter])
"""


def stopped_while_it_waits(aggregator, script, by=signal.SIGTERM):
    """How a rank ends that gets the signal while it waits for another."""
    process = waiting_for_another(aggregator, script)
    process.send_signal(by)
    return process.wait()


@pytest.mark.parametrize("stop", ["contextlib.nullcontext()", "signpost.StopRequest()"])
def test_sigterm_ends_a_join_that_waits(aggregator, stop):
    script = "import array, contextlib, signpost\n" + STOPPED.format(stop=stop, before_it="")
    assert stopped_while_it_waits(aggregator, script) == 75


def test_ctrl_c_ends_a_join_that_waits_under_a_stop_request(aggregator):
    script = "import array, signpost" + STOPPED.format(stop="signpost.StopRequest()", before_it="")
    assert stopped_while_it_waits(aggregator, script, signal.SIGINT) == 75


def test_a_request_to_stop_that_came_before_it_ends_a_join(aggregator):
    asked = "os.kill(os.getpid(), signal.SIGTERM)"
    script = STOPPED.format(stop="signpost.StopRequest()", before_it=asked)
    assert run(aggregator, "import array, os, signpost" + script, world_size=2).returncode == 75


def test_sigterm_does_in_a_join_what_the_program_has_said(aggregator):
    handles = """
import array, contextlib, signal, signpost, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
"""
    script = handles + STOPPED.format(stop="contextlib.nullcontext()", before_it="")
    assert stopped_while_it_waits(aggregator, script) == 3


def test_sigterm_does_behind_a_join_what_it_did_before(aggregator):
    asked = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)"
    assert run(aggregator, JOIN + asked).returncode == -15


REDUCES = """
import array, signal, signpost
signal.alarm(50)
values = array.array("f", range(8))
with signpost.StopRequest() as stop:
    options = signpost.init().options()
    print("ready", flush=True)
    reduction = signpost.Reduction(options, "r", [("x", (8,))])
    reduction.reduce([values.buffer_info()[0]])
    stop.check()
"""


def test_a_reduction_joins_and_is_made_before_a_request_to_stop_is_looked_at(aggregator):
    asked = waiting_for_another(aggregator, REDUCES)
    asked.send_signal(signal.SIGTERM)
    assert run(aggregator, REDUCES, world_size=2).returncode == 0
    assert asked.wait() == 75


def test_a_join_that_has_failed_keeps_no_memory(aggregator):
    failed = """
import array, gc, signpost, threading, weakref
options = signpost.init().next_job()
options.resume = b"/nowhere"
values = array.array("f", range(8))
kept = weakref.ref(values)
gc.disable()
try:
    address = values.buffer_info()[0]
    signpost.Session(options, [signpost.Parameter("x", (8,), address, values)])
except signpost.NotFoundError:
    del values
for thread in threading.enumerate():
    if thread.name == "signpost join":
        thread.join()
thread = None
assert kept() is None
"""
    assert run(aggregator, failed).returncode == 0


def test_a_job_whose_processes_died_in_a_step_can_be_started_again(aggregator, two_ranks):
    for process in two_ranks:
        process.kill()
        process.communicate()
    assert "job test has no connection to ranks 0, 1" in status(aggregator)
    again = [
        subprocess.Popen([sys.executable, "-c", JOIN], env=environment_of(aggregator, rank, 2))
        for rank in (1, 0)
    ]
    assert [process.wait() for process in again] == [0, 0]


def test_ranks_that_were_elsewhere_when_their_job_began_anew_are_to_be_started_again(
    aggregator, two_ranks
):
    two_ranks[0].kill()
    two_ranks[0].communicate()
    successor = subprocess.Popen([sys.executable, "-c", JOIN], env=environment_of(aggregator, 0, 2))
    await_status(aggregator, "1/2")
    _, errors = two_ranks[1].communicate("go on\n")
    assert two_ranks[1].returncode == 75, errors
    assert "has begun. Start rank 1 again as well" in errors
    assert run(aggregator, JOIN, rank=1, world_size=2).returncode == 0
    assert successor.wait() == 0


@pytest.fixture
def stopping_aggregator():
    """An aggregator that stops when the first of two ranks has come to the values of rank 0."""
    command = [*PROGRAM, "aggregator", "--drain-grace=0s"]
    environment = {**os.environ, "SIGNPOST_FAILPOINT": "join.received=stop@3"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield process, process.stdout.readline().split()[-1]
        process.send_signal(signal.SIGCONT)
        process.terminate()


@pytest.mark.parametrize("more", [{}, {"ROUND_DEADLINE": "1s", "MIN_WORKERS": 1}])
def test_ranks_that_take_over_values_when_their_job_begins_anew_are_to_be_started_again(
    stopping_aggregator, more
):
    process, address = stopping_aggregator

    def start(rank):
        script = "import signal\nsignal.alarm(50)\n" + JOIN
        return subprocess.Popen(
            [sys.executable, "-c", script],
            env=environment_of(address, rank, 2, **more),
            stderr=subprocess.PIPE,
            text=True,
        )

    waiting, killed = start(0), start(1)
    _, how = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(how)
    killed.kill()
    killed.communicate()
    process.send_signal(signal.SIGCONT)
    await_status(address, "job test has no connection to rank 1")
    successor = start(1)
    _, errors = waiting.communicate()
    assert waiting.returncode == 75, errors
    # The waiting rank hears of rank 1's end by its own call, or of the next epoch, whichever comes first.
    assert re.search(
        r"has begun\. Start rank 0 again|another has come\. Start this rank again", errors
    )
    again = start(0)
    _, errors = again.communicate()
    assert again.returncode == 0, errors
    _, errors = successor.communicate()
    assert successor.returncode == 0, errors


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
    # As DDP does.
    tells = "e = signpost.UnavailableError('no aggregator', 14, 69); "
    tells += "signpost._errors.will_be_told_by_another(e); raise RuntimeError(f'callback: {e}')"
    assert run(aggregator, JOIN + STOP.format(then=tells)).returncode == 75
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


@pytest.mark.parametrize(
    "call", [STEP, "session.leave()", "session.steps", "signpost.Session(options, [parameter])"]
)
def test_a_forked_child_is_told_that_its_parents_job_is_not_its_own(aggregator, call):
    child = f"""
import os, signal
options = signpost.world().next_job()
if os.fork() == 0:
    signal.alarm(20)
    try:
        {call}
    except RuntimeError as error:
        assert f"{{os.getppid()}} is in a job, and this is process {{os.getpid()}}" in str(error)
        os._exit(3)
    os._exit(4)
assert os.WEXITSTATUS(os.wait()[1]) == 3
"""
    # The parent's job is as it was.
    assert run(aggregator, JOIN + child + STEP + "assert session.steps == 2").returncode == 0


def test_a_forked_child_is_told_that_its_parents_reduction_is_not_its_own(aggregator):
    script = """
import array, os, signal, signpost
values = array.array("f", range(8))
reduction = signpost.Reduction(signpost.init().options(), "r", [("x", (8,))])
if os.fork() == 0:
    signal.alarm(20)
    for call in (lambda: reduction.reduce([values.buffer_info()[0]]), reduction.leave):
        try:
            call()
            os._exit(4)
        except RuntimeError as error:
            assert "a fork of it" in str(error)
    os._exit(3)
assert os.WEXITSTATUS(os.wait()[1]) == 3
reduction.reduce([values.buffer_info()[0]])
"""
    assert run(aggregator, script).returncode == 0


def test_a_forked_child_may_join_when_its_parent_has_left(aggregator):
    script = """
import os, signal
session.leave()
if os.fork() == 0:
    signal.alarm(20)
    signpost.Session(signpost.world().next_job(), [parameter]).leave()
    os._exit(3)
assert os.WEXITSTATUS(os.wait()[1]) == 3
"""
    assert run(aggregator, JOIN + script).returncode == 0


LEAVES = """
import os, signpost
from signpost._leaving import Membership

class Member(Membership):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def leave(self):
        print(self.name, flush=True)
        if self.name in (3, 5):
            raise signpost.UnavailableError(f"{self.name} has nobody to tell")

members = [Member(name) for name in range(9)]
"""


def test_all_memberships_end_in_the_order_of_joining_though_one_fails():
    ended = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True)
    assert ended.stdout.split() == [str(name) for name in range(9)]
    assert "3 has nobody to tell" in ended.stderr and "5 has" not in ended.stderr


CHECKPOINT = """
import os, pathlib, shutil, sys
directory = pathlib.Path(sys.argv[1])

def resumes():
    options = signpost.world().next_job()
    options.resume = bytes(directory)
    try:
        signpost.Session(options, [parameter]).leave()
    except signpost.DataLossError:
        return True
    except signpost.NotFoundError:
        return False
    return True

def agree(wanted):
    assert signpost.has_checkpoint(directory) == resumes() == wanted
    assert signpost.has_checkpoint(str(directory)) == wanted

assert not signpost.has_checkpoint(directory)  # which does not exist
directory.mkdir()
agree(False)
assert signpost.checkpoint_step(directory) is None
session.checkpoint(str(directory))
agree(True)
assert signpost.checkpoint_step(directory) == session.steps
[committed] = directory.iterdir()
(committed / "manifest").rename(directory / "manifest")
agree(True)  # it has been there
try:
    signpost.checkpoint_step(directory)
    raise AssertionError("a manifest is gone")
except signpost.DataLossError as error:
    assert str(directory) in str(error)
(committed / "rank-0.sum").touch()
agree(False)  # of what a crash leaves
(directory / "step-1-0").mkdir()
(directory / "manifest").rename(directory / "step-1-0" / "manifest")
agree(False)  # in a directory of another name
"""


def test_there_is_a_checkpoint_where_one_is_committed(aggregator, tmp_path):
    command = [sys.executable, "-c", JOIN + CHECKPOINT, str(tmp_path / "checkpoints")]
    assert subprocess.run(command, env=environment_of(aggregator)).returncode == 0


@pytest.mark.parametrize("ask", [signpost.has_checkpoint, signpost.checkpoint_step])
def test_an_empty_string_is_no_directory_without_a_checkpoint(ask):
    with pytest.raises(signpost.InvalidArgumentError, match="a checkpoint needs a directory"):
        ask("")


def test_a_directory_that_cannot_be_read_is_not_taken_for_one_without_a_checkpoint(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(signpost.FailedPreconditionError, match="Not a directory"):
        signpost.has_checkpoint(tmp_path / "file")


CHILD = """
import multiprocessing, os, signal, sys
{imports}

def main():
{main}

child = multiprocessing.get_context("fork").Process(target=main)
child.start()
child.join()
sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("end, code", [("pass", 0), ("sys.exit(3)", 3), ("raise ValueError", 1)])
def test_a_forked_child_that_has_joined_leaves_when_it_ends(aggregator, end, code):
    script = CHILD.format(imports="import signpost", main=textwrap.indent(JOIN + end, "    "))
    assert run(aggregator, script).returncode == code
    assert "test" not in status(aggregator)


def test_a_forked_child_that_drops_its_session_has_left(aggregator):
    dropped = "del session, report\nos.kill(os.getpid(), signal.SIGKILL)"
    script = CHILD.format(imports="import signpost", main=textwrap.indent(JOIN + dropped, "    "))
    assert run(aggregator, script).returncode != 0
    assert "test" not in status(aggregator)


@pytest.mark.parametrize("imports", ["import signpost", ""])  # or the child's function does
def test_a_forked_child_that_ends_by_an_exception_leaves_that_to_its_launcher(aggregator, imports):
    raises = textwrap.indent(JOIN + "raise ValueError", "    ")
    script = CHILD.format(imports=imports, main=raises)
    assert run(aggregator, script, LAUNCHER="x").returncode == 1
    assert "test" in status(aggregator)


def test_a_session_that_is_dropped_after_an_error_that_a_prompt_has_shown_has_left(aggregator):
    shown = "import sys\nsys.last_value = signpost.SignpostError('')\ndel session\n"
    still = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run(aggregator, JOIN + shown + still).returncode == -9
    assert "test" not in status(aggregator)
