"""Runs scenarios of ddp_test.py on one rank: `ddp_job.py FILE SCENARIO [ARGUMENT...] + SCENARIO...`.

Scenarios run one after the other in the same process, as in job.py. PyTorch's processes meet in FILE,
which must not exist yet.
"""

import sys
import zlib

import signpost.torch as signpost
import torch
import torch.distributed as dist
from job import run_scenarios
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 600), nn.Tanh(), nn.Linear(600, 600), nn.Linear(600, 1))


def train(hook_of, steps):
    """The losses, and the model, of which DDP makes several buckets: the first has a megabyte."""
    model = DistributedDataParallel(model_of(), bucket_cap_mb=0.05)
    state = hook_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        inputs = torch.randn(32, 40, generator=generator)
        loss = ((model(inputs) - inputs[:, :10].sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, state


def hook(codec, name, **options):
    def register(model):
        state = signpost.DdpHookState(codec, name=name, **options)
        model.register_comm_hook(state, signpost.ddp_hook)
        return state

    return register


def say(model):
    crc = 0
    for parameter in model.parameters():
        crc = zlib.crc32(parameter.detach().numpy().tobytes(), crc)
    print(f"parameters {crc:08x}", flush=True)


def dense():
    """The fp32 hook is DDP without one."""
    _, reference, _ = train(lambda model: None, 20)
    _, model, state = train(hook("fp32", "dense"), 20)
    assert state.steps == 20
    for a, b in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    say(model)


def compressed(*codecs):
    """Each codec learns nearly as well as DDP does, with replicas that stay identical."""
    wanted, _, _ = train(lambda model: None, 150)
    assert sum(wanted[-20:]) < 0.1 * sum(wanted[:20])
    for codec in codecs:
        losses, model, state = train(hook(codec, f"compressed {codec}", start_step=5), 150)
        assert len(state._buckets) > 1 and not state._dense
        assert abs(losses[4] - wanted[4]) < 1e-4 * wanted[4]  # all of it in fp32
        assert sum(losses[-20:]) < 1.1 * sum(wanted[-20:])
        say(model)


def not_finite():
    """Rank 1's gradient is not finite in one step: all ranks see NaN, and can leave it out."""
    model = DistributedDataParallel(model_of())
    hook("onebit", "not finite", start_step=2)(model)
    for step in range(5):
        model.zero_grad()
        inputs = torch.randn(8, 40)
        if dist.get_rank() == 1 and step == 3:
            inputs[0, 0] = float("nan")
        model(inputs).mean().backward()
        finite = all(p.grad.isfinite().all() for p in model.parameters())
        assert finite == (step != 3)
    print("parameters 00000000", flush=True)


class WithEmptyParameters(nn.Module):
    """Beside one of 4 elements, in the same bucket and, for their type, in one of their own."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=dtype))
        self.empty = nn.Parameter(torch.ones(0, dtype=dtype))
        self.empty_half = nn.Parameter(torch.ones(0, dtype=torch.float16))

    def forward(self, x):
        return (self.weight * x).sum() + self.empty.sum() + self.empty_half.sum()


def empty_parameters():
    model = DistributedDataParallel(WithEmptyParameters())
    state = hook("bf16", "empty", start_step=2)(model)
    for _ in range(4):
        model.zero_grad()
        model(1 + dist.get_rank()).backward()
        assert model.module.weight.grad.tolist() == [1.5] * 4
    assert state.steps == 4
    print("parameters 00000000", flush=True)


def double_precision():
    model = DistributedDataParallel(WithEmptyParameters(torch.float64))
    hook("fp32", "double precision")(model)
    try:
        model(1).backward()
    except TypeError as error:
        print(f"refused: {error}", flush=True)


def left_alone():
    """Rank 1 leaves behind its second step, and what rank 0 is told of it comes through DDP."""
    model = DistributedDataParallel(model_of())
    hook("fp32", "left alone")(model)
    for _ in range(2 if dist.get_rank() == 1 else 3):
        model(torch.randn(8, 40)).mean().backward()


def other_buckets():
    """DDP's own change of buckets, behind the start step, is found out."""
    model = model_of()
    state = signpost.DdpHookState("onebit", start_step=2, name="other buckets")
    state.start_step = 0
    model = DistributedDataParallel(model, bucket_cap_mb=0.05)
    model.register_comm_hook(state, signpost.ddp_hook)
    try:
        for _ in range(3):
            model(torch.randn(8, 40)).mean().backward()
    except RuntimeError as error:
        print(f"refused: {error}", flush=True)


if __name__ == "__main__":
    signpost.init()
    # A file rather than a port: jobs of other tests run beside this one.
    dist.init_process_group(
        "gloo", f"file://{sys.argv[1]}", rank=signpost.rank(), world_size=signpost.world_size()
    )
    run_scenarios(globals(), sys.argv[2:])
