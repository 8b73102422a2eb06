"""Trains a transformer on the bytes of text, or on tokens, as one process or as several.

    python3 language_model.py
    signpost run -n 4 --aggregators 2 -- python3 language_model.py --optimizer onebit_adam
"""

import math
import os
from pathlib import Path

import numpy
import signpost.torch as signpost
import torch
from torch import nn

from training import argument_parser, device_of, train

LICENCES = Path("/usr/share/common-licenses")  # which every Debian has
PYTHON = Path(os.__file__).parent  # whose modules are text enough not to be learnt by heart
BYTES = 256
HELD_OUT = 10  # one byte in so many
VALIDATION_WINDOWS = 128


def parse_arguments():
    parser = argument_parser(
        __doc__.splitlines()[0],
        steps=600,
        batch=8,
        batch_unit="windows of text",
        learning_rate=1e-3,
    )
    add = parser.add_argument
    add("--text", nargs="+", type=Path, help="files to learn from [licences and Python's modules]")
    add("--tokens", type=Path, help=".npy of 16-bit tokens to learn instead of text's bytes")
    add("--context", type=int, default=64, help="bytes or tokens that the model sees [%(default)s]")
    add("--width", type=int, default=128, help="numbers per byte or token [%(default)s]")
    add("--layers", type=int, default=2, help="[%(default)s]")
    return parser.parse_args()


def load_text(files):
    """Training and validation bytes: the last tenth of each file is held out."""
    if files is None:
        files = sorted([*LICENCES.glob("*"), *PYTHON.glob("*.py")])
        files = [f for f in files if f.is_file() and not f.is_symlink() and f.stat().st_size > 1000]
    training, validation = [], []
    for file in files:
        data = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
        cut = len(data) - len(data) // HELD_OUT
        training.append(data[:cut])
        validation.append(data[cut:])
    return torch.cat(training), torch.cat(validation)


def load_tokens(file):
    """Training and validation tokens: the last hundredth is held out."""
    tokens = torch.from_numpy(numpy.load(file).astype("int32"))
    cut = len(tokens) - len(tokens) // 100
    return tokens[:cut], tokens[cut:]


def windows(text, starts, context):
    """Inputs and targets, [len(starts), context] each: a target is what stands behind its input."""
    rows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]


class Transformer(nn.Module):
    """GPT-2 (Radford et al., Language Models are Unsupervised Multitask Learners).

    With 50,257 tokens, a context of 1024, a width of 768 and 12 layers it is GPT-2 small: 124 million parameters.
    """

    def __init__(self, vocabulary, context, width, layers):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
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
        norm = nn.LayerNorm(width)
        self.layers = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
        self.output = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.output.weight = self.embedding.weight  # one parameter
        mask = torch.full((context, context), float("-inf")).triu(diagonal=1)
        self.register_buffer("mask", mask)  # nothing from the future

    def forward(self, inputs):
        return self.output(self.layers(self.embedding(inputs) + self.position, self.mask))


def loss_of(model, inputs, targets):
    """The mean of -log2 p(target): bits per byte or token. On a GPU matrices are multiplied in bf16."""
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda):
        logits = model(inputs).flatten(0, 1)
    return nn.functional.cross_entropy(logits.float(), targets.flatten()) / math.log(2)


def main():
    arguments = parse_arguments()
    signpost.init()
    torch.manual_seed(arguments.seed)
    device = device_of(arguments)
    tokens = arguments.tokens
    texts = load_text(arguments.text) if tokens is None else load_tokens(tokens)
    vocabulary = BYTES if tokens is None else int(max(text.max() for text in texts)) + 1
    training, validation = (text.to(device) for text in texts)
    model = Transformer(vocabulary, arguments.context, arguments.width, arguments.layers).to(device)

    def loss_of_batch(generator):
        last = len(training) - arguments.context - 1
        starts = torch.randint(last + 1, (arguments.batch,), generator=generator)
        return loss_of(model, *windows(training, starts, arguments.context))

    def validate():
        """On windows that are spread evenly over the text."""
        last = len(validation) - arguments.context - 1
        starts = torch.linspace(0, last, VALIDATION_WINDOWS).long()
        return loss_of(model, *windows(validation, starts, arguments.context)).item()

    unit = "byte" if tokens is None else "token"
    train(arguments, model, loss_of_batch, validate, f"validation loss {{:.4f}} bits per {unit}")


if __name__ == "__main__":
    main()
