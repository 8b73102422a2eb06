"""A small network that guesses the next byte of a text, in a loop with Hugging Face's accelerate.

    signpost run -n 2 -- python3 with_accelerate.py --text FILE

Signpost needs the lines that are marked.
"""

import argparse
from pathlib import Path

import signpost.torch as signpost  # Signpost
import torch
from signpost.integrations.accelerate import Accelerator  # Signpost
from torch.utils.data import DataLoader, TensorDataset

CONTEXT = 16


def guesses_of(text):
    """Returns pieces of CONTEXT bytes, and the byte behind each."""
    numbers = torch.tensor(list(text), dtype=torch.int64)
    return TensorDataset(numbers[:-1].unfold(0, CONTEXT, 1), numbers[CONTEXT:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, default="/usr/share/common-licenses/GPL-3")
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = torch.nn.Sequential(
        torch.nn.Embedding(256, 32),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * CONTEXT, 256),
        torch.nn.GELU(),
        torch.nn.Linear(256, 256),
    ).to(accelerator.device)  # Signpost
    optimizer = signpost.OneBitAdam(model.parameters(), lr=3e-3)  # Signpost
    loader = DataLoader(guesses_of(given.text.read_bytes()), batch_size=32, shuffle=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, given.steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    while len(losses) < given.steps:
        for pieces, following in loader:
            loss = torch.nn.functional.cross_entropy(model(pieces), following)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if len(losses) == given.steps:
                break
    accelerator.print(f"loss {losses[0]:.3f}, in the end {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
