"""Compares an optimizer that compresses with the one that it stands for, and writes a page of docs/.

    bazel run //client/python:convergence
    bazel run //client/python:convergence -- --examples resnet --seeds 2 -- --freeze-step 100
    bazel run //client/python:convergence -- --optimizer zero_one_adam

Both are tuned first: each is run once with every learning rate, on a seed of its own, and goes on with the best. Then
both run on other seeds, and the differences seed by seed are tested for equivalence. What counts of a run is the best
validation that it has had.

What stands behind the second "--" goes to the runs of the one that compresses, as does what --compressed has, or to
those of one example; what --both has to all runs likewise. Each run is kept as a file, and not made again: an
interrupted suite goes on. After a change of the program, take another directory for them. What a report says from
"## Other measurements" on is written by hand, and stays.

Exit code 1: equivalence was not shown for all examples.
"""

import argparse
import hashlib
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from scipy import stats

PACKAGE = Path("client/python/package/signpost").absolute()  # Bazel starts it beside its data
ROOT = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
WORKERS, AGGREGATORS = 4, 1
# Two one-sided tests at 5% each: equivalent if the 90% interval is within the margin.
CONFIDENCE = 0.90
MARGIN = 0.5  # percent
SWEEP_SEED = 1000  # none of those that are compared
# Learning rates to try, as multiples of each example's. LAMB's are higher.
FACTORS = dict.fromkeys(["onebit_adam", "zero_one_adam"], (0.5, 1.0, 2.0, 4.0))
FACTORS["onebit_lamb"] = (2.0, 4.0, 8.0, 16.0)
OUT_OF_RANGE = 64  # the exit code of a training that has diverged, among others
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
    learning_rate: float
    arguments: tuple

    def best_of(self, run):
        """Returns the best figure that was validated along the way; the worst possible if there is none."""
        figures = [point[2] for point in run["curve"] if math.isfinite(point[2])]
        worst = -math.inf if self.higher_is_better else math.inf
        return (max if self.higher_is_better else min)(figures, default=worst)


TASKS = {
    task.name: task
    for task in (
        Task(
            "language_model",
            "byte-level transformer",
            "bits per byte",
            False,
            8,
            2e-3,
            ("--steps=1000",),
        ),
        Task(
            "masked_language_model",
            "BERT on words",
            "bits per masked word",
            False,
            16,
            3e-3,
            ("--steps=1000",),
        ),
        Task("resnet", "ResNet on digits", "accuracy, %", True, 32, 2e-3, ("--steps=1000",)),
    )
}


@dataclass(frozen=True)
class Interval:
    """Of the mean of paired differences, by Student's t."""

    mean: float
    low: float
    high: float

    @property
    def is_equivalent(self):
        return -MARGIN <= self.low and self.high <= MARGIN


def confidence_interval(differences):
    """Returns the interval of the mean of at least two differences."""
    mean = statistics.mean(differences)
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1)
    half = quantile * statistics.stdev(differences) / len(differences) ** 0.5
    return Interval(mean, mean - half, mean + half)


def relative_differences(task, dense, compressed):
    """Returns them in percent of the dense runs', seed by seed; above 0 where the compressed are worse."""
    sign = -1 if task.higher_is_better else 1
    pairs = zip(dense, compressed)
    return [100 * sign * (task.best_of(b) / task.best_of(a) - 1) for a, b in pairs]


def bits(run, direction):
    """Returns how many were sent or received by parameter and step of the whole run."""
    return 8 * run[f"wire_{direction}"] / (run["parameters"] * run["steps"])


class Runs:
    """Runs of the examples, each kept as a file of its own."""

    def __init__(self, directory, workers):
        self.directory = directory
        self.workers = workers
        directory.mkdir(parents=True, exist_ok=True)

    def get(self, task, optimizer, seed, common, options=()):
        """The run's figures; makes the run if that has not been done."""
        arguments = (*common, *options)
        key = dict(example=task.name, optimizer=optimizer, seed=seed, arguments=list(arguments))
        key["workers"] = self.workers
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]
        file = self.directory / f"{task.name}-{optimizer}-{seed}-{digest}.json"
        if not file.exists():
            print(f"{task.name} {optimizer} seed {seed} {' '.join(arguments)}", end="", flush=True)
            run = {**key, **train(task, optimizer, seed, arguments, self.workers)}
            print(f"  {task.best_of(run):.4f} in {run['seconds']:.0f} s", flush=True)
            whole = file.with_suffix(".part")
            whole.write_text(json.dumps(run))
            whole.rename(file)
        return json.loads(file.read_text())


def train(task, optimizer, seed, arguments, workers):
    with tempfile.TemporaryDirectory() as results:
        ended = subprocess.run(
            [
                *[
                    PACKAGE / "signpost",
                    "run",
                    f"-n{workers}",
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
        if ended.returncode == OUT_OF_RANGE and "the training has diverged" in ended.stderr:
            return {"curve": [], "seconds": math.nan}
        if ended.returncode != 0:
            sys.exit(f"\n{ended.stdout}{ended.stderr}")
        lines = [line.split() for line in (Path(results) / "rank-0").read_text().splitlines()]
    figures = {words[0]: float(words[1]) for words in lines if len(words) == 2}
    curve = [[float(word) for word in words[1:]] for words in lines if words[0] == "curve"]
    return {**figures, "curve": curve}


class Comparison:
    """On one task: both optimizers, each with its best learning rate, and a run of each per seed."""

    def __init__(self, runs, task, optimizer, factors, seeds, common, options):
        self.task = task
        self.optimizer = optimizer
        given = {DENSE[optimizer]: (), optimizer: options}
        self.sweeps = {}  # by optimizer: (learning rate, the best validation)
        self.rates = {}
        for kind, options_of_kind in given.items():
            self.sweeps[kind] = []
            for factor in factors:
                rate = factor * task.learning_rate
                run = runs.get(task, kind, SWEEP_SEED, with_rate(common, rate), options_of_kind)
                self.sweeps[kind].append((rate, task.best_of(run)))
            pick = max if task.higher_is_better else min
            self.rates[kind] = pick(self.sweeps[kind], key=lambda swept: swept[1])[0]
        self.runs = {kind: [] for kind in given}
        for seed in seeds:  # in turns, so that an interrupted suite has pairs
            for kind, options_of_kind in given.items():
                arguments = with_rate(common, self.rates[kind])
                run = runs.get(task, kind, seed, arguments, options_of_kind)
                if not math.isfinite(task.best_of(run)):
                    sys.exit(f"{task.title}: {OPTIMIZERS[kind]} diverged with seed {seed}")
                self.runs[kind].append(run)
        self.dense, self.compressed = self.runs.values()
        self.differences = relative_differences(task, self.dense, self.compressed)
        self.interval = confidence_interval(self.differences)

    def row(self):
        dense, compressed = (
            statistics.mean(self.task.best_of(run) for run in runs)
            for runs in (self.dense, self.compressed)
        )
        first, interval = self.compressed[0], self.interval
        up, down = (
            statistics.mean(bits(run, direction) for run in self.compressed)
            for direction in ("sent", "received")
        )
        return (
            f"{self.task.title} | {first['parameters']:,.0f} | {first['steps']:.0f} | "
            f"{self.task.metric} | {dense:.4g} | {compressed:.4g} | "
            f"{interval.mean:+.2f}% ({interval.low:+.2f} to {interval.high:+.2f}) | "
            f"{'yes' if interval.is_equivalent else 'not shown'} | {up:.2f} / {down:.2f}"
        )

    def rows_of_sweep(self):
        for kind, sweep in self.sweeps.items():
            for rate, figure in sweep:
                taken = " (taken)" if rate == self.rates[kind] else ""
                yield f"{self.task.title} | {OPTIMIZERS[kind]} | {rate:g}{taken} | {figure:.4f}"

    def rows_of_seeds(self):
        for dense, compressed, difference in zip(self.dense, self.compressed, self.differences):
            yield (
                f"{self.task.title} | {dense['seed']} | {self.task.best_of(dense):.4f} | "
                f"{self.task.best_of(compressed):.4f} | {difference:+.2f}%"
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

{dense} and {compressed} on the [examples](../client/python/examples): {workers} workers of one thread each, {aggregators}
aggregator, the same batches, schedule and first parameters for both, and {seeds} seeds{first_seed}; β₂ is 0.99 in all of them.
Each optimizer has the best of {rates} learning rates, which were tried on another seed. What counts of a run is the best
validation on held-out data that it has had. The difference is relative to {dense}'s, seed by seed, and above 0 where
{compressed} is worse; in parentheses is its 90% confidence interval (Student's t). Equivalent: that interval is within
±{margin:g}%, which is two one-sided tests at 5% each. Bits are those of a worker's sockets, sent / received, by
parameter and step of the whole run, dense steps included.

| example | parameters | steps | metric | {dense} | {compressed} | difference | equivalent | bits |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

Options of {compressed}: {options}. To make the runs again: `{command}`

{charts}

## Learning rates

| example | optimizer | learning rate | best validation |
| --- | --- | --- | --- |
{sweep_rows}

## Seed by seed

| example | seed | {dense} | {compressed} | difference |
| --- | --- | --- | --- | --- |
{seed_rows}
"""

OTHER = "\n## Other measurements\n"


def table(rows):
    return "\n".join(f"| {row} |" for row in rows)


def factors_of(arguments):
    return arguments.factors or FACTORS[arguments.optimizer]


def with_rate(common, rate):
    return (*common, f"--learning-rate={rate:g}")


def write_report(arguments, comparisons):
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
        workers=arguments.workers,
        aggregators=AGGREGATORS,
        seeds=arguments.seeds,
        first_seed="" if arguments.first_seed == 1 else f" from {arguments.first_seed} on",
        margin=MARGIN,
        rates=len(factors_of(arguments)),
        rows=table(comparison.row() for comparison in comparisons),
        options=", ".join(f"`{of}`" for of in options) if options else "the examples' defaults",
        command=command_of(arguments),
        charts="\n\n".join(charts),
        seed_rows=table(row for comparison in comparisons for row in comparison.rows_of_seeds()),
        sweep_rows=table(row for comparison in comparisons for row in comparison.rows_of_sweep()),
    )
    file = arguments.docs / f"{name}.md"
    file.write_text(report + written_by_hand(file))


def written_by_hand(file):
    """The end of a report that is there already, empty if there is none."""
    text = file.read_text() if file.exists() else ""
    start = text.find(OTHER)
    return text[start:] if start >= 0 else ""


def command_of(arguments):
    """What makes the runs again, with as many seeds and steps as usual."""
    words = []
    if arguments.optimizer != FIRST:
        words.append(f"--optimizer={arguments.optimizer}")
    if arguments.first_seed != 1:
        words.append(f"--first-seed={arguments.first_seed}")
    if arguments.workers != WORKERS:
        words.append(f"--workers={arguments.workers}")
    if arguments.batch_factor != 1:
        words.append(f"--batch-factor={arguments.batch_factor}")
    if arguments.factors:
        words.append("--factors " + " ".join(f"{factor:g}" for factor in arguments.factors))
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
    add("--first-seed", type=int, default=1, help="[%(default)s]")
    add("--workers", type=int, default=WORKERS, help="[%(default)s]")
    add(
        "--factors",
        type=float,
        nargs="+",
        help="learning rates to try, as multiples of each example's",
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
    if any("--learning-rate" in text for text in [*arguments.both, *arguments.compressed]):
        parser.error("learning rates are tuned: --factors has those to try")
    return arguments


def main(words):
    arguments = parse_arguments(words)
    runs = Runs(arguments.runs, arguments.workers)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    comparisons = []
    for task in (TASKS[name] for name in arguments.examples):
        common, options = common_of(arguments, task), words_for(task, arguments.compressed)
        kind, factors = arguments.optimizer, factors_of(arguments)
        comparisons.append(Comparison(runs, task, kind, factors, seeds, common, options))
    write_report(arguments, comparisons)
    print(table(comparison.row() for comparison in comparisons))
    return 0 if all(comparison.interval.is_equivalent for comparison in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
