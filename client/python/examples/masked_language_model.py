"""Pre-trains a small BERT on text, as one process or as several: it guesses words that are masked.

    python3 masked_language_model.py
    signpost run -n 4 --aggregators 2 -- python3 masked_language_model.py --optimizer onebit_adam
"""

import math
import re
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics  # the reference that comes with every Python

import signpost.torch as signpost
import torch
from torch import nn

from training import argument_parser, device_of, train

VOCABULARY = 2000
MASK, UNKNOWN = 0, 1  # tokens that are no word
MASKED = 0.15  # of all tokens
HELD_OUT = 10  # one paragraph in so many
VALIDATION_WINDOWS = 128


def parse_arguments():
    parser = argument_parser(
        __doc__.splitlines()[0],
        steps=600,
        batch=16,
        batch_unit="windows of text",
        learning_rate=1e-3,
    )
    add = parser.add_argument
    add("--text", nargs="+", type=Path, help="files to learn from [Python's reference]")
    add("--context", type=int, default=64, help="words that the model sees [%(default)s]")
    add("--width", type=int, default=128, help="numbers per word [%(default)s]")
    add("--layers", type=int, default=2, help="[%(default)s]")
    return parser.parse_args()


def load_text(files):
    """Tokens to train on and to validate with: every tenth paragraph is held out."""
    texts = topics.values() if files is None else [file.read_text() for file in files]
    # Some paragraphs are there several times; none may be on both sides.
    paragraphs = list(dict.fromkeys(part for text in texts for part in text.split("\n\n")))
    words = [re.findall(r"\w+|[^\w\s]", paragraph.lower()) for paragraph in paragraphs]
    training = [word for i, part in enumerate(words) if i % HELD_OUT for word in part]
    validation = [word for part in words[::HELD_OUT] for word in part]
    known = Counter(training).most_common(VOCABULARY - 2)
    tokens = {word: token for token, (word, _) in enumerate(known, start=2)}
    return [
        torch.tensor([tokens.get(word, UNKNOWN) for word in part])
        for part in (training, validation)
    ]


def windows(text, starts, context):
    return torch.stack([text[start : start + context] for start in starts])


def mask(tokens, generator):
    """What the model sees, and which tokens it has to guess (Devlin et al., BERT, section 3.1).

    Of those, eight tenths are masked, one tenth are other words, and one tenth are as they were.
    """
    chosen = (torch.rand(tokens.shape, generator=generator) < MASKED) & (tokens != UNKNOWN)
    fate = torch.rand(tokens.shape, generator=generator)
    others = torch.randint(UNKNOWN + 1, VOCABULARY, tokens.shape, generator=generator)
    seen = torch.where(chosen & (fate < 0.8), MASK, tokens)
    return torch.where(chosen & (fate >= 0.9), others, seen), chosen


class Bert(nn.Module):
    """BERT (Devlin et al., arXiv:1810.04805) without the second of its two tasks."""

    def __init__(self, context, width, layers):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
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
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.output = nn.Linear(width, VOCABULARY)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.output.weight = self.embedding.weight  # one parameter

    def forward(self, tokens, chosen):
        """Logits for the chosen tokens."""
        hidden = self.layers(self.embedding(tokens) + self.position)
        return self.output(self.head(hidden[chosen]))


def loss_of(model, tokens, generator):
    """The mean of -log2 p(word): bits per masked word."""
    device = model.position.device
    seen, chosen, tokens = (t.to(device) for t in (*mask(tokens, generator), tokens))
    return nn.functional.cross_entropy(model(seen, chosen), tokens[chosen]) / math.log(2)


def main():
    arguments = parse_arguments()
    signpost.init()
    torch.manual_seed(arguments.seed)
    training, validation = load_text(arguments.text)
    model = Bert(arguments.context, arguments.width, arguments.layers).to(device_of(arguments))

    def loss_of_batch(generator):
        last = len(training) - arguments.context
        starts = torch.randint(last + 1, (arguments.batch,), generator=generator)
        return loss_of(model, windows(training, starts, arguments.context), generator)

    def validate():
        """On windows that are spread evenly over the text, with the same words masked each time."""
        starts = torch.linspace(0, len(validation) - arguments.context, VALIDATION_WINDOWS).long()
        tokens = windows(validation, starts, arguments.context)
        return loss_of(model, tokens, torch.Generator().manual_seed(0)).item()

    train(arguments, model, loss_of_batch, validate, "validation loss {:.4f} bits per masked word")


if __name__ == "__main__":
    main()
