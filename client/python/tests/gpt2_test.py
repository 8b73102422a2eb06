"""gpt2.py with a model so small that a processor trains it."""

import gpt2
import numpy
import pytest

pytest.importorskip("tokenizers")

TINY = "--width=64 --layers=1 --context=16 --batch=4 --steps=40 --device=cpu".split()
TINY += ["--learning-rate=1e-2"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    (directory / "text").write_text("To be, or not to be, that is the question. " * 400)
    gpt2.main(["prepare", f"{directory}/tokens.npy", f"{directory}/text", "--vocabulary=300"])
    return directory / "tokens.npy"


def test_tokens_are_fewer_than_bytes(tokens):
    numbers = numpy.load(tokens)
    assert numbers.dtype == numpy.uint16 and numbers.max() < 300
    assert len(numbers) < 43 * 400 / 2


def test_trains_in_pieces_and_reports_both(tokens, tmp_path, capsys):
    command = ["train", f"{tmp_path}/runs", f"{tokens}", "--ranks=2", "--piece=30"]
    gpt2.main([*command, "--seconds=0", "--", *TINY])
    assert "adam is at step 0 of 40; run this again to go on" in capsys.readouterr().out
    gpt2.main([*command, "--", *TINY])
    printed = capsys.readouterr().out
    assert "adam: steps 30 to 40 in" in printed and "all 40 steps are done" in printed
    gpt2.main([*command, "--", *TINY])  # nothing is left to do
    gpt2.main(["report", f"{tmp_path}/runs"])
    printed = capsys.readouterr().out
    # All 40 steps of 1-bit Adam are its warm-up in int8.
    for optimizer, bits in (("adam", 32), ("onebit_adam", 8)):
        line = next(line for line in printed.splitlines() if line.startswith(f"{optimizer}: "))
        assert "after 40 steps" in line
        assert bits < float(line.split()[-3]) < 1.2 * bits  # with headers
    rows = (tmp_path / "runs/gpt2.csv").read_text().splitlines()
    losses = [float(row.split(",")[3]) for row in rows if row.startswith("onebit_adam,")]
    assert len(losses) == 20 and losses[-1] < 0.5 * losses[0]
    assert (tmp_path / "runs/gpt2.png").stat().st_size > 1000
