"""Measures what exchanges cost in processor time, on which `signpost bench predict` builds.

    python3 transport.py

One worker reduces a tensor with each codec, and then single elements, in turns. Its aggregator is a
process of its own, on loopback. Processor time is that of all threads, user and system.
"""

import argparse
import os
import time
from pathlib import Path
from typing import List, NamedTuple

import signpost.torch as signpost
import torch

TURNS = 8
FRAMES_ALONE = 50  # exchanges of one element for each of a tensor: they take next to no time


class Costs(NamedTuple):
    """In seconds."""

    passed: float
    of_worker: float
    of_aggregator: float


class Reduction:
    def __init__(self, codec: str, elements: int, count: int) -> None:
        self._codec = codec
        self._tensor = torch.randn(elements)
        self.count = count  # exchanges in a turn
        self.turns: List[Costs] = []

    def take_turn(self) -> None:
        (aggregator,) = children()
        start = time.perf_counter(), time.process_time(), processor_s(aggregator)
        for _ in range(self.count):
            signpost.all_reduce(
                self._tensor, self._codec, name=f"{self._codec} {len(self._tensor)}"
            )
        end = time.perf_counter(), time.process_time(), processor_s(aggregator)
        self.turns.append(Costs(*(b - a for a, b in zip(start, end))))

    def costs(self) -> Costs:
        """Of an exchange. The first turn does not count."""
        counted = self.turns[1:]
        return Costs(*(sum(column) / len(counted) / self.count for column in zip(*counted)))


def children() -> List[str]:
    threads = Path("/proc/self/task").iterdir()
    return " ".join((thread / "children").read_text() for thread in threads).split()


def processor_s(process: str) -> float:
    behind_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(behind_name[11]) + int(behind_name[12])) / os.sysconf("SC_CLK_TCK")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--exchanges", type=int, default=5, help="of each codec in a turn")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    signpost.init()
    reductions = {
        codec: Reduction(codec, arguments.elements, arguments.exchanges)
        for codec in ("fp32", "bf16", "onebit")
    }
    reductions["one element"] = Reduction("fp32", 1, FRAMES_ALONE * arguments.exchanges)
    for _ in range(1 + TURNS):
        for reduction in reductions.values():
            reduction.take_turn()
    print(f"{arguments.elements} elements; ms for each exchange")
    for name, reduction in reductions.items():
        passed, of_worker, of_aggregator = (1000 * seconds for seconds in reduction.costs())
        print(
            f"  {name:11} {passed:7.2f} passed; processor time of the worker {of_worker:7.2f}, of "
            f"the aggregator {of_aggregator:7.2f}"
        )


if __name__ == "__main__":
    main()
