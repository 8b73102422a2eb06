"""What each rank does in ranks_test.py: `job.py SCENARIO [ARGUMENT...]`."""

import os
import signal
import sys
import time
from pathlib import Path

import signpost.torch as signpost
import torch
from torch import nn


def say(optimizer):
    """The launcher passes lines on whole, but not what is behind the last one."""
    print(f"steps {optimizer.steps} parameters {optimizer.parameters_crc32c():08x}", flush=True)


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(50, 100), nn.Tanh(), nn.Linear(100, 1))


def gradients_of(model, step, rank):
    """The loss's gradients on the data of a step and rank."""
    generator = torch.Generator().manual_seed(step * 100 + rank)
    inputs = torch.randn(16, 50, generator=generator)
    loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
    return torch.autograd.grad(loss, list(model.parameters()))


def set_gradients(model, gradients):
    for parameter, gradient in zip(model.parameters(), gradients):
        parameter.grad = gradient


def use_small_chunks(set_attribute=setattr):
    """Jobs that begin from now on have so many chunks that not all are under way at once."""
    next_job = signpost.World.next_job

    def next_small_job(world):
        options = next_job(world)
        options.block_elements, options.chunk_elements = 64, 128
        return options

    set_attribute(signpost.World, "next_job", next_small_job)


def average():
    """Adam on all ranks is AdamW on the mean of their gradients."""
    model, reference = model_of(), model_of()
    ours = signpost.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.1)
    ranks = range(signpost.world_size())
    for step in range(20):
        by_rank = [gradients_of(model, step, rank) for rank in ranks]
        set_gradients(model, by_rank[signpost.rank()])
        set_gradients(reference, [sum(g) / len(ranks) for g in zip(*by_rank)])
        ours.step()
        theirs.step()
        with torch.no_grad():
            for a, b in zip(model.parameters(), reference.parameters()):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * 0.01)
                b.copy_(a)
    say(ours)


def train(directory=None, dies_at=None):
    """Thirty steps, of which ten dense. With a directory it saves every seventh, and resumes."""
    model = model_of()
    resume = directory if directory and os.path.exists(directory) else None
    optimizer = signpost.OneBitAdam(model.parameters(), lr=0.01, freeze_step=10, resume=resume)
    while optimizer.steps < 30:
        if optimizer.steps == int(dies_at or 30) and signpost.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        set_gradients(model, gradients_of(model, optimizer.steps, signpost.rank()))
        optimizer.step()
        if directory and optimizer.steps % 7 == 0:
            optimizer.checkpoint(directory)
    say(optimizer)


def comes_back(directory):
    """Rank 1 dies, and is started again while rank 0 trains on; with bf16 parameters."""
    has_died, is_back = Path(directory, "has_died"), Path(directory, "is_back")
    model = model_of().bfloat16()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = signpost.OneBitAdam(model.parameters(), lr=0.01, freeze_step=5)
    if signpost.rank() == 1 and has_died.exists():
        assert optimizer.steps > 0
        for parameter, old in zip(model.parameters(), before):
            assert not torch.equal(parameter, old), "it has not got the others' values"
        is_back.write_text(str(optimizer.steps + 20))
    while not is_back.exists() or optimizer.steps < int(is_back.read_text() or 2**40):
        if signpost.rank() == 1 and optimizer.steps == 10:
            has_died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        time.sleep(0.01)  # computing
    say(optimizer)


def overlap(ranks):
    """Thirty steps, of which ten dense, on these ranks ("02") with overlap."""
    use_small_chunks()
    model, rank = model_of(), signpost.rank()
    optimizer = signpost.OneBitAdam(
        model.parameters(),
        lr=0.01,
        freeze_step=10,
        variance_refresh_interval=7,
        overlap=str(rank) in ranks,
    )
    while optimizer.steps < 30:
        generator = torch.Generator().manual_seed(optimizer.steps * 100 + rank)
        inputs = torch.randn(16, 50, generator=generator)
        optimizer.zero_grad()
        ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean().backward()
        optimizer.step()
    say(optimizer)


def two_tensors():
    """client/examples/two_tensors.c."""
    weights, biases = (nn.Parameter(torch.zeros(shape)) for shape in ((24, 10), (10,)))
    optimizer = signpost.OneBitAdam(
        [{"params": [weights]}, {"params": [biases]}], betas=(0.9, 0.99), freeze_step=80
    )
    for step in range(400):
        for parameter in (weights, biases):
            parameter.grad = parameter.detach() - signpost.rank()
        learning_rate = 0.05 * (1 - step / 400)
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.param_groups[1]["lr"] = 0.5 * learning_rate
        optimizer.step()
    say(optimizer)


def other_seed():
    signpost.Adam(model_of(seed=signpost.rank()).parameters())


def other_model():
    signpost.Adam(nn.Linear(10, 3 + signpost.rank()).parameters())


def fails():
    optimizer = signpost.Adam(model_of().parameters())
    optimizer.step()
    if signpost.rank() == 1:
        raise ValueError("the data is bad")
    optimizer.step()


if __name__ == "__main__":
    signpost.init()
    globals()[sys.argv[1]](*sys.argv[2:])
