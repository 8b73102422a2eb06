"""Jobs with a codec from outside: codec_job.py train|configured|reduce,... topk|python."""

import sys
import zlib

import codecs_of_mine
import signpost.torch as signpost
import torch

TARGET = torch.linspace(-1, 1, 6000)


def train(optimizer_of):
    """Returns what is trained, and what is wanted."""
    x = torch.zeros(6000, requires_grad=True)
    optimizer = optimizer_of([x])
    for _ in range(150):
        optimizer.zero_grad()
        ((x - TARGET) ** 2).mean().backward()
        optimizer.step()
    assert optimizer.report.codec == "custom"
    return x.detach(), TARGET


def train_with(codec):
    return train(lambda x: signpost.OneBitAdam(x, lr=0.02, freeze_step=20, codec=codec))


def train_as_configured(codec):
    """With the optimizer in SIGNPOST_CONFIG's file, which has the codec."""
    return train(signpost.optimizer)


def reduce(codec):
    """Returns the mean of what is reduced, and what is wanted."""
    result = torch.zeros(6000)
    for _ in range(40):
        mine = TARGET * (1 + signpost.rank())
        result += signpost.all_reduce(mine, codec, name="mean") / 40
    return result, TARGET * 1.5


JOBS = {"train": train_with, "configured": train_as_configured, "reduce": reduce}

if __name__ == "__main__":
    jobs, name = sys.argv[1:]
    signpost.init()
    codec = {
        "topk": signpost.Codec("client/examples/libtopk.so", "ratio=0.25"),
        "python": signpost.python_codec(codecs_of_mine.Signs),
        "failing": signpost.python_codec(codecs_of_mine.Fails),
    }[name]
    for job in jobs.split(","):
        result, wanted = JOBS[job](codec)
        print(f"{job} digest {zlib.crc32(result.numpy().tobytes()):08x}")
        print(f"{job} distance {(result - wanted).abs().mean():.4f}", flush=True)
