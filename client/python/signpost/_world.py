"""Which rank of which job this process is."""

import ctypes
import os
import socket
import sys
import time
from typing import List, Optional

from signpost import _abi
from signpost._errors import InvalidArgumentError, UnavailableError
from signpost._program import start_private_aggregator

_CONNECT_TIMEOUT_S = 10.0
_VARIABLES = ("AGGREGATORS", "JOB", "RANK", "WORLD_SIZE")


class World:
    """This process's rank among the workers of its job."""

    def __init__(self, options: _abi.Options) -> None:
        self.rank = int(options.rank)  # [0, world_size)
        self.world_size = int(options.world_size)  # number of workers
        self.job: str = options.job.decode()
        self.aggregators: List[str] = options.aggregators.decode().split(",")  # "host:port"
        self._options = options
        self._jobs = 0

    def next_job(self) -> _abi.Options:
        """Options to join with: each optimizer has a job of its own, and begins with the values
        that rank 0's parameters have.

        All ranks make their optimizers in the same order, so the n-th has the same name everywhere.
        Where parameters are on a GPU, set `gpu` to CUDA's number of it; otherwise it is -1.
        """
        options = self.options()
        options.job = (f"{self.job}.{self._jobs}" if self._jobs else self.job).encode()
        options.start_from_rank_0 = 1
        self._jobs += 1
        return options

    def options(self) -> _abi.Options:
        """Options of which the job is the training job itself: what reductions are named after."""
        options = _abi.Options.from_buffer_copy(self._options)
        options.aggregators = ",".join(self.aggregators).encode()
        options.job = self.job.encode()
        return options


_world: Optional[World] = None


def init(*, join_timeout_s: float = 300.0, exchange_timeout_s: float = 60.0) -> World:
    """Finds out from the environment which rank of which job this process is. Once per process.

    `signpost run` sets it: SIGNPOST_AGGREGATORS ("host:port" of each shard, comma-separated),
    SIGNPOST_JOB, SIGNPOST_RANK and SIGNPOST_WORLD_SIZE. Under torchrun SIGNPOST_AGGREGATORS is
    enough. Without any of them the process is the only worker, of an aggregator of its own, and
    says so.

    Args:
        join_timeout_s: how long to wait for the other ranks when an optimizer is made.
        exchange_timeout_s: how long to wait for them in a step, and in a checkpoint.

    Raises:
        InvalidArgumentError: names the environment variable that is missing or wrong.
        UnavailableError: names the aggregator that could not be connected to for ten seconds.
    """
    global _world
    if _world is not None:
        raise RuntimeError("signpost.init() was called before; once per process is enough")
    if _is_alone():
        options = _options_alone()
    else:
        _adopt_torchrun()
        options = _abi.Options()
        _abi.call("options_from_environment", ctypes.byref(options))
    options.join_timeout_s = join_timeout_s
    options.exchange_timeout_s = exchange_timeout_s
    world = World(options)
    if world.rank >= world.world_size:
        raise _invalid(
            f"SIGNPOST_RANK is {world.rank} and SIGNPOST_WORLD_SIZE {world.world_size}: ranks "
            "count from 0"
        )
    _check_aggregators(world.aggregators)
    _world = world
    return world


def world() -> World:
    """What init() found."""
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
    return InvalidArgumentError(message, 3)


def _is_alone() -> bool:
    if any(f"SIGNPOST_{name}" in os.environ for name in _VARIABLES):
        return False
    return os.environ.get("WORLD_SIZE", "1") == "1"


def _options_alone() -> _abi.Options:
    print(
        "signpost: a single process, because no launcher has set SIGNPOST_AGGREGATORS; "
        "`signpost run -n 4 -- python3 ...` starts four",
        file=sys.stderr,
        flush=True,
    )
    options = _abi.Options()
    _abi.library.signpost_options_init(ctypes.byref(options))
    options.aggregators = start_private_aggregator().encode()
    options.job = b"alone"
    return options


def _adopt_torchrun() -> None:
    """Fills in what torchrun calls by other names."""
    variables = os.environ
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return
    if "SIGNPOST_AGGREGATORS" not in variables:
        raise _invalid(
            "RANK and WORLD_SIZE are set, as by torchrun, but SIGNPOST_AGGREGATORS is not. Start "
            "an aggregator that all ranks can reach, `signpost aggregator --listen 127.0.0.1:4000` "
            "for one machine, and start all ranks with SIGNPOST_AGGREGATORS=127.0.0.1:4000"
        )
    variables.setdefault("SIGNPOST_RANK", variables["RANK"])
    variables.setdefault("SIGNPOST_WORLD_SIZE", variables["WORLD_SIZE"])
    if "TORCHELASTIC_RUN_ID" in variables:
        attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
        job = f"torchrun-{variables['TORCHELASTIC_RUN_ID']}-{attempt}"
        variables.setdefault("SIGNPOST_JOB", job)


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
        error = _connect(host.strip("[]"), int(port), deadline)
        if error is not None:
            raise UnavailableError(
                f"aggregator {shard} of SIGNPOST_AGGREGATORS, {address}, cannot be connected to: "
                f"{error}. Does it run? On its host: "
                f"`signpost aggregator --listen {address} --shard {shard}/{len(aggregators)}`",
                14,
            )


def _connect(host: str, port: int, deadline: float) -> Optional[OSError]:
    """Tries until the deadline; returns the last error, or None once there was a connection."""
    while True:
        try:
            left = deadline - time.monotonic()
            socket.create_connection((host, port), timeout=max(left, 0.1)).close()
            return None
        except OSError as error:
            if time.monotonic() + 0.1 >= deadline:
                return error
        time.sleep(0.1)
