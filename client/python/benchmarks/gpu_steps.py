"""Times whole optimizer steps of ranks that share a GPU: 1-bit Adam, and what else there would be,
an all-reduce of the fp32 gradients over Gloo and PyTorch's AdamW; and reductions by themselves, in one
bit and over Gloo.

    python3 -m signpost run -n 2 --aggregators 2 -- python3 gpu_steps.py
    python3 -m signpost run -n 2 --aggregators 2 -- python3 gpu_steps.py --device cpu

They step parameters of the same sizes with the same gradients, in turns; reductions get the gradients
in one tensor. A step ends when the GPU has done it, and begins when all ranks are there.
"""

import argparse
import os
import statistics
import tempfile
import time

import signpost.torch as signpost
import torch
from torch import distributed


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--tensors", type=int, default=100, help="of equal sizes")
    parser.add_argument("--steps", type=int, default=10, help="of each")
    return parser.parse_args()


class Steps:
    """The steps of an optimizer and its exchange, or of a reduction, which has no parameters."""

    def __init__(self, name, parameters, gradients, step):
        self.name = name
        self.seconds = []
        self._parameters, self._gradients, self._step = parameters, gradients, step

    def take(self):
        for parameter, gradient in zip(self._parameters, self._gradients):
            parameter.grad = gradient
        wait_for_gpu(self._gradients[0])
        distributed.barrier()
        start = time.perf_counter()
        self._step()
        wait_for_gpu(self._gradients[0])
        self.seconds.append(time.perf_counter() - start)


def wait_for_gpu(tensor):
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def main():
    arguments = parse_arguments()
    signpost.init()
    rank, ranks = signpost.rank(), signpost.world_size()
    # The job has a name that no other has.
    meeting = os.path.join(tempfile.gettempdir(), os.environ["SIGNPOST_JOB"])
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks
    )

    size = arguments.parameters // arguments.tensors
    all_gradients = torch.randn(size * arguments.tensors, device=arguments.device).mul_(0.01)
    gradients = all_gradients.split(size)

    def parameters():
        zeros = (torch.zeros(size, device=arguments.device) for _ in gradients)
        return [torch.nn.Parameter(values) for values in zeros]

    of_ours, of_theirs = parameters(), parameters()
    # The second step is the first in one bit, and takes a buffer for it.
    ours = signpost.OneBitAdam(of_ours, weight_decay=0.01, freeze_step=1)
    theirs = torch.optim.AdamW(of_theirs, weight_decay=0.01, **fused(arguments.device))

    def reduce():
        distributed.all_reduce(all_gradients)
        all_gradients.div_(ranks)

    def reduce_and_step():
        reduce()
        theirs.step()

    def reduce_in_one_bit():
        signpost.all_reduce(all_gradients, "onebit", name="gradients")

    pairs = [
        (
            Steps("1-bit Adam", of_ours, gradients, ours.step),
            Steps("Gloo and AdamW", of_theirs, gradients, reduce_and_step),
        ),
        (
            Steps("all_reduce in one bit", [], gradients, reduce_in_one_bit),
            Steps("Gloo", [], gradients, reduce),
        ),
    ]
    for _ in range(3 + arguments.steps):
        for pair in pairs:
            for steps in pair:
                steps.take()
    assert ours.report.one_bit
    if rank == 0:
        print(f"{len(all_gradients)} parameters on {arguments.device}, {ranks} ranks, medians:")
        for pair in pairs:
            for steps in pair:
                steps.seconds = steps.seconds[3:]
                print(
                    f"  {steps.name:21} {1000 * statistics.median(steps.seconds):7.1f} ms "
                    f"({1000 * min(steps.seconds):.1f} to {1000 * max(steps.seconds):.1f})"
                )
            ratios = [b / a for a, b in zip(*(steps.seconds for steps in pair))]
            times = statistics.median(ratios)
            print(f"  {pair[0].name} is {times:.1f} times faster", flush=True)
    ours.leave()


def fused(device):
    """Options with which AdamW is one kernel on a GPU."""
    return {} if device == "cpu" else {"fused": True}


if __name__ == "__main__":
    main()
