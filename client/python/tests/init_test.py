"""Which rank of which job a process is, by its environment."""

import ctypes
import signal
import socket
import subprocess
import sys
import time

import pytest
import signpost
from signpost import _world


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    """No launcher's variables, no init() before, and little patience."""
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for _, size, _ in _world._LAUNCHERS:
        monkeypatch.delenv(size, raising=False)
    for name in (*_world._VARIABLES, "NODE"):
        # Set first, so that what init() sets is taken back too.
        monkeypatch.setenv(f"SIGNPOST_{name}", "")
        monkeypatch.delenv(f"SIGNPOST_{name}")
    for name in ("CONFIG", "JOIN_TIMEOUT", "EXCHANGE_TIMEOUT"):
        monkeypatch.delenv(f"SIGNPOST_{name}", raising=False)
    monkeypatch.setattr(_world, "_world", None)
    monkeypatch.setattr(_world, "_CONNECT_TIMEOUT_S", 0.3)


@pytest.fixture
def listener():
    """What can be connected to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield "127.0.0.1:%d" % server.getsockname()[1]


def set_environment(monkeypatch, aggregators, **changes):
    variables = {"AGGREGATORS": aggregators, "JOB": "test", "RANK": "1", "WORLD_SIZE": "3"}
    for name, value in {**variables, **changes}.items():
        if value is not None:
            monkeypatch.setenv(f"SIGNPOST_{name}", value)


def test_takes_rank_size_job_and_aggregators_from_the_environment(monkeypatch, listener):
    set_environment(monkeypatch, f"{listener},{listener}")
    world = signpost.init()
    assert (world.rank, world.world_size, world.job) == (1, 3, "test")
    assert world.aggregators == [listener, listener]
    assert (signpost.rank(), signpost.world_size()) == (1, 3)


def test_takes_from_a_file_what_the_environment_does_not_say(monkeypatch, tmp_path, listener):
    file = tmp_path / "job.yaml"
    file.write_text(f"job: of-the-file\naggregators: [{listener}, {listener}]\nworld-size: 3\n")
    monkeypatch.setenv("SIGNPOST_CONFIG", str(file))
    monkeypatch.setenv("SIGNPOST_RANK", "1")
    world = signpost.init()
    assert (world.rank, world.world_size, world.job) == (1, 3, "of-the-file")
    assert world.aggregators == [listener, listener]


def test_under_torchrun_the_file_names_the_job_and_its_aggregators(monkeypatch, tmp_path, listener):
    file = tmp_path / "job.yaml"
    file.write_text(f"aggregators: {listener}\nrank: 7\n")
    monkeypatch.setenv("SIGNPOST_CONFIG", str(file))
    variables = {"RANK": "1", "WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "42"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    world = signpost.init()
    assert (world.rank, world.world_size, world.job) == (1, 3, "torchrun-42")
    monkeypatch.setattr(_world, "_world", None)
    monkeypatch.delenv("SIGNPOST_JOB")
    another = tmp_path / "another.yaml"  # a process reads a file once
    another.write_text(f"aggregators: {listener}\njob: of-the-file\n")
    monkeypatch.setenv("SIGNPOST_CONFIG", str(another))
    assert signpost.init().job == "of-the-file"


def test_names_the_line_of_a_file_that_is_wrong(monkeypatch, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("job: a\nagregators: b:1\n")
    monkeypatch.setenv("SIGNPOST_CONFIG", str(file))
    with pytest.raises(signpost.InvalidArgumentError, match="job.yaml:2: .*mean 'aggregators'"):
        signpost.init()


def test_timeouts_are_those_of_the_job_to_join(monkeypatch, listener):
    set_environment(monkeypatch, listener)
    options = signpost.init(join_timeout_s=7, exchange_timeout_s=8).next_job()
    assert (options.join_timeout_s, options.exchange_timeout_s) == (7, 8)


def test_arguments_come_before_the_environments_timeouts(monkeypatch, listener):
    set_environment(monkeypatch, listener, JOIN_TIMEOUT="1h", EXCHANGE_TIMEOUT="90s")
    options = signpost.init(join_timeout_s=7).next_job()
    assert (options.join_timeout_s, options.exchange_timeout_s) == (7, 90)


def test_names_a_timeout_of_the_environment_that_is_none(monkeypatch, listener):
    set_environment(monkeypatch, listener, EXCHANGE_TIMEOUT="90")
    with pytest.raises(
        signpost.InvalidArgumentError, match="SIGNPOST_EXCHANGE_TIMEOUT is '90', wanted a duration"
    ):
        signpost.init()


@pytest.mark.parametrize("name", ["join_timeout_s", "exchange_timeout_s"])
def test_a_timeout_must_be_a_number(monkeypatch, listener, name):
    set_environment(monkeypatch, listener)
    with pytest.raises(signpost.InvalidArgumentError, match=f"{name} is nan, wanted a number"):
        signpost.init(**{name: float("nan")})
    options = signpost.init(**{name: float("inf")}).next_job()
    assert getattr(options, name) == float("inf")


def test_each_optimizer_has_a_job_of_its_own(monkeypatch, listener):
    set_environment(monkeypatch, listener)
    world = signpost.init()
    assert [world.next_job().job for _ in range(3)] == [
        b"test",
        b"test/optimizer-1",
        b"test/optimizer-2",
    ]
    assert [world.next_job(name).job for name in ("critic", "actor", "critic")] == [
        b"test/critic",
        b"test/actor",
        b"test/critic/optimizer-1",
    ]
    with pytest.raises(ValueError, match="name is empty"):
        world.next_job("")


@pytest.mark.parametrize("missing", ["AGGREGATORS", "JOB", "RANK", "WORLD_SIZE"])
def test_names_the_variable_that_is_missing(monkeypatch, listener, missing):
    set_environment(monkeypatch, listener, **{missing: ""})
    with pytest.raises(signpost.InvalidArgumentError) as raised:
        signpost.init()
    assert f"SIGNPOST_{missing} is not set" in str(raised.value)
    assert "signpost run" in str(raised.value)


def test_names_a_variable_that_is_not_a_number(monkeypatch, listener):
    set_environment(monkeypatch, listener, RANK="one")
    with pytest.raises(signpost.InvalidArgumentError, match="SIGNPOST_RANK is 'one'"):
        signpost.init()


def test_refuses_a_rank_beyond_the_world(monkeypatch, listener):
    set_environment(monkeypatch, listener, RANK="3")
    with pytest.raises(signpost.InvalidArgumentError, match="SIGNPOST_RANK is 3 and .* 3: ranks"):
        signpost.init()


def test_refuses_an_address_of_another_protocol(monkeypatch, listener):
    set_environment(monkeypatch, f"http://{listener}")
    with pytest.raises(signpost.InvalidArgumentError, match="wanted HOST:PORT without 'http://'"):
        signpost.init()


def test_refuses_an_address_without_a_port(monkeypatch, listener):
    set_environment(monkeypatch, f"{listener},elsewhere")
    with pytest.raises(signpost.InvalidArgumentError, match="has 'elsewhere', wanted HOST:PORT"):
        signpost.init()


def test_names_the_aggregator_that_does_not_run_and_how_to_start_it(monkeypatch, listener):
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = "127.0.0.1:%d" % server.getsockname()[1]
    set_environment(monkeypatch, f"{listener},{gone}")
    with pytest.raises(signpost.UnavailableError) as raised:
        signpost.init()
    assert "Connection refused" in str(raised.value)
    assert f"`signpost aggregator --listen {gone} --shard 1/2`" in str(raised.value)


def test_a_nodes_worker_is_not_for_python(monkeypatch, listener):
    set_environment(monkeypatch, listener, NODE="unix:/run/signpost/worker")
    with pytest.raises(signpost.InvalidArgumentError) as raised:
        signpost.init()
    assert "SIGNPOST_NODE is unix:/run/signpost/worker" in str(raised.value)
    assert "share one exchange by shard_mesh (docs/sharding.md)" in str(raised.value)


def test_a_second_call_returns_the_same_world(monkeypatch, listener):
    set_environment(monkeypatch, listener)
    assert not signpost.is_initialized()
    world = signpost.init(join_timeout_s=7)
    assert signpost.init() is world and signpost.init(join_timeout_s=7) is world
    assert signpost.is_initialized()


def test_a_second_call_in_another_environment_is_refused(monkeypatch, listener):
    set_environment(monkeypatch, listener)
    signpost.init(join_timeout_s=7)
    with pytest.raises(
        RuntimeError, match=r"called before, with another join_timeout_s: .*shutdown\(\)"
    ):
        signpost.init(join_timeout_s=8)
    monkeypatch.setenv("SIGNPOST_RANK", "2")
    with pytest.raises(RuntimeError, match="called before, with another SIGNPOST_RANK: "):
        signpost.init()


def test_after_shutdown_another_world_may_follow(monkeypatch, listener):
    signpost.shutdown()  # does nothing
    monkeypatch.setenv("SIGNPOST_AGGREGATORS", listener)
    for name, value in [("RANK", "2"), ("WORLD_SIZE", "4"), ("TORCHELASTIC_RUN_ID", "a")]:
        monkeypatch.setenv(name, value)
    assert signpost.init().job == "torchrun-a"
    signpost.world().next_job()
    signpost.shutdown()
    assert not signpost.is_initialized()
    with pytest.raises(RuntimeError, match=r"call signpost.init\(\) first"):
        signpost.rank()
    for name, value in [("RANK", "0"), ("WORLD_SIZE", "2"), ("TORCHELASTIC_RUN_ID", "b")]:
        monkeypatch.setenv(name, value)
    world = signpost.init()
    assert (world.rank, world.world_size, world.job) == (0, 2, "torchrun-b")
    assert world.next_job().job == b"torchrun-b"


SHUTDOWN = """
import array, os, signpost
values = array.array("f", range(8))
for _ in range(3):
    signpost.init()
    parameter = signpost.Parameter("x", (8,), values.buffer_info()[0], values)
    session = signpost.Session(signpost.world().next_job(), [parameter])
    session.step([parameter.address], [signpost.Rates(learning_rate=0.1)])
    signpost.shutdown()
    try:
        session.step([parameter.address], [signpost.Rates(learning_rate=0.1)])
    except RuntimeError as error:
        print(error)
children = os.popen(f"ps --no-headers --ppid {os.getpid()} -o comm").read()
assert "signpost" not in children and "setpriv" not in children, children
"""


def test_shutdown_leaves_all_jobs_and_ends_a_private_aggregator():
    program = subprocess.run(
        [sys.executable, "-c", SHUTDOWN], capture_output=True, text=True, timeout=60
    )
    assert (program.returncode, program.stderr.count("a single process")) == (0, 3), program.stderr
    assert program.stdout.count("this worker has left its job") == 3


def test_rank_before_init_says_so():
    with pytest.raises(RuntimeError, match=r"call signpost.init\(\) first"):
        signpost.rank()


def test_torchrun_needs_only_the_aggregators(monkeypatch, listener):
    monkeypatch.setenv("SIGNPOST_AGGREGATORS", listener)
    for name, value in [("RANK", "2"), ("WORLD_SIZE", "4"), ("TORCHELASTIC_RUN_ID", "a")]:
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "5")
    world = signpost.init()
    assert (world.rank, world.world_size, world.job) == (2, 4, "torchrun-a")


def test_a_torchrun_without_a_name_may_be_followed_by_another(monkeypatch, listener):
    """An aggregator begins a job anew when all of its processes are gone."""
    for name, value in [("RANK", "2"), ("WORLD_SIZE", "4"), ("TORCHELASTIC_RUN_ID", "none")]:
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SIGNPOST_AGGREGATORS", listener)
    assert signpost.init().job == "torchrun-none"


def test_torchrun_without_aggregators_is_told_how_to_start_one(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(signpost.InvalidArgumentError, match="`signpost aggregator --listen"):
        signpost.init()


def test_without_a_launcher_runs_alone_and_says_so_in_one_line(capfd):
    world = signpost.init()
    assert (world.rank, world.world_size) == (0, 1)
    assert capfd.readouterr().err.count("\n") == 1
    values = (ctypes.c_float * 8)()
    parameter = signpost.Parameter("x", (8,), ctypes.addressof(values), values)
    session = signpost.Session(world.next_job(), [parameter])
    assert session.steps == 0
    session.leave()


@pytest.mark.parametrize(
    "launcher, size, rank",
    [
        ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("mpiexec", "PMI_SIZE", "PMI_RANK"),
    ],
)
def test_processes_that_were_started_together_do_not_train_alone(
    monkeypatch, listener, launcher, size, rank
):
    monkeypatch.setenv(size, "4")
    with pytest.raises(signpost.InvalidArgumentError) as raised:
        signpost.init()
    assert f"{size} is 4, as {launcher} sets it" in str(raised.value)
    assert "`signpost run -n 4`" in str(raised.value)
    assert f"SIGNPOST_RANK=${rank} and SIGNPOST_WORLD_SIZE=${size}" in str(raised.value)
    set_environment(monkeypatch, listener)
    assert signpost.init().world_size == 3


@pytest.mark.parametrize(
    "variable, value", [("SLURM_STEP_NUM_TASKS", "1"), ("PMI_SIZE", ""), ("SLURM_NTASKS", "4")]
)
def test_a_single_process_of_a_launcher_is_alone(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    assert signpost.init().world_size == 1


PYTHON_OF_AGGREGATOR = """
import os, pathlib, signpost
signpost.init()
threads = pathlib.Path("/proc/self/task").iterdir()
[aggregator] = " ".join((thread / "children").read_text() for thread in threads).split()
variables = pathlib.Path(f"/proc/{aggregator}/environ").read_text().split("\\0")
print([v.partition("=")[2] for v in variables if v.startswith("SIGNPOST_PYTHON=")])
assert "SIGNPOST_PYTHON" not in os.environ or os.environ["SIGNPOST_PYTHON"] == "mine"
"""


@pytest.mark.parametrize("named, wanted", [(None, sys.executable), ("mine", "mine")])
def test_a_private_aggregator_has_the_interpreter_of_its_process(monkeypatch, named, wanted):
    monkeypatch.delenv("SIGNPOST_PYTHON", raising=False)
    if named is not None:
        monkeypatch.setenv("SIGNPOST_PYTHON", named)
    command = [sys.executable, "-c", PYTHON_OF_AGGREGATOR]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert ended.stdout == f"{[wanted]}\n"


ALONE = "import os, signpost, sys; print(signpost.init().aggregators[0]); sys.stdout.flush(); "


def answers(address):
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
        return True
    except OSError:
        return False


IN_A_THREAD = """
import os, signpost, threading
thread = threading.Thread(target=signpost.init)
thread.start()
thread.join()
print(signpost.world().aggregators[0], flush=True)
input()
"""


def test_a_private_aggregator_outlives_the_thread_of_init():
    command = [sys.executable, "-c", IN_A_THREAD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        address = process.stdout.readline().strip()
        time.sleep(0.2)  # that a signal at the thread's end would take
        assert answers(address)
        process.communicate("\n")


@pytest.mark.parametrize("end, exit_code", [("", 0), ("os.kill(os.getpid(), 9)", -signal.SIGKILL)])
def test_a_private_aggregator_ends_with_its_process(end, exit_code):
    alone = subprocess.run([sys.executable, "-c", ALONE + end], stdout=subprocess.PIPE, text=True)
    assert alone.returncode == exit_code
    deadline = time.monotonic() + 20
    while answers(alone.stdout.strip()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not answers(alone.stdout.strip())


def test_version_is_the_programs():
    command = [sys.executable, "-m", "signpost", "version"]
    version = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert version.startswith(f"signpost {signpost.__version__}\n")
