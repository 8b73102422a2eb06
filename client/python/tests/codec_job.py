"""A job with a codec from outside: codec_job.py train|configured|reduce topk|python."""

import sys
import zlib

import codecs_of_mine
import signpost.torch as signpost
import torch

what, name = sys.argv[1:]
signpost.init()
codec = {
    "topk": signpost.Codec("client/examples/libtopk.so", "ratio=0.25"),
    "python": signpost.python_codec(codecs_of_mine.Signs),
    "failing": signpost.python_codec(codecs_of_mine.Fails),
}[name]
target = torch.linspace(-1, 1, 6000)

if what in ("train", "configured"):
    x = torch.zeros(6000, requires_grad=True)
    if what == "configured":
        optimizer = signpost.optimizer([x])  # of SIGNPOST_CONFIG's file
    else:
        optimizer = signpost.OneBitAdam([x], lr=0.02, freeze_step=20, codec=codec)
    for _ in range(150):
        optimizer.zero_grad()
        ((x - target) ** 2).mean().backward()
        optimizer.step()
    assert optimizer.report.codec == "custom"
    result = x.detach()
else:
    result = torch.zeros(6000)
    for _ in range(40):
        mine = target * (1 + signpost.rank())
        result += signpost.all_reduce(mine, codec, name="mean") / 40
    target = target * 1.5
print(f"digest {zlib.crc32(result.numpy().tobytes()):08x}")
print(f"distance {(result - target).abs().mean():.4f}")
