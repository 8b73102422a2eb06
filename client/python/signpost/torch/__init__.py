"""1-bit Adam and its kin for PyTorch: optimizers that average gradients over all workers of a job.

    import signpost.torch as signpost

    signpost.init()
    optimizer = signpost.OneBitAdam(model.parameters(), lr=1e-3)
    ...
    loss.backward()
    optimizer.step()

PyTorch 2.6 is the oldest that is supported. All tests run under 2.13, the quick start also under 2.6; on a GPU 2.11 was tried. An
optimizer communicates when it is made, in `step()`, in `checkpoint()` and, with `overlap=True`, in
`backward()`. `all_reduce()`, which the optimizers are made of, communicates too.

A model on one CUDA GPU is trained there: `model.cuda()` before the optimizer is made. Calls then
put their work on PyTorch's current stream, and so does `all_reduce()` of a tensor there. The library
must be built for it, as in `bazel build --config=cuda //client/python:wheel`.
"""

from signpost import (
    Codec,
    SignpostError,
    StepReport,
    StopRequest,
    World,
    checkpoint_step,
    has_checkpoint,
    init,
    is_initialized,
    python_codec,
    rank,
    shutdown,
    world_size,
)
from signpost.torch._all_reduce import all_reduce
from signpost.torch._ddp_hook import DdpHookState, ddp_hook
from signpost.torch._from_config import optimizer
from signpost.torch._fsdp_hook import fsdp_hook
from signpost.torch._misuse import local_gradients
from signpost.torch._optimizer import Adam, OneBitAdam, OneBitLamb, ZeroOneAdam
from signpost.torch._schedules import scheduler

__all__ = [
    "Adam",
    "Codec",
    "DdpHookState",
    "OneBitAdam",
    "OneBitLamb",
    "SignpostError",
    "StepReport",
    "StopRequest",
    "World",
    "ZeroOneAdam",
    "all_reduce",
    "checkpoint_step",
    "ddp_hook",
    "fsdp_hook",
    "has_checkpoint",
    "init",
    "is_initialized",
    "local_gradients",
    "optimizer",
    "python_codec",
    "rank",
    "scheduler",
    "shutdown",
    "world_size",
]
