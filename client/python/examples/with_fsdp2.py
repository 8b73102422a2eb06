"""A small transformer that learns the bytes of a text, sharded within a machine by PyTorch's FSDP2.

    signpost run -n 4 -- python3 with_fsdp2.py --shards 2

Four processes are two machines here, of two shards each. Signpost needs the lines that are marked.
"""

import argparse
import os
from pathlib import Path

import signpost.torch as signpost  # Signpost
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CONTEXT, WIDTH, BATCH = 32, 64, 16


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True
            )
            for _ in range(2)
        )
        self.output = nn.Linear(WIDTH, 256)
        mask = torch.full((CONTEXT, CONTEXT), float("-inf")).triu(diagonal=1)
        self.register_buffer("mask", mask)  # nothing from the future

    def forward(self, pieces):
        """The loss of guessing each byte from those before it."""
        states = self.embedding(pieces[:, :-1]) + self.position
        for layer in self.layers:
            states = layer(states, self.mask)
        guesses = self.output(states).flatten(0, 1)
        return nn.functional.cross_entropy(guesses, pieces[:, 1:].flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, default="/usr/share/common-licenses/GPL-3")
    parser.add_argument(
        "--shards", type=int, default=2, help="processes of a machine [%(default)s]"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--save", default="checkpoint", help="directory to save in, and to go on from"
    )
    given = parser.parse_args()
    signpost.init()  # Signpost
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group()
    machines = dist.get_world_size() // given.shards
    mesh = init_device_mesh(device, (machines, given.shards), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(1)
    model = Transformer().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = signpost.OneBitAdam(  # Signpost
        model.parameters(), lr=1e-3, max_grad_norm=1.0, replicate_mesh=mesh["replicate"]
    )

    def state():
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    # DCP writes .metadata when all else is there.
    steps = [int(file.parent.name) for file in Path(given.save).glob("*/.metadata")]
    if steps:
        saved = state()
        dcp.load(saved, checkpoint_id=f"{given.save}/{max(steps)}")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
    text = torch.tensor(list(given.text.read_bytes()), dtype=torch.int64, device=device)
    pieces = text.unfold(0, CONTEXT + 1, 1)
    first, loss = optimizer.steps, torch.zeros(())
    for step in range(first, given.steps):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        chosen = pieces[torch.randint(len(pieces), (BATCH,), generator=generator)]
        loss = model(chosen)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    if optimizer.steps > first:
        dcp.save(state(), checkpoint_id=f"{given.save}/{optimizer.steps}")
    if dist.get_rank() == 0:
        bits = f"{optimizer.sent_bits:.2f} bits per parameter and step"
        print(f"steps {first} to {optimizer.steps}: loss {loss.item():.3f}, {bits}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
