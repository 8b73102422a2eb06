"""A rank of somebody else's all-reduce or step, for `signpost bench` to measure ours against.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=4001 peers.py --peer gloo-fp32 --parameters 1000000

It prints `ready` once all ranks are connected. For each line N on stdin all ranks take N exchanges,
and each prints a line of N times in seconds: from its own call to its return, with nothing that
brings the ranks together before. At the end of stdin it leaves. While it waits for a line it uses no
processor time. In each rank PyTorch has one thread, or as many as --threads says. The peers:

gloo-fp32       torch.distributed.all_reduce over Gloo of one flat tensor, and the division by the
                number of ranks: what DDP does without a hook, with one bucket.
gloo-fp16       what DDP's fp16_compress_hook does: rounds to 16 bits, divides, reduces, and turns
                the result back into fp32. All of that is timed.
gloo-bf16       the same in bfloat16, as DDP's bf16_compress_hook does over NCCL. DDP refuses that hook
                over Gloo, but Gloo itself reduces bfloat16.
gloo-adamw      gloo-fp32 of the gradient and a step of torch.optim.AdamW(foreach=True) over
                parameters in T tensors: all that an optimizer of ours does in a step, and the only
                peer of a step.
powersgd-1, -2  the hook of DDP's PowerSGD, with approximations of rank 1 or 2, with error feedback
                and warm start, over T square matrices (what is left over is a vector, which it does
                not compress). Timed is the hook itself, from a bucket with the gradients in it to
                the same bucket with their approximate mean: communication, products of matrices,
                orthogonalization and errors, without autograd or copying gradients into buckets.
                There is one bucket. DDP has several, but the hook waits inside of Gloo's two
                threads for other work of theirs: with two buckets under way it stands still.
mpi             MPI_Allreduce in place of fp32 and the division, by mpi4py. mpirun starts the ranks
                and hands stdin to rank 0, which alone prints: for each exchange the longest of all
                ranks' times. The others look for word from it a hundred times a second. They come
                together before the first of N exchanges, since they hear of it at different times.

mpirun's command line is this, for ranks on one machine, over TCP as between machines:

    mpirun --allow-run-as-root --oversubscribe --bind-to none -n 2 TUNING --mca btl tcp,self
        --mca btl_tcp_if_include lo python3 peers.py --peer mpi --parameters 1000000

and for ranks in network namespaces X-0, X-1, ... with the addresses 10.77.0.1, 10.77.0.2, ...:

    ip netns exec X-0 mpirun --allow-run-as-root --bind-to none -n 2 --host 10.77.0.1,10.77.0.2
        --mca plm_rsh_agent "/PATH/OF/netns_agent.sh X" --mca plm_rsh_no_tree_spawn 1
        --mca oob_tcp_if_include 10.77.0.0/24 TUNING --mca btl tcp,self
        --mca btl_tcp_if_include 10.77.0.0/24 python3 peers.py --peer mpi --parameters 1000000

where TUNING is, as the fastest of what was tried with Open MPI 4.1,

    --mca mpi_yield_when_idle 1 --mca coll_tuned_use_dynamic_rules 1
        --mca coll_tuned_allreduce_algorithm 4

a ring, and ranks that wait without keeping others from their cores. Left to itself it took 2.5 times
as long for 4 MB between three namespaces on two cores, with 1 Gbit/s (156 against 64 ms). The
program adds --mca orte_tmpdir_base, so that mpirun's files go with its own.
"""

import argparse
import math
import os
import sys
import time
from typing import Any, Callable, Dict, Iterator, List, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

MPI_POLL_S = 0.01
MOST_TENSORS = 24  # as many as the program's own ranks have


class Exchange(Protocol):
    """Makes the rank's values, in place, their mean over all ranks."""

    values: torch.Tensor

    def exchange(self) -> None:
        ...


class Fp32:
    def __init__(self, values: torch.Tensor, tensors: int) -> None:
        self.values = values

    def exchange(self) -> None:
        dist.all_reduce(self.values)
        self.values.div_(dist.get_world_size())


class Fp16:
    dtype = torch.float16

    def __init__(self, values: torch.Tensor, tensors: int) -> None:
        self.values = values

    def exchange(self) -> None:
        rounded = self.values.to(self.dtype).div_(dist.get_world_size())
        dist.all_reduce(rounded)
        self.values.copy_(rounded)


class Bf16(Fp16):
    dtype = torch.bfloat16


class MeanAndAdamW(Fp32):
    """Steps parameters, zeros at first, with the mean as their gradient."""

    def __init__(self, values: torch.Tensor, tensors: int) -> None:
        super().__init__(values, tensors)
        self.parameters = [torch.zeros_like(part) for part in values.tensor_split(tensors)]
        for parameter, gradient in zip(self.parameters, values.tensor_split(tensors)):
            parameter.requires_grad_()
            parameter.grad = gradient
        self._optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, foreach=True)

    def exchange(self) -> None:
        super().exchange()
        self._optimizer.step()


class Bucket:
    """All gradients, as DDP shows them to its hooks."""

    def __init__(self, values: torch.Tensor, tensors: int) -> None:
        side = math.isqrt(values.numel() // tensors)
        self._values = values
        self._gradients = list(values[: tensors * side * side].view(tensors, side, side).unbind())
        rest = values[tensors * side * side :]
        if rest.numel() > 0:
            self._gradients.append(rest)

    def buffer(self) -> torch.Tensor:
        return self._values

    def gradients(self) -> List[torch.Tensor]:
        return self._gradients

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class PowerSgd1:
    approximation_rank = 1

    def __init__(self, values: torch.Tensor, tensors: int) -> None:
        self.values = values
        self._bucket = Bucket(values, tensors)
        self._state = powersgd.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=self.approximation_rank,
            start_powerSGD_iter=2,  # the least that it takes
            orthogonalization_epsilon=1e-8,
        )
        self._state.iter = 2  # as if the first two steps, which it does not compress, were over

    def exchange(self) -> None:
        powersgd.powerSGD_hook(self._state, self._bucket).wait()


class PowerSgd2(PowerSgd1):
    approximation_rank = 2


OVER_GLOO: Dict[str, Callable[[torch.Tensor, int], Exchange]] = {
    "gloo-fp32": Fp32,
    "gloo-fp16": Fp16,
    "gloo-bf16": Bf16,
    "gloo-adamw": MeanAndAdamW,
    "powersgd-1": PowerSgd1,
    "powersgd-2": PowerSgd2,
}


class Mpi:
    """A rank under mpirun."""

    def __init__(self) -> None:
        if "OMPI_COMM_WORLD_SIZE" not in os.environ:
            sys.exit(
                "peers.py: the peer mpi wants its ranks to be started by Open MPI's mpirun (apt-get "
                "install openmpi-bin); the command line stands at the top of peers.py"
            )
        try:
            from mpi4py import MPI
        except ImportError as error:
            sys.exit(
                f"peers.py: the peer mpi needs mpi4py: apt-get install python3-mpi4py ({error})"
            )
        self._in_place: Any = MPI.IN_PLACE
        self._max: Any = MPI.MAX
        self._ranks: Any = MPI.COMM_WORLD
        self.rank: int = self._ranks.rank
        self.values = torch.empty(0)

    def exchange(self) -> None:
        self._ranks.Allreduce(self._in_place, self.values.numpy())
        self.values.div_(self._ranks.size)

    def lead(self) -> None:
        self._ranks.Barrier()
        print("ready", flush=True)
        try:
            for count in counts_on_stdin():
                self._tell(count)
                print_times(self._longest_times(count))
        finally:
            self._tell(0)

    def follow(self) -> None:
        self._ranks.Barrier()
        while (count := self._hear()) > 0:
            self._longest_times(count)

    def _longest_times(self, count: int) -> List[float]:
        self._ranks.Barrier()
        times = torch.tensor(times_of(self, count), dtype=torch.float64)
        self._ranks.Allreduce(self._in_place, times.numpy(), self._max)
        return [float(seconds) for seconds in times]

    def _tell(self, count: int) -> None:
        for rank in range(1, self._ranks.size):
            self._ranks.send(count, dest=rank)

    def _hear(self) -> int:
        while not self._ranks.iprobe(source=0):  # a receive would spin
            time.sleep(MPI_POLL_S)
        return int(self._ranks.recv(source=0))


def counts_on_stdin() -> Iterator[int]:
    for line in sys.stdin:
        if not line.strip().isdigit() or int(line) == 0:
            sys.exit(f"peers.py: got the line {line!r}, wanted a number of exchanges")
        yield int(line)


def times_of(exchange: Exchange, count: int) -> List[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        exchange.exchange()
        times.append(time.perf_counter() - start)
    return times


def print_times(times: List[float]) -> None:
    print(*(f"{seconds:.9f}" for seconds in times), flush=True)


def values_of(rank: int, parameters: int) -> torch.Tensor:
    return torch.randn(parameters, generator=torch.Generator().manual_seed(rank))


def over_gloo(peer: str, parameters: int, tensors: int) -> None:
    join_gloo()
    exchange = OVER_GLOO[peer](values_of(dist.get_rank(), parameters), tensors)
    print("ready", flush=True)
    for count in counts_on_stdin():
        print_times(times_of(exchange, count))
    leave_gloo()


def join_gloo() -> None:
    """Connects this rank to those that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name."""
    # Debian's PyTorch is built without libuv, which the ranks would use to find each other.
    os.environ.setdefault("USE_LIBUV", "0")
    dist.init_process_group("gloo")


def leave_gloo() -> None:
    """Ends the process at once. Requires that all ranks have finished their exchanges.

    A thread of Gloo may not be through with the last of PowerSGD's callbacks, or find that another
    rank is gone. In the usual way Python would then abort the process.
    """
    os._exit(0)


def over_mpi(parameters: int) -> None:
    mpi = Mpi()
    mpi.values = values_of(mpi.rank, parameters)
    if mpi.rank == 0:
        mpi.lead()
    else:
        mpi.follow()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--peer", required=True, choices=[*OVER_GLOO, "mpi"])
    add("--parameters", required=True, type=int)
    add("--threads", type=int, default=1, help="of PyTorch in each rank")
    add("--tensors", type=int, help="of gloo-adamw and powersgd; 24, or fewer parameters")
    arguments = parser.parse_args()
    if arguments.tensors is None:
        arguments.tensors = min(MOST_TENSORS, arguments.parameters)
    if not 1 <= arguments.tensors <= arguments.parameters:
        parser.error(f"{arguments.parameters} parameters do not make {arguments.tensors} tensors")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    if arguments.peer == "mpi":
        over_mpi(arguments.parameters)
    else:
        over_gloo(arguments.peer, arguments.parameters, arguments.tensors)


if __name__ == "__main__":
    main()
