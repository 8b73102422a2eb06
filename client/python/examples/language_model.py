"""Trains a byte-level transformer on text, as one process or as several.

    python3 language_model.py
    signpost run -n 4 --aggregators 2 -- python3 language_model.py --optimizer onebit_adam
"""

import argparse
import math
import os
import time
from pathlib import Path

import signpost.torch as signpost
import torch
from torch import nn

LICENCES = Path("/usr/share/common-licenses")  # which every Debian has
BYTES = 256
HELD_OUT = 10  # one byte in so many
WARM_UP = 0.05  # of the steps, in which the learning rate rises
VALIDATION_WINDOWS = 256


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--text", nargs="+", type=Path, help=f"files to learn from [the licences in {LICENCES}]")
    add("--optimizer", choices=["adam", "onebit_adam"], default="onebit_adam")
    add("--steps", type=int, default=600)
    add("--freeze-step", type=int, help="dense steps of 1-bit Adam [15%% of the steps]")
    add("--learning-rate", type=float, default=1e-3, help="the highest")
    add("--batch", type=int, default=16, help="windows of text per rank and step")
    add("--context", type=int, default=64, help="bytes that the model sees")
    add("--width", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--seed", type=int, default=1, help="of the first parameters and the batches")
    add("--checkpoints", help="directory to save in, and to go on from if it is there")
    add("--save-every", type=int, default=100, help="steps between two checkpoints")
    add("--output", type=Path, default=Path("."), help="directory of loss.png")
    return parser.parse_args()


def load_text(files):
    """Training and validation bytes: the last tenth of each file is held out."""
    if files is None:
        files = sorted(f for f in LICENCES.iterdir() if f.is_file() and not f.is_symlink())
    training, validation = [], []
    for file in files:
        data = torch.tensor(list(file.read_bytes()), dtype=torch.uint8)
        cut = len(data) - len(data) // HELD_OUT
        training.append(data[:cut])
        validation.append(data[cut:])
    return torch.cat(training), torch.cat(validation)


def windows(text, starts, context):
    """Inputs and targets, [len(starts), context] each: a target is the byte behind its input."""
    rows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]


class Transformer(nn.Module):
    """GPT-2 (Radford et al., Language Models are Unsupervised Multitask Learners) on bytes."""

    def __init__(self, context, width, layers):
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(
            width,
            nhead=max(width // 64, 1),
            dim_feedforward=4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width))
        self.output = nn.Linear(width, BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.output.weight = self.embedding.weight  # one parameter
        mask = torch.full((context, context), float("-inf")).triu(diagonal=1)
        self.register_buffer("mask", mask)  # nothing from the future

    def forward(self, inputs):
        return self.output(self.layers(self.embedding(inputs) + self.position, self.mask))


def loss_of(model, inputs, targets):
    """The mean of -log2 p(target): bits per byte."""
    logits = model(inputs).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets.flatten()) / math.log(2)


@torch.no_grad()
def validation_loss(model, text, arguments):
    """On windows that are spread evenly over the text."""
    last = len(text) - arguments.context - 1
    starts = torch.linspace(0, last, VALIDATION_WINDOWS).long().split(arguments.batch)
    losses = [loss_of(model, *windows(text, part, arguments.context)) for part in starts]
    return sum(losses).item() / len(losses)


def make_optimizer(model, arguments):
    options = {"lr": arguments.learning_rate, "betas": (0.9, 0.99)}
    if arguments.checkpoints and os.path.exists(arguments.checkpoints):
        options["resume"] = arguments.checkpoints
    if arguments.optimizer == "adam":
        return signpost.Adam(model.parameters(), **options)
    freeze_step = arguments.freeze_step or max(1, arguments.steps * 15 // 100)
    return signpost.OneBitAdam(model.parameters(), freeze_step=freeze_step, **options)


def schedule(step, steps):
    """The learning rate's factor: a linear rise, then half a cosine."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


class Progress:
    """Rank 0's line for each twentieth of the training, and the loss curve."""

    def __init__(self, elements):
        self.elements = elements
        self.curve = []  # (step, loss)
        self.sent_bytes = 0
        self._begin()

    def _begin(self):
        self.start = time.monotonic()
        self.reports, self.losses = [], []

    def add(self, loss, report):
        self.losses.append(loss)
        self.reports.append(report)

    def end_interval(self):
        seconds = time.monotonic() - self.start
        wire = sum(report.wire_s for report in self.reports) / seconds
        wait = sum(report.wait_s for report in self.reports) / seconds
        sent, self.sent_bytes = self.sent_bytes, self.reports[-1].sent_bytes
        fp32_bytes = 4 * self.elements * len(self.reports)
        step, loss = self.reports[-1].step + 1, sum(self.losses) / len(self.losses)
        self.curve.append((step, loss))
        print(
            f"step {step}  loss {loss:.3f}  {1000 * seconds / len(self.reports):.0f} ms "
            f"(compute {1 - wire - wait:.0%} wire {wire:.0%} wait {wait:.0%})  "
            f"{fp32_bytes / (self.sent_bytes - sent):.1f}x fewer bytes  "
            f"{signpost.world_size()} workers",
            flush=True,
        )
        self._begin()

    def draw(self, directory):
        try:
            from matplotlib import pyplot
        except ImportError:
            print("no loss.png: matplotlib is not installed")
            return
        figure, axes = pyplot.subplots()
        axes.plot(*zip(*self.curve))
        axes.set(xlabel="step", ylabel="training loss, bits per byte")
        directory.mkdir(parents=True, exist_ok=True)
        figure.savefig(directory / "loss.png")


def train(arguments):
    signpost.init()
    training, validation = load_text(arguments.text)
    torch.manual_seed(arguments.seed)  # all ranks begin with the same parameters
    model = Transformer(arguments.context, arguments.width, arguments.layers)
    optimizer = make_optimizer(model, arguments)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: schedule(step, arguments.steps), optimizer.steps - 1
    )
    elements = sum(parameter.numel() for parameter in model.parameters())
    progress = Progress(elements)
    if signpost.rank() == 0:
        print(f"{elements} parameters, {signpost.world_size()} workers, {arguments.optimizer}")

    while optimizer.steps < arguments.steps:
        # Each rank has its own part of the batch, and after a resume the same as without.
        seed = (arguments.seed << 48) + (optimizer.steps << 12) + signpost.rank()
        generator = torch.Generator().manual_seed(seed)
        last = len(training) - arguments.context - 1
        starts = torch.randint(last + 1, (arguments.batch,), generator=generator)
        optimizer.zero_grad()
        loss = loss_of(model, *windows(training, starts, arguments.context))
        loss.backward()
        optimizer.step()
        scheduler.step()
        progress.add(loss.item(), optimizer.report)
        if arguments.checkpoints and optimizer.steps % arguments.save_every == 0:
            optimizer.checkpoint(arguments.checkpoints)
        if signpost.rank() == 0 and optimizer.steps % max(1, arguments.steps // 20) == 0:
            progress.end_interval()

    print(f"done: parameters {optimizer.parameters_crc32c():08x}", flush=True)
    if signpost.rank() == 0:
        loss = validation_loss(model, validation, arguments)
        print(f"validation loss {loss:.4f} bits per byte", flush=True)
        progress.draw(arguments.output)


if __name__ == "__main__":
    train(parse_arguments())
