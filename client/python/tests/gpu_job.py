"""Runs the job of gpu_test.py on one rank: `gpu_job.py RANKS`, where RANKS ("02") names those on a GPU.

`gpu_job.py RANKS,RANKS` does it again in the same processes, with other ranks on a GPU. An argument
behind RANKS is another task: `codec` uses a codec that is a Python class, and `reductions FILE` has no
optimizers. FILE must not exist yet.
Where PyTorch finds a GPU, as tests/gpu/run.sh wants, it is used. Otherwise the GPU is simulated.
"""

import sys
import warnings
import zlib

import ddp_job
import signpost.torch as signpost
import simulated_gpu
import torch
import torch.distributed as dist
from job import say, use_small_chunks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 12
# Ranks synchronise after each step until step 6, then after two: not after 7, but after STEPS.
LOCAL = {
    "var_freeze_step": 4,
    "var_update_scaler": 1,
    "local_step_scaler": 2,
    "local_step_clipper": 2,
}


class OfAllTypes(nn.Module):
    """Parameters of all types and layouts, and gradients of all kinds."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = ((50, 20), (1000,), (), (7, 3), (300,))
        tensors = [torch.randn(shape, generator=generator) for shape in shapes]
        tensors[1] = tensors[1].bfloat16()
        tensors[3] = tensors[3].t()
        tensors[4] = tensors[4].half()
        self.all = nn.ParameterList(map(nn.Parameter, tensors))
        self.rows = nn.Embedding(40, 6, sparse=True)
        nn.init.constant_(self.rows.weight, 0.5)
        self.unused = nn.Parameter(torch.ones(700, dtype=torch.bfloat16))

    def loss(self, step, rank):
        generator = torch.Generator().manual_seed(100 * step + rank)
        device = self.unused.device
        rows = self.rows(torch.randint(40, (10,), generator=generator).to(device))
        factors = [torch.randn(p.shape, generator=generator).to(device) for p in self.all]
        losses = [(f * p.float()).square().sum() for f, p in zip(factors, self.all)]
        return sum(losses) + rows.square().sum()


def train(optimizer, model, steps=STEPS):
    """Goes on to step `steps`; the checksum of what is trained."""
    while optimizer.steps < steps:
        optimizer.zero_grad()
        model.loss(optimizer.steps, signpost.rank()).backward()
        optimizer.step()
    return optimizer.parameters_crc32c()


def crc_of(tensors):
    crc = 0
    for tensor in tensors:
        values = tensor.detach().cpu().float().reshape(-1)
        # Not by way of NumPy, which PyTorch's own package does without.
        crc = zlib.crc32(bytes(values.view(torch.uint8).tolist()), crc)
    return crc


def reduce_all(device, ranks):
    """Reductions of all types in all codecs, of which one call's numbers are not all finite. The
    names of the reductions have `ranks` in them, because errors are kept by name."""
    warnings.simplefilter("ignore")
    if device != "cpu":
        torch.cuda.set_stream(torch.cuda.Stream())  # which reductions must follow
    generator = torch.Generator().manual_seed(signpost.rank())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for codec in ("fp32", "bf16", "fp16", "int8", "int4", "onebit"):
            for call in range(4):
                tensor = torch.randn((70, 60), generator=generator).to(dtype).to(device)
                if call == 1 and signpost.rank() == 1:
                    tensor[3, 3] = float("nan")
                if call == 2:
                    tensor = tensor.view(60, 70).t()
                if call == 3 and codec == "int8":
                    tensor = tensor.cpu()  # elsewhere than the first of the name
                if tensor.is_cuda:
                    late = torch.empty_like(tensor)
                    torch.cuda._sleep(10_000_000)
                    tensor = late.copy_(tensor)
                signpost.all_reduce(tensor, codec, name=f"{dtype} {codec} {ranks}")
                # A NaN of two bytes has other bits on a GPU.
                print(f"{dtype} {codec} {crc_of([tensor.nan_to_num(-7.0)]):08x}", flush=True)


def train_with_ddp(device, ranks):
    def trained(register):
        model = DistributedDataParallel(ddp_job.model_of().to(device), bucket_cap_mb=0.05)
        register(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
        generator = torch.Generator().manual_seed(signpost.rank())
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(32, 40, generator=generator).to(device)).square().mean().backward()
            optimizer.step()
        return model

    in_one_bit = trained(ddp_job.hook("onebit", f"onebit {ranks}", start_step=3))
    print(f"model {crc_of(in_one_bit.parameters()):08x}", flush=True)
    dense, without = trained(ddp_job.hook("fp32", f"fp32 {ranks}")), trained(lambda model: None)
    for ours, theirs in zip(dense.parameters(), without.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def device_for(ranks):
    """Where this rank's model goes from now on."""
    is_on_gpu = str(signpost.rank()) in ranks
    if torch.cuda.is_available():
        return "cuda:0" if is_on_gpu else "cpu"
    simulated_gpu.put_tensors_on(signpost.rank() % 2 if is_on_gpu else None)
    return "cpu"


def main(placements, task=None, *arguments):
    use_small_chunks()
    if task == "reductions":
        dist.init_process_group(
            "gloo", f"file://{arguments[0]}", rank=signpost.rank(), world_size=signpost.world_size()
        )
    for ranks in placements.split(","):
        print("placement", ranks, flush=True)
        device = device_for(ranks)
        if task == "reductions":
            reduce_all(device, ranks)
            train_with_ddp(device, ranks)
        else:
            optimize(device, task)


def optimize(device, task):
    """Trains with each optimizer and each of its variants."""
    one_bit = {"freeze_step": 4, "variance_refresh_interval": 5}
    optimizers = (
        (signpost.Adam, {}),
        (signpost.OneBitAdam, one_bit),
        (signpost.OneBitLamb, one_bit),
        (signpost.ZeroOneAdam, LOCAL),
    )
    if task == "codec":
        import codecs_of_mine  # its codecs are NumPy's

        own = signpost.python_codec(codecs_of_mine.Signs)
        optimizers = (
            (signpost.OneBitAdam, {"freeze_step": 4, "warm_up_codec": own, "codec": own}),
            (signpost.OneBitLamb, {"freeze_step": 4, "codec": own}),
            (signpost.ZeroOneAdam, {**LOCAL, "codec": own}),
        )
    for optimizer_of, options in optimizers:
        variants = [{}, {"overlap": True}]
        if task != "codec":  # which does not see how gradients are clipped
            variants.append({"max_grad_norm": 5.0})
        if task != "codec" and optimizer_of is not signpost.Adam:
            variants.append({"compat": "deepspeed"})
        for more in variants:
            model = OfAllTypes().to(device)
            optimizer = optimizer_of(model.parameters(), lr=0.01, **options, **more)
            train(optimizer, model)
            say(optimizer)
            print(f"model {crc_of(model.parameters()):08x}", flush=True)
            optimizer.leave()


if __name__ == "__main__":
    signpost.init()
    main(*sys.argv[1:])
