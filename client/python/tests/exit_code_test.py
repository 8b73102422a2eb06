"""How programs end because of errors that they do not catch."""

import os
import subprocess
import sys

import pytest
import signpost
from signpost._program import start_private_aggregator

# What a rank's program begins with: a model of 8 numbers.
RANK = """
import atexit, ctypes, signpost
atexit.register(print, "at exit")
values = (ctypes.c_float * 8)()

def join(**changes):
    options = signpost.init(join_timeout_s=20, exchange_timeout_s=20).next_job()
    for name, value in changes.items():
        setattr(options, name, value)
    return signpost.Session(options, [signpost.Parameter("x", (8,), ctypes.addressof(values), values)])

def step(session):
    session.step([ctypes.addressof(values)], [signpost.Rates(learning_rate=0.1)])

"""


def start(program, *flags, **variables):
    """Of the environment's variables for ranks it has those given."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SIGNPOST_")}
    for name, value in variables.items():
        environment[f"SIGNPOST_{name}"] = value
    return subprocess.Popen(
        [sys.executable, *flags, "-c", program],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process, typed=""):
    """Its exit code, and all that it has said."""
    output, errors = process.communicate(typed, timeout=60)
    return process.returncode, output + errors


@pytest.fixture(scope="module")
def aggregator():
    return start_private_aggregator()


def start_ranks(aggregator, job, *programs):
    variables = {"AGGREGATORS": aggregator, "JOB": job, "WORLD_SIZE": str(len(programs))}
    return [start(RANK + p, RANK=str(rank), **variables) for rank, p in enumerate(programs)]


def test_a_wrong_environment_is_64():
    code, text = end(start("import signpost; signpost.init()", AGGREGATORS="127.0.0.1:1"))
    assert code == 64
    assert "InvalidArgumentError: environment variable SIGNPOST_JOB is not set" in text


def test_plain_text_to_another_machine_is_64():
    program = "signpost._world._check_aggregators = lambda _: None\njoin()"
    [rank] = start_ranks("192.0.2.1:4000", "far", program)
    code, text = end(rank)
    assert (code, "refusing plain text" in text) == (64, True)


def test_no_aggregator_is_69():
    program = "import signpost; signpost._world._CONNECT_TIMEOUT_S = 0.1; signpost.init()"
    variables = {"AGGREGATORS": "127.0.0.1:1", "JOB": "j", "RANK": "0", "WORLD_SIZE": "1"}
    code, text = end(start(program, **variables))
    assert (code, "UnavailableError" in text) == (69, True)


def test_no_checkpoint_is_64(aggregator):
    [rank] = start_ranks(aggregator, "resume", "join(resume=b'/nowhere')")
    code, text = end(rank)
    assert (code, "NotFoundError" in text) == (64, True)


def test_another_model_than_the_others_is_76(aggregator):
    programs = ["join(block_elements=8)", "join(block_elements=16)"]
    codes = [end(rank) for rank in start_ranks(aggregator, "model", *programs)]
    assert 76 in [code for code, _ in codes]
    assert any("FailedPreconditionError" in text for _, text in codes)


# The same exception as before, and another rank's affair.
def test_a_rank_that_another_has_left_alone_is_75(aggregator):
    programs = ["session = join(); step(session); step(session)", "session = join(); step(session)"]
    alone, gone = [end(rank) for rank in start_ranks(aggregator, "left", *programs)]
    assert gone[0] == 0
    assert "FailedPreconditionError" in alone[1] and "has left job" in alone[1]
    assert alone[0] == 75


def test_an_error_says_its_exit_code_to_who_catches_it(aggregator):
    program = "try:\n    join(resume=b'/nowhere')\nexcept signpost.SignpostError as e:\n    print('code', e.exit_code)"
    [rank] = start_ranks(aggregator, "caught", program)
    code, text = end(rank)
    assert (code, "code 64\n" in text) == (0, True)


# PyTorch keeps no more than the text of what a callback of its futures raises.
@pytest.mark.parametrize(
    "ends, code", [("RuntimeError(f'callback: {error}')", 75), ("RuntimeError('mine')", 1)]
)
def test_an_error_that_tells_of_one_of_ours_ends_with_that_ones_code(ends, code):
    ours = "error = signpost.SignpostError('rank 1 is late', 4, 75)"
    told = f"{ours}; signpost._errors.will_be_told_by_another(error)"
    assert end(start(f"{RANK}signpost.init(); {told}; raise {ends}"))[0] == code


CAUGHT = """
def run():
    try:
        raise signpost.SignpostError('of ours', 4, 75)
    except signpost.SignpostError as error:
        sys.last_value = error  # as pytest does, for debuggers

run()
sys.exit(1)
"""


@pytest.mark.parametrize("ends", ["raise ValueError('mine')", "raise SystemExit(1)", CAUGHT])
def test_other_errors_end_as_without_us(ends):
    assert end(start(f"{RANK}import sys; signpost.init()\n{ends}"))[0] == 1


# rich and others show errors by hooks that call none that was there before.
def test_a_hook_that_replaces_others_changes_no_exit_code():
    hook = "sys.excepthook = lambda *error: print('in colour:', error[1])"
    program = (
        f"{RANK}import sys; signpost.init(); {hook}\nraise signpost.SignpostError('ours', 4, 75)"
    )
    code, text = end(start(program))
    assert (code, "in colour: ours" in text) == (75, True)


THREAD = """
import sys, threading
signpost.init()

def train():
    raise {error}

thread = threading.Thread(target=train)
thread.start()
thread.join()
{main}
"""


@pytest.mark.parametrize(
    "error, main, code",
    [
        ("signpost.SignpostError('of ours', 4, 75)", "", 75),
        ("signpost.SignpostError('of ours', 4, 75)", "sys.exit(3)", 3),
        ("ValueError('of others')", "", 0),  # as ever
    ],
)
def test_an_error_that_ends_a_thread_has_its_exit_code_where_the_program_ends_well(
    error, main, code
):
    ended_with, text = end(start(RANK + THREAD.format(error=error, main=main)))
    assert (ended_with, text.count("Traceback")) == (code, 1)
    assert "at exit" in text


def test_the_traceback_is_shown_by_whom_it_was_and_exit_handlers_run(aggregator):
    program = "import sys; sys.excepthook = lambda *_: print('my hook')\njoin(resume=b'/nowhere')"
    [rank] = start_ranks(aggregator, "hook", program)
    code, text = end(rank)
    assert (code, text.count("my hook")) == (64, 1)
    assert text.index("my hook") < text.index("at exit")


# torch.distributed.init_process_group() installs a hook like this one around ours.
COLLECTING_HOOK = """
import io, sys
signpost.init()
ours = sys.excepthook

def collect_and_print(*error):
    before, sys.stderr = sys.stderr, io.StringIO()
    try:
        ours(*error)
    finally:
        collected, sys.stderr = sys.stderr, before
    print("[rank0]:", collected.getvalue(), file=sys.stderr)

sys.excepthook = collect_and_print
"""


@pytest.mark.parametrize(
    "error, code, shown",
    [
        ("signpost.SignpostError('of ours', 2, 70)", 70, "SignpostError: of ours"),
        ("ValueError('of others')", 1, "ValueError: of others"),
    ],
)
def test_the_traceback_is_shown_once_when_another_hook_collects_it(error, code, shown):
    ended_with, text = end(start(f"{RANK}{COLLECTING_HOOK}raise {error}"))
    assert (ended_with, text.count(shown)) == (code, 1)


def test_who_types_goes_on():
    program = "import signpost\nsignpost.init()\nraise signpost.SignpostError('', 2, 70)"
    code, text = end(start(program, "-i"), "print('still', 'here')\n")
    assert (code, "still here" in text) == (0, True)


def test_who_types_at_a_prompt_that_a_program_opens_goes_on_too():
    program = "import code, signpost\nsignpost.init()\ncode.interact(local={'signpost': signpost})"
    typed = "raise signpost.SignpostError('', 2, 70)\nprint('still', 'here')\n"
    code, text = end(start(program), typed)
    assert (code, "still here" in text) == (0, True)
