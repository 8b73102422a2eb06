"""Runs scenarios of torch_tools_test.py on one rank: `torch_tools_job.py SCENARIO [ARGUMENT...] + ...`.

torch.distributed finds its ranks by what `signpost run` puts into the environment.
"""

import copy
import sys
import zlib
from pathlib import Path

import signpost.torch as signpost
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job import run_scenarios
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

STEPS, SAVED_AT = 12, 7
KINDS = {
    "one_bit_adam": (signpost.OneBitAdam, dict(freeze_step=4)),
    "one_bit_lamb": (signpost.OneBitLamb, dict(freeze_step=4)),
    # Between two synchronisations at SAVED_AT.
    "zero_one_adam": (
        signpost.ZeroOneAdam,
        dict(var_freeze_step=4, var_update_scaler=1, local_step_scaler=2, local_step_clipper=4),
    ),
}


def model_of(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 100), nn.Tanh(), nn.Linear(100, 100), nn.Linear(100, 1))
    model[2].bfloat16()
    return model


def say(model):
    crc = 0
    for parameter in model.parameters():
        crc = zlib.crc32(parameter.detach().float().numpy().tobytes(), crc)
    print(f"parameters {crc:08x}", flush=True)


def step(model, optimizer, number):
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def saved_and_loaded_by_dcp(directory):
    """Trains each kind of optimizer to STEPS three times: without a save, with one, and from what was saved."""
    for kind, (optimizer_class, own) in KINDS.items():
        path = str(Path(directory, kind))
        for what in ("not saved", "saved", "loaded"):
            model = model_of(seed=1 if what == "loaded" else 0)
            optimizer = optimizer_class(model.parameters(), lr=0.01, **own)
            if what == "loaded":
                of_model, of_optimizer = get_state_dict(model, optimizer)
                state = {"model": of_model, "optimizer": of_optimizer}
                dcp.load(state, checkpoint_id=path)
                set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=state["model"],
                    optim_state_dict=state["optimizer"],
                )
                assert optimizer.steps == SAVED_AT
            while optimizer.steps < STEPS:
                step(model, optimizer, optimizer.steps)
                if what == "saved" and optimizer.steps == SAVED_AT:
                    of_model, of_optimizer = get_state_dict(model, optimizer)
                    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=path)
            while not optimizer.is_synchronised:
                step(model, optimizer, optimizer.steps)
            say(model)


def looked_at_by_one_rank():
    """Neither changes the training nor waits for the other rank."""
    for looks in (False, True):
        model = model_of()
        optimizer = signpost.OneBitAdam(model.parameters(), lr=0.01, freeze_step=4)
        for number in range(6):
            step(model, optimizer, number)
            if looks and dist.get_rank() == 1:
                assert get_optimizer_state_dict(model, optimizer)["state"]
        say(model)


def refused(make):
    try:
        make()
    except (TypeError, ValueError, RuntimeError) as error:
        print(f"refused: {error}", flush=True)


def wrapped():
    """By DistributedDataParallel, with and without the hook that leaves gradients alone."""
    plain, kept, averaged = model_of().float(), model_of().float(), model_of().float()
    optimizer = signpost.Adam(averaged.parameters())
    wrapper = DistributedDataParallel(averaged)
    wrapper(torch.ones(1, 40)).sum().backward()
    refused(optimizer.step)
    wrapper = DistributedDataParallel(kept)
    wrapper.register_comm_hook(None, signpost.local_gradients)
    for trained, forward in ((plain, plain), (kept, wrapper)):
        optimizer = signpost.OneBitAdam(trained.parameters(), lr=0.01, freeze_step=2)
        for number in range(4):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
            inputs = torch.randn(8, 40, generator=generator)
            forward(inputs).square().mean().backward()
            optimizer.step()
        say(trained)


def sharded():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    refused(lambda: ZeroRedundancyOptimizer(model.parameters(), signpost.Adam))
    for use_orig_params in (False, True):
        flat = FullyShardedDataParallel(
            copy.deepcopy(model), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        refused(lambda: signpost.Adam(flat.parameters()))
    refused(lambda: signpost.Adam(fully_shard(model).parameters()))


def in_another_order():
    """On rank 1: parameters, and then two optimizers."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    mine = layers[:: 1 if dist.get_rank() == 0 else -1]

    def parameters():
        optimizer = signpost.Adam([layer.weight for layer in mine])
        for layer in layers:
            layer.weight.grad = torch.zeros(8, 8)
        optimizer.step()

    refused(parameters)
    torch.manual_seed(1)
    layers = [nn.Linear(9, 9), nn.Linear(9, 9)]
    mine = layers[:: 1 if dist.get_rank() == 0 else -1]
    signpost.Adam([mine[0].weight])

    def second():
        signpost.Adam([mine[1].weight]).step()

    refused(second)


def used_again():
    """Trains in one world after another, in the same processes."""
    for _ in range(3):
        signpost.init()
        model = model_of()
        optimizer = signpost.OneBitAdam(model.parameters(), lr=0.01, freeze_step=2)
        for number in range(4):
            step(model, optimizer, number)
        rank = torch.full((4,), float(signpost.rank()))
        signpost.all_reduce(rank, "fp32", name="rank")
        assert rank.tolist() == [0.5] * 4
        say(model)
        signpost.shutdown()
    signpost.init()


if __name__ == "__main__":
    signpost.init()
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (signpost.rank(), signpost.world_size())
    run_scenarios(globals(), sys.argv[1:])
