"""A small network that guesses the next byte of a text, trained by Lightning.

    signpost run -n 2 -- python3 with_lightning.py --text FILE

Signpost needs the lines that are marked.
"""

import argparse
from pathlib import Path

import signpost.torch as signpost  # Signpost
import torch
from lightning.pytorch import LightningModule, Trainer
from signpost.integrations.lightning import SignpostStrategy  # Signpost
from torch.utils.data import DataLoader, TensorDataset

CONTEXT = 16


class Guesser(LightningModule):
    def __init__(self):
        super().__init__()
        self.losses = []
        self.network = torch.nn.Sequential(
            torch.nn.Embedding(256, 32),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * CONTEXT, 256),
            torch.nn.GELU(),
            torch.nn.Linear(256, 256),
        )

    def training_step(self, batch, _):
        pieces, following = batch
        loss = torch.nn.functional.cross_entropy(self.network(pieces), following)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return signpost.OneBitAdam(self.parameters(), lr=1e-3)  # Signpost


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, default="/usr/share/common-licenses/GPL-3")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--devices", type=int, default=2, help="ranks on this machine")
    parser.add_argument("--output", default="with_lightning")
    given = parser.parse_args()
    numbers = torch.tensor(list(given.text.read_bytes()), dtype=torch.int64)
    data = TensorDataset(numbers[:-1].unfold(0, CONTEXT, 1), numbers[CONTEXT:])
    trainer = Trainer(
        strategy=SignpostStrategy(process_group_backend="gloo"),  # Signpost
        devices=given.devices,
        max_steps=given.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=given.output,
    )
    module = Guesser()
    trainer.fit(module, DataLoader(data, batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        print(f"loss {module.losses[0]:.3f}, in the end {module.losses[-1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
