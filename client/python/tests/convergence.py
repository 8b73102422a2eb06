"""Compares 1-bit Adam with Adam on the examples, seed by seed, and writes docs/convergence.md.

    bazel run //client/python:convergence
    bazel run //client/python:convergence -- --examples resnet --seeds 2 -- --freeze-step 100
    bazel run //client/python:convergence -- --optimizer zero_one_adam
    bazel run //client/python:convergence -- --optimizer onebit_lamb --batch-factor 8 \\
        --both="--steps=300" --both="resnet: --learning-rate=1e-2"

Another --optimizer is compared with what it is without compression, in a report of its own, such as
docs/convergence-onebit_lamb.md. What stands behind the second "--" goes to the runs of the one that
compresses, as does what --compressed has, or to those of one example; what --both has to all runs
likewise. Each run is kept as a file, and
not made again: an interrupted suite goes on. Other options that were tried are in the report too.
What a report says from "## Other measurements" on is written by hand, and stays.
After a change of the program, take another directory for them.

Exit code 1: the one that compresses is behind.
"""

import argparse
import hashlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics  # Python's reference, three times as much text as the licences

from matplotlib.figure import Figure
from scipy import stats

PACKAGE = Path("client/python/package/signpost").absolute()  # Bazel starts it beside its data
ROOT = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
WORKERS, AGGREGATORS = 2, 1
CONFIDENCE = 0.95
BEHIND = 1.0  # percent; less does not matter, even if it is certain
# By parameter and step from the freeze on, of optimizers that promise a number.
MOST_BITS = {"zero_one_adam": 0.6}
OPTIMIZERS = {
    "adam": "Adam",
    "lamb": "LAMB",
    "onebit_adam": "1-bit Adam",
    "onebit_lamb": "1-bit LAMB",
    "zero_one_adam": "0/1 Adam",
}
# Those that compress, and what they are compared with.
DENSE = {"onebit_adam": "adam", "zero_one_adam": "adam", "onebit_lamb": "lamb"}
FIRST = "onebit_adam"


@dataclass(frozen=True)
class Task:
    """An example in the size in which it is compared."""

    name: str
    title: str
    metric: str
    higher_is_better: bool
    batch: int  # the example's own, per rank and step
    arguments: tuple


TASKS = {
    task.name: task
    for task in (
        Task(
            "language_model",
            "byte-level transformer",
            "bits per byte",
            False,
            8,
            (f"--text={topics.__file__}", "--steps=1500", "--learning-rate=2e-3"),
        ),
        Task(
            "masked_language_model",
            "BERT on words",
            "bits per masked word",
            False,
            16,
            ("--steps=1000", "--learning-rate=3e-3"),
        ),
        Task("resnet", "ResNet on digits", "accuracy, %", True, 32, ("--steps=1200",)),
    )
}


@dataclass(frozen=True)
class Interval:
    """Of the mean of paired differences, by Student's t."""

    mean: float
    low: float
    high: float

    @property
    def has_zero(self):
        return self.low <= 0 <= self.high


def confidence_interval(differences):
    """At least two of them."""
    mean = statistics.mean(differences)
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1)
    half = quantile * statistics.stdev(differences) / len(differences) ** 0.5
    return Interval(mean, mean - half, mean + half)


def relative_differences(dense, compressed):
    """Of the final metrics, in percent of the dense runs', seed by seed."""
    return [100 * (b["validation"] / a["validation"] - 1) for a, b in zip(dense, compressed)]


def is_good_enough(task, interval):
    behind = -interval.mean if task.higher_is_better else interval.mean
    return interval.has_zero or behind < BEHIND


def bits_after_freeze(run):
    """That a worker sent by parameter and step; None if the run does not have it."""
    steps = run["steps"] - run["freeze_step"]
    if "frozen_wire_sent" not in run or steps <= 0:
        return None
    return 8 * run["frozen_wire_sent"] / (run["parameters"] * steps)


class Runs:
    """Runs of the examples, each kept as a file of its own."""

    def __init__(self, directory):
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def get(self, task, optimizer, seed, common, options=()):
        """The run's figures; makes the run if that has not been done."""
        arguments = (*common, *options)
        key = dict(example=task.name, optimizer=optimizer, seed=seed, arguments=list(arguments))
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]
        file = self.directory / f"{task.name}-{optimizer}-{seed}-{digest}.json"
        if not file.exists():
            print(f"{task.name} {optimizer} seed {seed} {' '.join(arguments)}", end="", flush=True)
            run = {**key, "options": list(options), **train(task, optimizer, seed, arguments)}
            print(f"  {run['validation']:.4f} in {run['seconds']:.0f} s", flush=True)
            whole = file.with_suffix(".part")
            whole.write_text(json.dumps(run))
            whole.rename(file)
        return json.loads(file.read_text())

    def variants(self, task, optimizer, common):
        """Which options of it were tried with these `common` arguments, and the seeds."""
        tried = {}
        for file in sorted(self.directory.glob(f"{task.name}-{optimizer}-*.json")):
            run = json.loads(file.read_text())
            options = run["options"]
            if run["arguments"] == [*common, *options]:
                tried.setdefault(tuple(options), []).append(run["seed"])
        return tried


def train(task, optimizer, seed, arguments):
    with tempfile.TemporaryDirectory() as results:
        ended = subprocess.run(
            [
                *[
                    PACKAGE / "signpost",
                    "run",
                    f"-n{WORKERS}",
                    f"--aggregators={AGGREGATORS}",
                    "--",
                ],
                *[sys.executable, PACKAGE / "examples" / f"{task.name}.py"],
                *[f"--optimizer={optimizer}", f"--seed={seed}", f"--results={results}"],
                *arguments,
            ],
            env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if ended.returncode != 0:
            sys.exit(f"\n{ended.stdout}{ended.stderr}")
        lines = [line.split() for line in (Path(results) / "rank-0").read_text().splitlines()]
    figures = {words[0]: float(words[1]) for words in lines if len(words) == 2}
    curve = [[float(word) for word in words[1:]] for words in lines if words[0] == "curve"]
    return {**figures, "curve": curve}


class Comparison:
    """An optimizer that compresses, with some options, and the dense one on one task, a run of each
    per seed."""

    def __init__(self, runs, task, optimizer, seeds, common, options):
        self.task = task
        self.optimizer = optimizer
        self.options = options
        self.dense, self.compressed = [], []
        for seed in seeds:  # in turns, so that an interrupted suite has pairs
            self.dense.append(runs.get(task, DENSE[optimizer], seed, common))
            self.compressed.append(runs.get(task, optimizer, seed, common, options))
        self.differences = relative_differences(self.dense, self.compressed)
        self.interval = confidence_interval(self.differences)
        bits = [bits_after_freeze(run) for run in self.compressed]
        self.bits = None if None in bits else statistics.mean(bits)
        most_bits = MOST_BITS.get(optimizer)
        is_small_enough = most_bits is None or (self.bits is not None and self.bits <= most_bits)
        self.is_good_enough = is_good_enough(task, self.interval) and is_small_enough

    def row(self):
        dense, compressed = (
            statistics.mean(run["validation"] for run in runs)
            for runs in (self.dense, self.compressed)
        )
        first, interval = self.compressed[0], self.interval
        sent = statistics.mean(run["wire_sent"] for run in self.compressed)
        ratio = 4 * first["parameters"] * first["steps"] / sent
        return (
            f"{self.task.title} | {first['parameters']:,.0f} | {first['steps']:.0f} | "
            f"{self.task.metric} | {dense:.4g} | {compressed:.4g} | "
            f"{interval.mean:+.2f}% ({interval.low:+.2f} to {interval.high:+.2f}) | {ratio:.1f}x | "
            f"{'–' if self.bits is None else format(self.bits, '.3f')} | "
            f"{'yes' if self.is_good_enough else 'NO'}"
        )

    def row_of_options(self):
        interval = self.interval
        options = " ".join(self.options) or "none"
        return (
            f"{self.task.title} | {options} | {len(self.differences)} | {interval.mean:+.2f}% "
            f"({interval.low:+.2f} to {interval.high:+.2f})"
        )

    def rows_of_seeds(self):
        for dense, compressed, difference in zip(self.dense, self.compressed, self.differences):
            yield (
                f"{self.task.title} | {dense['seed']} | {dense['validation']:.4f} | "
                f"{compressed['validation']:.4f} | {difference:+.2f}%"
            )

    def draw(self, file):
        """Training loss and metric, a faint line per seed and their mean."""
        figure = Figure(figsize=(9, 3.6), tight_layout=True)
        columns = figure.subplots(1, 2)
        names = ("training loss", f"held out: {self.task.metric}")
        for column, (axes, name) in enumerate(zip(columns, names), start=1):
            axes.set(xlabel="step", ylabel=name)
            for runs, optimizer, colour in (
                (self.dense, DENSE[self.optimizer], "#0072b2"),
                (self.compressed, self.optimizer, "#d55e00"),
            ):
                steps = [point[0] for point in runs[0]["curve"]]
                curves = [[point[column] for point in run["curve"]] for run in runs]
                for curve in curves:
                    axes.plot(steps, curve, color=colour, linewidth=0.5, alpha=0.4)
                mean = [statistics.mean(points) for points in zip(*curves)]
                axes.plot(steps, mean, color=colour, label=OPTIMIZERS[optimizer])
            frozen = self.compressed[0]["freeze_step"]
            axes.axvline(frozen, color="#999999", linestyle="dashed", label="freeze step")
        columns[0].legend()
        figure.savefig(file, dpi=80)


REPORT = """\
# Convergence{of}

{dense} and {compressed} on the [examples](../client/python/examples): {workers} workers of one thread each,
{aggregators} aggregator, the same batches, learning rates, schedule and first parameters for both, and
{seeds} seeds{first_seed}; β₂ is 0.99 in all of them. The difference is that of the final metric on held-out data, relative to {dense}'s and seed by
seed; in parentheses is its 95% confidence interval (Student's t). What must hold: zero is in the
interval, or {compressed} is less than {behind:g}% behind{most_bits}. Bytes are those that a worker sent in the whole
run, dense steps included, against fp32; bits those by parameter and step from the freeze on, where runs have them.

| example | parameters | steps | metric | {dense} | {compressed} | difference | fewer bytes | bits | holds |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

Options of {compressed}: {options}. {chosen}To make the runs again: `{command}`

{charts}

## Seed by seed

| example | seed | {dense} | {compressed} | difference |
| --- | --- | --- | --- | --- |
{seed_rows}
{tried}"""

TRIED = """
## What was tried

| example | options of {compressed} | seeds | difference |
| --- | --- | --- | --- |
{rows}
"""

OTHER = "\n## Other measurements\n"


def table(rows):
    return "\n".join(f"| {row} |" for row in rows)


def write_report(arguments, comparisons, others):
    """A file for each optimizer; that of the first has the name that was there before others."""
    is_first = arguments.optimizer == FIRST
    name = "convergence" if is_first else f"convergence-{arguments.optimizer}"
    charts = []
    for comparison in comparisons:
        chart = f"{name}-{comparison.task.name}.png"
        comparison.draw(arguments.docs / chart)
        charts.append(f"![{comparison.task.title}]({chart})")
    compressed = OPTIMIZERS[arguments.optimizer]
    options = arguments.compressed
    report = REPORT.format(
        of="" if is_first else f" of {compressed}",
        dense=OPTIMIZERS[DENSE[arguments.optimizer]],
        compressed=compressed,
        workers=WORKERS,
        aggregators=AGGREGATORS,
        seeds=arguments.seeds,
        first_seed="" if arguments.first_seed == 1 else f" from {arguments.first_seed} on",
        behind=BEHIND,
        most_bits=(
            f", and sends at most {MOST_BITS[arguments.optimizer]} bits"
            if arguments.optimizer in MOST_BITS
            else ""
        ),
        rows=table(comparison.row() for comparison in comparisons),
        options=", ".join(f"`{of}`" for of in options) if options else "the examples' defaults",
        chosen=chosen_with(comparisons, others),
        command=command_of(arguments),
        charts="\n\n".join(charts),
        seed_rows=table(row for comparison in comparisons for row in comparison.rows_of_seeds()),
        tried=(
            TRIED.format(
                compressed=compressed,
                rows=table(other.row_of_options() for other in others),
            )
            if others
            else ""
        ),
    )
    file = arguments.docs / f"{name}.md"
    file.write_text(report + written_by_hand(file))


def written_by_hand(file):
    """The end of a report that is there already, empty if there is none."""
    text = file.read_text() if file.exists() else ""
    start = text.find(OTHER)
    return text[start:] if start >= 0 else ""


def chosen_with(comparisons, others):
    """Says whose options may be better than on seeds that nobody has seen."""
    shown = {run["seed"] for one in comparisons for run in one.dense}
    tried = {other.task.name for other in others if shown & {run["seed"] for run in other.dense}}
    chosen = [one.task.title for one in comparisons if one.options and one.task.name in tried]
    if not chosen:
        return ""
    names = " and the ".join(chosen)
    return (
        f"Those of the {names} were chosen on the seeds that this table shows, with the results of "
        "[what was tried](#what-was-tried) known. "
    )


def command_of(arguments):
    """What makes the runs again, with as many seeds and steps as usual."""
    words = []
    if arguments.optimizer != FIRST:
        words.append(f"--optimizer={arguments.optimizer}")
    if arguments.first_seed != 1:
        words.append(f"--first-seed={arguments.first_seed}")
    if arguments.batch_factor != 1:
        words.append(f"--batch-factor={arguments.batch_factor}")
    words += [f'--both="{both}"' for both in arguments.both]
    words += [f'--compressed="{compressed}"' for compressed in arguments.compressed]
    return " ".join(["bazel run //client/python:convergence", *(["--", *words] if words else [])])


def common_of(arguments, task):
    """What all runs of the task are given."""
    common = list(task.arguments)
    if arguments.steps is not None:
        common.append(f"--steps={arguments.steps}")
    if arguments.batch_factor != 1:
        common.append(f"--batch={arguments.batch_factor * task.batch}")
    return (*common, *words_for(task, arguments.both))


def words_for(task, given):
    """Of texts such as "--gamma=1" and "resnet: --gamma=1", what is the task's."""
    words = []
    for text in given:
        name, _, of_one = text.partition(":")
        if name not in TASKS:
            words += shlex.split(text)
        elif name == task.name:
            words += shlex.split(of_one)
    return tuple(words)


def parse_arguments(words):
    """What stands behind "--" is the first that `compressed` has."""
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--optimizer", choices=DENSE, default=FIRST, help="that compresses [%(default)s]")
    add("--examples", nargs="+", choices=TASKS, default=list(TASKS), metavar="NAME")
    add("--seeds", type=int, default=5, help="runs of each, at least 2 [%(default)s]")
    add(
        "--first-seed", type=int, default=1, help="others than options were chosen on [%(default)s]"
    )
    add("--steps", type=int, help="instead of each example's own number")
    add("--batch-factor", type=int, default=1, help="times each example's own batch [%(default)s]")
    add(
        "--both",
        action="append",
        default=[],
        metavar="[NAME:]ARGUMENTS",
        help="of all runs, or those of one example",
    )
    add(
        "--compressed",
        action="append",
        default=[],
        metavar="[NAME:]ARGUMENTS",
        help="of the runs of the one that compresses, or those of one example",
    )
    add("--runs", type=Path, default=ROOT / "signpost-demo/convergence", help="where runs are kept")
    add("--docs", type=Path, default=ROOT / "docs", help="where the report goes")
    arguments = parser.parse_args(words[:end])
    if words[end + 1 :]:
        arguments.compressed.insert(0, shlex.join(words[end + 1 :]))
    return arguments


def main(words):
    arguments = parse_arguments(words)
    runs = Runs(arguments.runs)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    comparisons, others = [], []
    for task in (TASKS[name] for name in arguments.examples):
        kind, common = arguments.optimizer, common_of(arguments, task)
        options = words_for(task, arguments.compressed)
        comparisons.append(Comparison(runs, task, kind, seeds, common, options))
        for variant, tried in runs.variants(task, kind, common).items():
            if variant != options and len(tried) >= 2:
                others.append(Comparison(runs, task, kind, sorted(tried), common, variant))
    write_report(arguments, comparisons, others)
    print(table(comparison.row() for comparison in comparisons))
    return 0 if all(comparison.is_good_enough for comparison in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
