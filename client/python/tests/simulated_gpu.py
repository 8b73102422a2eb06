"""Tensors of the CPU that play at being on a GPU, with the library of simulated_gpu_package.

PyTorch does to them at once what it would put on a GPU's current stream. So what the library has
put there before must be done: after each step or reduction, its streams are waited for.
"""

import contextlib

import torch
from signpost import _abi
from signpost.torch import _device


class Stream:
    """The null one, which each simulated GPU has. Nothing but the library puts work there."""

    cuda_stream = 0

    def synchronize(self):
        pass

    def record_event(self):
        return None


NULL_STREAM = Stream()


def put_tensors_on(gpu, set_attribute=setattr):
    """Tensors that optimizers and reductions get from now on are there; None: on the CPU."""
    set_attribute(_device, "gpu_of", lambda tensor: gpu if tensor.device.type == "cpu" else None)
    set_attribute(_device, "current_stream", lambda _: NULL_STREAM)
    set_attribute(_device, "future_on", lambda _: torch.futures.Future())
    set_attribute(_device, "on_own_stream", lambda *_: contextlib.nullcontext())
    for of, name in (
        (_device.GpuSession, "step"),
        (_device.GpuSession, "finish_step"),
        (_device.GpuReduction, "reduce"),
    ):
        set_attribute(of, name, _and_wait(getattr(of, name)))


def _and_wait(call):
    def call_and_wait(self, *arguments):
        report = call(self, *arguments)
        _abi.library.signpost_finish_simulated_gpus()
        return report

    return call_and_wait
