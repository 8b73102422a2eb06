"""Trains a GPT-2 small with Adam and with 1-bit Adam, four ranks that share a GPU, and compares them.

    python3 gpt2.py prepare TOKENS.npy FILE...     learns a vocabulary from texts, and writes them as its tokens
    python3 gpt2.py train RUNS TOKENS.npy          goes on with both trainings for --seconds, from where they are
    python3 gpt2.py report RUNS                    writes RUNS/gpt2.csv and gpt2.png, and prints the figures

`prepare` needs the package tokenizers, and `report` matplotlib; `train` needs neither. Trainings go on from checkpoints in RUNS, in pieces
of so many steps, so a machine that is lent for minutes is enough. What stands behind "--" goes to language_model.py,
and overrides what makes the model GPT-2 small, and how many tokens it sees.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy
import signpost

VOCABULARY = 50257
OPTIMIZERS = ("adam", "onebit_adam")
# 4 ranks x 16 windows x 1024 tokens: 65,536 tokens a step, 131 million in all.
SMALL = "--width=768 --layers=12 --context=1024 --batch=16 --steps=2000 --device=cuda".split()
PACKAGE = Path(signpost.__file__).parent


def prepare(tokens, files, vocabulary):
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(file) for file in files], vocab_size=vocabulary, show_progress=False)
    parts = []
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        parts.append(numpy.array(tokenizer.encode(text).ids, dtype=numpy.uint16))
    numpy.save(tokens, numpy.concatenate(parts))
    print(f"{sum(map(len, parts))} tokens of {tokenizer.get_vocab_size()} kinds")


def steps_done(directory):
    return max((int(piece.name.split("-")[1]) for piece in directory.glob("piece-*")), default=0)


def train(runs, tokens, given, ranks, piece, seconds):
    """In pieces, of each optimizer in turns, as long as another one fits into the time."""
    end = time.monotonic() + seconds
    arguments = [*SMALL, *given]
    steps = [int(word.split("=")[1]) for word in arguments if word.startswith("--steps=")][-1]
    longest = 0.0
    while True:
        optimizer = min(OPTIMIZERS, key=lambda name: steps_done(runs / name))
        done = steps_done(runs / optimizer)
        if done >= steps:
            return print(f"all {steps} steps are done")
        if time.monotonic() + longest > end:
            return print(f"{optimizer} is at step {done} of {steps}; run this again to go on")
        start = time.monotonic()
        stop_at = min(steps, done + piece)
        train_piece(runs / optimizer, optimizer, tokens, arguments, ranks, stop_at)
        took = time.monotonic() - start
        longest = max(longest, took)
        print(f"{optimizer}: steps {done} to {stop_at} in {took:.0f} s", flush=True)


def train_piece(directory, optimizer, tokens, arguments, ranks, stop_at):
    directory.mkdir(parents=True, exist_ok=True)
    results = directory / "under-way"
    subprocess.run(
        [
            *[PACKAGE / "signpost", "run", f"-n{ranks}", "--aggregators=2", "--"],
            *[sys.executable, PACKAGE / "examples/language_model.py", f"--optimizer={optimizer}"],
            *[f"--tokens={tokens}", f"--checkpoints={directory / 'checkpoints'}"],
            *[f"--save-every={stop_at}", f"--stop-at={stop_at}", f"--results={results}"],
            *arguments,
        ],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        check=True,
    )
    if not any(line.startswith("curve ") for line in (results / "rank-0").read_text().splitlines()):
        # It was killed behind its checkpoint, and before its figures were written.
        sys.exit(f"the figures of the last piece are lost: remove {directory}, and train it again")
    results.rename(directory / f"piece-{stop_at:07}")  # what is not whole does not count


def read(directory):
    """Returns the curve, (step, training loss, validation loss), and sent bits by parameter and step."""
    curve, sent, steps = [], 0.0, 0
    for piece in sorted(directory.glob("piece-*")):
        lines = [line.split() for line in (piece / "rank-0").read_text().splitlines()]
        curve += [tuple(map(float, words[1:])) for words in lines if words[0] == "curve"]
        figures = {words[0]: float(words[1]) for words in lines if len(words) == 2}
        sent += figures["wire_sent"]
        steps = int(piece.name.split("-")[1])
    return curve, 8 * sent / figures["parameters"] / steps


def report(runs):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), tight_layout=True)
    axes = figure.subplots()
    axes.set(xlabel="step", ylabel="validation loss, bits per token")
    rows = ["optimizer,step,training,validation"]
    for optimizer in OPTIMIZERS:
        curve, bits = read(runs / optimizer)
        rows += [
            f"{optimizer},{step:.0f},{loss:.4f},{held_out:.4f}" for step, loss, held_out in curve
        ]
        axes.plot([point[0] for point in curve], [point[2] for point in curve], label=optimizer)
        step, _, last = curve[-1]
        print(
            f"{optimizer}: {last:.4f} bits per token after {step:.0f} steps, {bits:.2f} bits sent"
        )
    axes.legend()
    figure.savefig(runs / "gpt2.png", dpi=80)
    (runs / "gpt2.csv").write_text("\n".join([*rows, ""]))


def main(words):
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("tokens", type=Path)
    preparing.add_argument("files", type=Path, nargs="+")
    preparing.add_argument("--vocabulary", type=int, default=VOCABULARY, help="[%(default)s]")
    training = commands.add_parser("train")
    training.add_argument("runs", type=Path)
    training.add_argument("tokens", type=Path)
    training.add_argument("--ranks", type=int, default=4, help="[%(default)s]")
    training.add_argument("--piece", type=int, default=250, help="steps at a time [%(default)s]")
    training.add_argument("--seconds", type=float, default=540, help="[%(default)s]")
    commands.add_parser("report").add_argument("runs", type=Path)
    given = parser.parse_args(words[:end])
    if given.command == "prepare":
        prepare(given.tokens, given.files, given.vocabulary)
    elif given.command == "train":
        behind = words[end + 1 :]
        train(given.runs, given.tokens, behind, given.ranks, given.piece, given.seconds)
    else:
        report(given.runs)


if __name__ == "__main__":
    main(sys.argv[1:])
