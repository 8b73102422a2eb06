"""The rank and the job of this process."""

import copy
import ctypes
import math
import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional

from signpost import _abi
from signpost._config import session_setting
from signpost._errors import InvalidArgumentError, UnavailableError
from signpost._exiting import end_with_exit_codes
from signpost._leaving import leave_all
from signpost._program import start_private_aggregator, stop_private_aggregators

_CONNECT_TIMEOUT_S = 10.0
_VARIABLES = ("AGGREGATORS", "JOB", "RANK", "WORLD_SIZE")

# Launchers that know nothing of Signpost: each with its variables for how many processes it has
# started together, and which of them this is. An sbatch script has SLURM_NTASKS too, and is alone.
_LAUNCHERS = (
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpiexec", "PMI_SIZE", "PMI_RANK"),
)


@dataclass(frozen=True)
class _Origin:
    """The environment and the arguments from which init() made the world."""

    environment: Dict[str, str]
    arguments: Dict[str, Optional[float]]
    added: List[str]  # variables that init() has set


class World:
    """This process's rank among the workers of its job."""

    def __init__(self, options: _abi.Options) -> None:
        self.rank = int(options.rank)  # [0, world_size)
        self.world_size = int(options.world_size)
        self.job: str = options.job.decode()
        # "host:port" of each aggregator, in the order of their shards.
        self.aggregators: List[str] = options.aggregators.decode().split(",")
        self._options = options
        self._origin = _Origin({}, {}, [])
        self._jobs: Dict[Optional[str], int] = {}  # by name of the optimizer, how many it had

    def next_job(self, name: Optional[str] = None) -> _abi.Options:
        """Options to join with: each optimizer has a job of its own, and begins with the values
        that rank 0's parameters have.

        Optimizers have a name that is the same on all ranks, or are made in the same order on all ranks:
        then the n-th has the same name everywhere. Where parameters are on a GPU, set `gpu` to CUDA's
        number of it; otherwise it is -1.

        Raises:
            ValueError: the name is empty.
        """
        if name == "":
            raise ValueError("name is empty, wanted a name that no other optimizer has")
        number = self._jobs.get(name, 0)
        self._jobs[name] = number + 1
        job = self.job
        if name is not None:
            job += f"/{name}"
        if number > 0:
            job += f"/optimizer-{number}"
        options = self.options()
        options.job = job.encode()
        options.start_from_rank_0 = 1
        return options

    def among(self, rank: int, world_size: int) -> "World":
        """Returns this process's rank among fewer, that share a job of their own."""
        other = copy.copy(self)
        other.rank, other.world_size = rank, world_size
        return other

    def options(self) -> _abi.Options:
        """Options of which the job is the training job itself: what reductions are named after."""
        options = _abi.Options.from_buffer_copy(self._options)
        options.aggregators = ",".join(self.aggregators).encode()
        options.job = self.job.encode()
        return options


_world: Optional[World] = None


def init(
    *, join_timeout_s: Optional[float] = None, exchange_timeout_s: Optional[float] = None
) -> World:
    """Finds out from the environment which rank of which job this process is.

    A second call returns the same world; for another one call shutdown() before.

    `signpost run` sets it: SIGNPOST_AGGREGATORS ("host:port" of each shard, comma-separated),
    SIGNPOST_JOB, SIGNPOST_RANK and SIGNPOST_WORLD_SIZE. Under torchrun SIGNPOST_AGGREGATORS is
    enough, which names the job by its --rdzv_id. What the environment does not say may be in the
    configuration file that SIGNPOST_CONFIG names. Where nothing says where an aggregator is, the process is
    the only worker, of an aggregator of its own, and says so.

    From then on a SignpostError that nobody catches ends the process with its `exit_code`.

    Args:
        join_timeout_s: how long to wait for the other ranks when an optimizer is made. None: what
            SIGNPOST_JOIN_TIMEOUT says ("10m"), or the file, or five minutes.
        exchange_timeout_s: how long to wait for them in a step without any answer, and in a
            checkpoint. None: what SIGNPOST_EXCHANGE_TIMEOUT says, or the file, or a minute.

    Raises:
        RuntimeError: it was called before in another environment, or with other arguments.
        InvalidArgumentError: names the environment variable, or the line of the file, that is
            missing or wrong; or a timeout that is no number.
        UnavailableError: names the aggregator that could not be connected to for ten seconds.
    """
    global _world
    arguments = {"join_timeout_s": join_timeout_s, "exchange_timeout_s": exchange_timeout_s}
    if _world is not None:
        _check_is_same(_world._origin, arguments)
        return _world
    before = dict(os.environ)
    end_with_exit_codes()
    _check_timeout("join_timeout_s", join_timeout_s)
    _check_timeout("exchange_timeout_s", exchange_timeout_s)
    _check_has_no_node()
    if _is_alone():
        _check_launcher()
        options = _options_alone()
    else:
        _adopt_torchrun()
        options = _abi.Options()
        _abi.call("options_from_environment", ctypes.byref(options))
    if join_timeout_s is not None:
        options.join_timeout_s = join_timeout_s
    if exchange_timeout_s is not None:
        options.exchange_timeout_s = exchange_timeout_s
    world = World(options)
    if world.rank >= world.world_size:
        raise _invalid(
            f"SIGNPOST_RANK is {world.rank} and SIGNPOST_WORLD_SIZE {world.world_size}: ranks "
            "count from 0"
        )
    _check_aggregators(world.aggregators)
    added = [name for name in os.environ if name not in before]
    world._origin = _Origin(_environment(), arguments, added)
    _world = world
    return world


def is_initialized() -> bool:
    """Returns whether init() was called, and shutdown() has not been called since."""
    return _world is not None


def shutdown() -> None:
    """Leaves all jobs that this process is in, of optimizers and of all_reduce(). All ranks call it.

    init() may be called again afterwards, in another environment too: in a notebook, a test or a
    worker process that is used again. Does nothing before init().

    Raises:
        SignpostError: an aggregator did not answer. All is left anyway.
        RuntimeError: another thread is in a call, whose job stays.
    """
    global _world
    if _world is None:
        return
    added, _world = _world._origin.added, None
    try:
        leave_all()
    finally:
        for name in added:
            os.environ.pop(name, None)
        for forget in _at_shutdown:
            forget()
        stop_private_aggregators()


def at_shutdown(forget: Callable[[], None]) -> None:
    """Has shutdown() call `forget`, for what is remembered of a world elsewhere."""
    _at_shutdown.append(forget)


_at_shutdown: List[Callable[[], None]] = []


def _environment() -> Dict[str, str]:
    # Not RANK and WORLD_SIZE, which trainers change: init() has made SIGNPOST_RANK of them.
    return {name: value for name, value in os.environ.items() if name.startswith("SIGNPOST_")}


def _check_is_same(origin: _Origin, arguments: Dict[str, Optional[float]]) -> None:
    now, before = _environment(), origin.environment
    changed = [name for name in {**before, **now} if now.get(name) != before.get(name)]
    changed += [
        name for name, value in arguments.items() if value not in (None, origin.arguments[name])
    ]
    if changed:
        raise RuntimeError(
            f"signpost.init() was called before, with another {', '.join(changed)}: call "
            "signpost.shutdown() on all ranks before"
        )


def world() -> World:
    """Returns the world that init() found. Raises RuntimeError before init()."""
    if _world is None:
        raise RuntimeError("call signpost.init() first")
    return _world


def rank() -> int:
    """This process's rank, [0, world_size())."""
    return world().rank


def world_size() -> int:
    """Number of workers of the job."""
    return world().world_size


def _invalid(message: str) -> InvalidArgumentError:
    return InvalidArgumentError(message, code=3, exit_code=64)


def _check_timeout(name: str, seconds: Optional[float]) -> None:
    if seconds is not None and math.isnan(seconds):
        raise _invalid(f"{name} is {seconds}, wanted a number of seconds")


def _is_alone() -> bool:
    if any(f"SIGNPOST_{name}" in os.environ for name in _VARIABLES):
        return False
    if session_setting("aggregators"):
        return False
    return os.environ.get("WORLD_SIZE", "1") == "1"


def _check_launcher() -> None:
    """Refuses to be alone among processes that were started together."""
    for launcher, size, rank in _LAUNCHERS:
        processes = os.environ.get(size, "")
        if not processes.isdigit() or int(processes) <= 1:
            continue
        raise _invalid(
            f"{size} is {processes}, as {launcher} sets it, but SIGNPOST_AGGREGATORS is not set: "
            "each process would train alone. On one machine start them by "
            f"`signpost run -n {processes}` instead of {launcher}. Or start an aggregator that all "
            "can reach, and each process by torchrun with SIGNPOST_AGGREGATORS=HOST:PORT, or with SIGNPOST_JOB, "
            f"SIGNPOST_RANK=${rank} and SIGNPOST_WORLD_SIZE=${size} as well. If each is to train "
            f"alone, unset {size}"
        )


def _options_alone() -> _abi.Options:
    print(
        "signpost: a single process, because no launcher has set SIGNPOST_AGGREGATORS; "
        "`signpost run -n 4 -- python3 ...` starts four",
        file=sys.stderr,
        flush=True,
    )
    options = _abi.Options()
    _abi.library.signpost_options_init(ctypes.byref(options))
    options.aggregators = start_private_aggregator().encode()  # on loopback, in plain text
    options.job = b"alone"
    return options


def _adopt_torchrun() -> None:
    """Fills in what torchrun calls by other names."""
    variables = os.environ
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return
    if not session_setting("aggregators"):
        raise _invalid(
            "RANK and WORLD_SIZE are set, as by torchrun, but SIGNPOST_AGGREGATORS is not. Start "
            "an aggregator that all ranks can reach, `signpost aggregator --listen 127.0.0.1:4000` "
            "for one machine, and start all ranks with SIGNPOST_AGGREGATORS=127.0.0.1:4000"
        )
    variables.setdefault("SIGNPOST_RANK", variables["RANK"])
    variables.setdefault("SIGNPOST_WORLD_SIZE", variables["WORLD_SIZE"])
    if "TORCHELASTIC_RUN_ID" in variables:
        # Not of which attempt: each of torchrun's agents counts only restarts that it has begun.
        if not session_setting("job"):
            variables["SIGNPOST_JOB"] = f"torchrun-{variables['TORCHELASTIC_RUN_ID']}"


def _check_has_no_node() -> None:
    node = session_setting("node")
    if node:
        raise _invalid(
            f"SIGNPOST_NODE is {node}, as `signpost run --per-node` sets it, too: a node's worker is for "
            "programs in C and C++. In Python the processes of a machine share one exchange by "
            "shard_mesh (docs/sharding.md): unset it, set SIGNPOST_AGGREGATORS, and leave out --per-node"
        )


def _check_aggregators(aggregators: List[str]) -> None:
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    for shard, address in enumerate(aggregators):
        if address.startswith("unix:"):
            continue
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise _invalid(
                f"SIGNPOST_AGGREGATORS has '{address}', wanted HOST:PORT, or several, with commas"
            )
        if "://" in host:
            raise _invalid(
                f"SIGNPOST_AGGREGATORS has '{address}', wanted HOST:PORT without '{host.partition('://')[0]}://'"
            )
        error = _connect(lambda left: _connect_to_port(host.strip("[]"), int(port), left), deadline)
        if error is not None:
            raise UnavailableError(
                f"aggregator {shard} of SIGNPOST_AGGREGATORS, {address}, cannot be connected to: "
                f"{error}. Does it run? On its host: "
                f"`signpost aggregator --listen {address} --shard {shard}/{len(aggregators)}`",
                code=14,
                exit_code=69,
            )


def _connect_to_port(host: str, port: int, timeout: float) -> None:
    socket.create_connection((host, port), timeout=timeout).close()


def _connect(connect: Callable[[float], None], deadline: float) -> Optional[OSError]:
    """Tries until the deadline; returns the last error, or None once there was a connection."""
    while True:
        try:
            connect(max(deadline - time.monotonic(), 0.1))
            return None
        except OSError as error:
            if time.monotonic() + 0.1 >= deadline:
                return error
        time.sleep(0.1)
