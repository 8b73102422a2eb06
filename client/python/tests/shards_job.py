"""Runs scenarios of shards_test.py on one rank: `shards_job.py SCENARIO [ARGUMENT...] + SCENARIO ...`.

Four processes train two replicas of a model of two shards each, and two processes the same model whole, on
the same data. FSDP2, Gloo and torch.distributed.checkpoint are PyTorch's own.
"""

import os
import signal
import sys
import warnings

import signpost.torch as signpost
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job import crc32_of, run_scenarios, use_small_chunks
from signpost.torch import _node_exchange
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

BATCHES = 4  # of each step, one for each of four processes
FREEZES = {"freeze_step": 8, "variance_refresh_interval": 0}
OPTIMIZERS = {
    "adam": (signpost.Adam, {}),
    "one_bit_adam": (signpost.OneBitAdam, FREEZES),
    "follows": (signpost.OneBitAdam, {"freeze_step": 8}),
    "refreshes": (signpost.OneBitAdam, {**FREEZES, "variance_refresh_interval": 6}),
    "zero_one_adam": (
        signpost.ZeroOneAdam,
        dict(var_freeze_step=6, var_update_scaler=2, local_step_scaler=4, local_step_clipper=4),
    ),
}


def mesh_of(replicas=2):
    shards = dist.get_world_size() // replicas
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def even_model():
    """Blocks of 64 elements do not straddle two shards."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128))


class Uneven(nn.Module):
    """Shards differ in size, and one is empty."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 101), nn.Tanh(), nn.Linear(101, 3))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return self.layers(inputs) * self.scale


# Models with "_rows" have whole parameters; each process steps some rows of them.
MODELS = {
    "even": even_model,
    "uneven": Uneven,
    "default_chunks": Uneven,
    "even_rows": even_model,
    "uneven_rows": Uneven,
}


def sharded(model, mesh):
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model


def backward(model, step):
    """The gradient of the mean loss on this process's part of a step's batches."""
    processes = dist.get_world_size()
    count = BATCHES // processes
    for batch in range(dist.get_rank() * count, (dist.get_rank() + 1) * count):
        generator = torch.Generator().manual_seed(step * 100 + batch)
        inputs = torch.randn(16, 64, generator=generator)
        loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
        (loss / count).backward()


def train(model, optimizer, until, first=0):
    for step in range(first, until):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def digest_of(model):
    """A checksum of all parameters, whole."""
    crc = 0
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        crc = crc32_of(whole, crc)
    return crc


def made(kind, model="even", max_grad_norm="0", overlap="", replicas="2"):
    """A model and its optimizer: sharded with four processes, whole with two."""
    if model != "default_chunks":
        use_small_chunks()
    of_class, options = OPTIMIZERS[kind]
    made_model = MODELS[model]()
    if dist.get_world_size() == BATCHES:
        mesh = mesh_of(int(replicas))
        options = {**options, "replicate_mesh": mesh["replicate"]}
        if model.endswith("_rows"):
            options["shard_mesh"] = mesh["shard"]
            _node_exchange._LEAST_BUCKET_BYTES = 20000  # so that there are several
        else:
            made_model = sharded(made_model, mesh)
    options = {**options, "max_grad_norm": float(max_grad_norm) or None, "overlap": bool(overlap)}
    options["resume_with_other_world_size"] = True
    return made_model, of_class(made_model.parameters(), lr=0.01, **options)


def trains(kind, *how, steps=30):
    model, optimizer = made(kind, *how)
    train(model, optimizer, steps)
    assert optimizer.is_synchronised
    elements = sum(tensor["exp_avg"].numel() for tensor in optimizer.state.values())
    held = sum(
        (e.to_local() if isinstance(e, DTensor) else e).numel()
        for entry in optimizer.state.values()
        for name, e in entry.items()
        if name != "step"
    )
    print(
        f"codec {optimizer.report.codec} bits {optimizer.sent_bits:.3f} bytes {optimizer.report.sent_bytes} "
        f"state {held} of {elements} norm {optimizer.grad_norm}",
        flush=True,
    )
    print(f"parameters {digest_of(model):08x}", flush=True)
    optimizer.leave()


def scales(model):
    """Divides out the scale of the loss, which is another one in each process of a whole model."""
    trained, optimizer = made("one_bit_adam", model)
    scale = 2.0 ** (10 + 3 * dist.get_rank()) if model.endswith("_rows") else 1024.0
    for step in range(12):
        optimizer.zero_grad()
        backward(trained, step)
        for parameter in trained.parameters():
            parameter.grad.mul_(scale)
        optimizer.grad_scale = torch.tensor(scale)
        optimizer.step()
        del optimizer.grad_scale
    print(f"parameters {digest_of(trained):08x}", flush=True)
    optimizer.leave()


def lacks_gradients(overlap=""):
    """One process has no backward pass in some steps, and one lacks a gradient."""
    trained, optimizer = made("one_bit_adam", "uneven_rows", "0", overlap)
    for step in range(12):
        optimizer.zero_grad()
        if step % 3 != 1 or dist.get_rank() != 1:
            if step % 3 == 2 and dist.get_rank() == 2:
                trained.scale.requires_grad_(False)
                backward(trained, step)
                trained.scale.requires_grad_(True)
            else:
                backward(trained, step)
        optimizer.step()
    print(f"parameters {digest_of(trained):08x}", flush=True)
    optimizer.leave()


def is_adamw(*how):
    """Adam is AdamW on the mean of all gradients, and clips as clip_grad_norm_ does."""
    model, ours = made("adam", "uneven", *how)
    reference = Uneven()
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0)
    for step in range(20):
        ours.zero_grad()
        backward(model, step)
        norms = [0.0]
        gradients = [torch.zeros_like(p) for p in reference.parameters()]
        for batch in range(0, BATCHES, 2):  # of each replica
            theirs.zero_grad()
            for half in range(2):
                generator = torch.Generator().manual_seed(step * 100 + batch + half)
                inputs = torch.randn(16, 64, generator=generator)
                loss = ((reference(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean() / 2
                loss.backward()
            own = [parameter.grad for parameter in reference.parameters()]
            norms.append(sum(g.double().square().sum().item() for g in own))
            for gradient, part in zip(gradients, own):
                gradient += part / 2
        norm = (sum(norms) / 2) ** 0.5
        factor = 1.0
        if ours.max_grad_norm is not None:
            factor = min(1.0, ours.max_grad_norm / (norm + 1e-6))
            assert factor < 1
        for parameter, gradient in zip(reference.parameters(), gradients):
            parameter.grad = gradient * factor
        ours.step()
        theirs.step()
        if ours.max_grad_norm is not None:
            torch.testing.assert_close(ours.grad_norm, norm, rtol=1e-5, atol=0)
        with torch.no_grad():
            for a, b in zip(model.parameters(), reference.parameters()):
                whole = a.full_tensor()
                torch.testing.assert_close(whole, b, rtol=1e-5, atol=1e-5 * 0.01)
                b.copy_(whole)
    print(f"parameters {digest_of(model):08x}", flush=True)
    ours.leave()


def saved(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def load(model, optimizer, directory, planner=None):
    state = saved(model, optimizer)
    dcp.load(state, checkpoint_id=directory, planner=planner)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def say_loss(model):
    """Prints the loss on data that no step has, and the checksum of the parameters."""
    inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(7))
    loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean().item()
    print(f"loss {loss:.6f} parameters {digest_of(model):08x}", flush=True)


def saves(kind, directory, model="even"):
    """Saves at step 13, and goes on until step 30: saving changes nothing."""
    trained, optimizer = made(kind, model)
    train(trained, optimizer, 13)
    dcp.save(saved(trained, optimizer), checkpoint_id=directory)
    train(trained, optimizer, 30, first=13)
    print(f"parameters {digest_of(trained):08x}", flush=True)
    optimizer.leave()


def dies(kind, directory, model):
    """Saves at step 13; the last process is killed at step 17."""
    trained, optimizer = made(kind, model)
    train(trained, optimizer, 13)
    dcp.save(saved(trained, optimizer), checkpoint_id=directory)
    train(trained, optimizer, 17, first=13)
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    train(trained, optimizer, 30, first=17)


def goes_back(kind, directory, model):
    """Loads what it has saved at step 13: there, which changes nothing, and again at step 20."""
    trained, optimizer = made(kind, model)
    train(trained, optimizer, 13)
    dcp.save(saved(trained, optimizer), checkpoint_id=directory)
    for until in (20, 30):
        load(trained, optimizer, directory)
        assert optimizer.steps == 13
        train(trained, optimizer, until, first=13)
    print(f"parameters {digest_of(trained):08x}", flush=True)
    optimizer.leave()


def resumes(kind, directory, model="even", replicas="2"):
    """Goes on from what saves() has saved, until step 30."""
    trained, optimizer = made(kind, model, "0", "", replicas)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        # More replicas than there were have errors of which the checkpoint knows nothing.
        planner = dcp.DefaultLoadPlanner(allow_partial_load=replicas == "4")
        load(trained, optimizer, directory, planner)
    for warning in said:
        if "signpost" in str(warning.filename):
            print("warning", warning.message, flush=True)
    print(f"goes on from step {optimizer.steps}", flush=True)
    train(trained, optimizer, 30, first=13)
    say_loss(trained)
    optimizer.leave()


def hook(codec):
    """AdamW of PyTorch, with gradients that are averaged over replicas in this codec, or by FSDP2 itself."""
    model, mesh = Uneven(), mesh_of()
    if codec == "fsdp":
        for layer in (model.layers[0], model.layers[2], model):
            fully_shard(layer, mesh=mesh)
    else:
        signpost.fsdp_hook(sharded(model, mesh), codec, name=f"in {codec}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 30)
    say_loss(model)


def misuse(name, directory):
    """Prints how it is refused."""
    model, mesh = even_model(), mesh_of()

    def of_shards(**options):
        return signpost.OneBitAdam(sharded(model, mesh).parameters(), freeze_step=8, **options)

    def local_tensors():
        parameters = sharded(model, mesh).parameters()
        shards = [parameter.to_local().detach().requires_grad_() for parameter in parameters]
        signpost.OneBitAdam(shards).step()

    def adds_a_whole_one():
        of_shards().add_param_group({"params": [nn.Parameter(torch.ones(3))]})

    def other_ranks_state():
        all_shards = mesh_of(replicas=1)
        parameters = sharded(model, all_shards).parameters()
        optimizer = signpost.OneBitAdam(
            parameters, freeze_step=8, replicate_mesh=all_shards["replicate"]
        )
        state = optimizer.state_dict()
        state["param_groups"][0]["signpost"] = of_file(directory)
        optimizer.load_state_dict(state)

    how = {
        "shards_over_all": lambda: signpost.OneBitAdam(fully_shard(model).parameters()),
        "hybrid": lambda: signpost.OneBitAdam(fully_shard(model, mesh=mesh).parameters()),
        "other_replicas": lambda: of_shards(replicate_mesh=mesh["shard"]),
        "in_part": lambda: signpost.OneBitAdam(
            [fully_shard(model[0], mesh=mesh["shard"]).weight, model[2].weight]
        ),
        "whole_with_mesh": lambda: signpost.OneBitAdam(
            model.parameters(), replicate_mesh=mesh["replicate"]
        ),
        "lamb": lambda: signpost.OneBitLamb(sharded(model, mesh).parameters(), freeze_step=8),
        "as_deepspeed": lambda: of_shards(compat="deepspeed"),
        "checkpoints": lambda: of_shards().checkpoint(directory),
        "adds_a_whole_one": adds_a_whole_one,
        "other_ranks_state": other_ranks_state,
        "local_tensors": local_tensors,
        "rows_of_dtensors": lambda: of_shards(shard_mesh=mesh["shard"]),
        "rows_of_a_scalar": lambda: signpost.OneBitAdam(
            [nn.Parameter(torch.tensor(1.0))], shard_mesh=mesh["shard"]
        ),
        "hook_of_whole_model": lambda: signpost.fsdp_hook(model),
    }
    try:
        how[name]()
    except (TypeError, ValueError, RuntimeError) as error:
        print("refused:", str(error).replace("\n", " "), flush=True)


def of_file(directory):
    """The description of the state that saves() has saved."""
    state = {"optimizer.param_groups.0.signpost": ""}
    dcp.load(state, checkpoint_id=f"{directory}/one_bit_adam")
    return state["optimizer.param_groups.0.signpost"]


if __name__ == "__main__":
    signpost.init()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    run_scenarios(globals(), sys.argv[1:])
    dist.destroy_process_group()
