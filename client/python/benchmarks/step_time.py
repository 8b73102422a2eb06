"""Times step() of 1-bit Adam, alone on this machine, against torch.optim.AdamW.

    python3 step_time.py
    OMP_NUM_THREADS=1 python3 step_time.py

They step parameters and gradients of the same sizes, in turns. Signpost's step has
everything in it that one of many workers does: compressing, sending, an aggregator in a process of
its own, applying.
"""

import argparse
import statistics
import time

import signpost.torch as signpost
import torch


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024, help="of each tensor, a square")
    parser.add_argument("--steps", type=int, default=30, help="of each optimizer")
    return parser.parse_args()


def parameters_of(arguments):
    generator = torch.Generator().manual_seed(1)
    parameters = []
    for _ in range(arguments.tensors):
        values = torch.randn(arguments.width, arguments.width, generator=generator)
        parameters.append(torch.nn.Parameter(values))
        parameters[-1].grad = torch.randn(values.shape, generator=generator)
    return parameters


def seconds_of(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main():
    arguments = parse_arguments()
    signpost.init()
    # The second step is the first in one bit, and takes a buffer for it.
    ours = signpost.OneBitAdam(parameters_of(arguments), weight_decay=0.01, freeze_step=1)
    optimizers = {"OneBitAdam": ours}
    for way in ("fused", "foreach"):
        theirs = torch.optim.AdamW(parameters_of(arguments), weight_decay=0.01, **{way: True})
        optimizers[f"AdamW({way}=True)"] = theirs
    times = {name: [] for name in optimizers}
    for step in range(3 + arguments.steps):
        for name, optimizer in optimizers.items():
            seconds = seconds_of(optimizer.step)
            if step >= 3:
                times[name].append(seconds)
    assert ours.report.one_bit
    elements = arguments.tensors * arguments.width**2
    print(f"{elements} parameters, {torch.get_num_threads()} threads of PyTorch, medians of steps:")
    print(f"  {'OneBitAdam':20} {1000 * statistics.median(times['OneBitAdam']):7.1f} ms")
    for name in list(optimizers)[1:]:
        ratios = sorted(a / b for a, b in zip(times["OneBitAdam"], times[name]))
        print(
            f"  {name:20} {1000 * statistics.median(times[name]):7.1f} ms; OneBitAdam takes "
            f"{statistics.median(ratios):.2f} of it ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
