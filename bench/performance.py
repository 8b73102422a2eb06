"""Measures what docs/performance.md shows, and writes it: tables, and plots beside it.

    bazel run //bench:performance                     # as root: links are network namespaces

Each run of `signpost bench` is kept as a file, and not made again with the same program: an
interrupted suite goes on.
"""

import argparse
import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure

PROGRAM = Path("client/python/package/signpost/signpost").absolute()  # Bazel starts it beside it
ROOT = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
RATES = {"100mbit": 0.1, "1gbit": 1, "10gbit": 10, "": None}  # Gbit/s
RATE_PARAMETERS = 25_000_000
PARAMETERS = [1_000_000, 5_000_000, 25_000_000, 100_000_000, 340_000_000]
WORKERS = [1, 2, 4, 8]
WORKERS_PARAMETERS = 10_000_000
PEERS = {
    "gloo-fp32": "DDP's all-reduce over Gloo, fp32",
    "gloo-fp16": "DDP's all-reduce over Gloo, fp16",
    "gloo-bf16": "DDP's all-reduce over Gloo, bf16",
    "powersgd-1": "DDP's PowerSGD hook, rank 1",
    "powersgd-2": "DDP's PowerSGD hook, rank 2",
    "mpi": "Open MPI's all-reduce (a ring), fp32",
}
PEERS_PARAMETERS = 25_000_000
LARGEST_PARAMETERS = 340_000_000
LARGEST_OF_PEERS = 100_000_000
WARM_UP_SHARES = [0, 0.05, 0.1, 0.15, 0.25, 1]


class Runs:
    """Runs of the program, by their arguments."""

    def __init__(self, directory):
        program = hashlib.sha256(PROGRAM.read_bytes()).hexdigest()[:16]
        self._directory = directory / program
        self._directory.mkdir(parents=True, exist_ok=True)

    def figures(self, *arguments):
        """By name, each with its row's fields."""
        file = self._directory / ("_".join(arguments).replace("--", "") + ".json")
        if not file.exists():
            print("signpost bench", *arguments, flush=True)
            partial = file.with_suffix(".partial")
            command = [PROGRAM, "bench", *arguments, f"--json={partial}"]
            if any(argument.startswith("--peers=") for argument in arguments):
                command.append(f"--python={sys.executable}")  # which has PyTorch
            subprocess.run(command, check=True)
            partial.rename(file)
        rows = json.loads(file.read_text())["figures"]
        return {f"{row['name']}, {row['unit']}": row for row in rows}

    def dates(self):
        """When they were made: the first day, and the last one if it is another."""
        times = [file.stat().st_mtime for file in self._directory.glob("*.json")]
        days = [datetime.date.fromtimestamp(time).isoformat() for time in (min(times), max(times))]
        return " to ".join(dict.fromkeys(days))


def links(rate):
    return [f"--netns={rate}"] if rate else ["--aggregators=2"]


def turns(count, exchanges):
    """Of several exchanges: a turn follows the peer's, and the first after such a pause is slower."""
    return [f"--turns={count}", f"--exchanges={exchanges}"]


def name_of(rate):
    return f"{RATES[rate]:g} Gbit/s" if rate else "none (loopback)"


def milliseconds(row):
    value = 1000 * row["value"]
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def of_bound(row):
    """How many times the bound it takes."""
    return f"{1 / row['of_bound']:.2f}" if "of_bound" in row else ""


def times(row):
    return f"{row['times_faster']:.1f}×"


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def count(number):
    return f"{number / 1e6:g}M"


def plot(file, title, x_label, series, x_names, y_label="seconds", y_scale="log"):
    """Lines over equal distances of x, with the names below them."""
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    places = range(len(x_names))
    for label, y in series.items():
        axes.plot(places, y, marker="o", label=label)
    axes.set_yscale(y_scale)
    if y_scale == "linear":
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks(places, x_names)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    legend = axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=2)
    figure.savefig(file, dpi=110, bbox_extra_artists=[legend], bbox_inches="tight")


RATE_NAMES = [f"{rate:g}" if rate else "no limit" for rate in RATES.values()]
RATE_LABEL = "Gbit/s of each host's link"


def against_rates(runs, output):
    """Steps, and how much faster they are than the peer's."""
    size = f"--parameters={RATE_PARAMETERS}"
    rows, ours, dense, gloo = [], [], [], []
    for rate in RATES:
        few = turns(3, 2 if rate == "100mbit" else 5)
        found = runs.figures("step", *links(rate), size, "--peers=gloo-adamw", *few)
        ours.append(found["optimizer step, one-bit, s"])
        gloo.append(found["gloo-adamw, s"])
        found = runs.figures("step", *links(rate), size, "--codec=fp32", *few)
        dense.append(found["optimizer step, fp32, s"])
        rows.append(
            [name_of(rate), milliseconds(ours[-1]), of_bound(ours[-1]), milliseconds(dense[-1])]
            + [of_bound(dense[-1]), milliseconds(gloo[-1]), times(ours[-1])]
        )
    plot(
        output / "performance-rates.png",
        f"A step of {count(RATE_PARAMETERS)} parameters, 4 workers",
        RATE_LABEL,
        {
            "DDP's all-reduce (Gloo) + AdamW": [row["value"] for row in gloo],
            "Signpost, fp32": [row["value"] for row in dense],
            "Signpost, one-bit": [row["value"] for row in ours],
        },
        RATE_NAMES,
    )
    plot(
        output / "performance-speedup.png",
        f"How many times faster a step is than with DDP's all-reduce (Gloo) + AdamW,\n"
        f"{count(RATE_PARAMETERS)} parameters, 4 workers",
        RATE_LABEL,
        {
            "Signpost, one-bit": [row["times_faster"] for row in ours],
            "Signpost, fp32": [a["value"] / b["value"] for a, b in zip(gloo, dense)],
        },
        RATE_NAMES,
        "times faster",
    )
    head = ["link", "one-bit, ms", "times the bound", "fp32, ms", "times the bound"]
    return table([*head, "Gloo fp32 + AdamW, ms", "one-bit is faster"], rows)


def exchanges_against_rates(runs, output):
    rows, found = [], []
    for rate in RATES:
        size = f"--parameters={RATE_PARAMETERS}"
        few = turns(3, 2 if rate == "100mbit" else 10)
        found.append(runs.figures("exchange", *links(rate), size, "--peers=gloo-fp32", *few))
        rows.append(exchange_row(name_of(rate), found[-1]))
    title = f"An exchange of {count(RATE_PARAMETERS)} parameters, 4 workers"
    file = output / "performance-exchange-rates.png"
    plot_exchanges(file, title, RATE_LABEL, RATE_NAMES, found)
    return table(["link", *EXCHANGE_HEAD], rows)


def exchange_row(label, figures):
    frames = figures["packed frames, one-bit, s"]
    processors = figures["packed frames, one-bit: processor time, s/GB"]
    mean = figures["gradients to mean, one-bit, s"]
    gloo = figures["gloo-fp32, s"]
    row = [label, milliseconds(frames), of_bound(frames), times(frames)]
    row += [f"{processors['value']:.1f}", milliseconds(mean), of_bound(mean), times(mean)]
    return [*row, milliseconds(gloo)]


EXCHANGE_HEAD = ["packed frames, ms", "times the bound", "faster than Gloo", "processor time, s/GB"]
EXCHANGE_HEAD += ["gradients to mean, ms", "times the bound", "faster than Gloo", "Gloo fp32, ms"]


def against_parameters(runs, output):
    rows, exchanges, steps = [], [], []
    for parameters in PARAMETERS:
        few = turns(3, 10 if parameters < 100_000_000 else 5)
        if parameters > 100_000_000:
            few = turns(2, 2)
        size = ["--netns=1gbit", f"--parameters={parameters}"]
        exchanges.append(runs.figures("exchange", *size, "--peers=gloo-fp32", *few))
        # The peer's parameters, gradients, moments and buckets of the largest do not fit beside ours.
        peers = ["--peers=gloo-adamw"] if parameters <= LARGEST_OF_PEERS else []
        steps.append(runs.figures("step", *size, *peers, *few))
        rows.append(exchange_row(count(parameters), exchanges[-1]) + step_cells(steps[-1]))
    names = [count(parameters) for parameters in PARAMETERS]
    plot_against(output, "parameters", "4 workers", names, exchanges, steps)
    return table(["parameters", *EXCHANGE_HEAD, *STEP_HEAD], rows)


def against_workers(runs, output):
    rows, exchanges, steps = [], [], []
    for workers in WORKERS:
        size = ["--netns=1gbit", f"--workers={workers}", f"--parameters={WORKERS_PARAMETERS}"]
        few = turns(3, 10)
        exchanges.append(runs.figures("exchange", *size, "--peers=gloo-fp32", *few))
        steps.append(runs.figures("step", *size, "--peers=gloo-adamw", *few))
        rows.append(exchange_row(str(workers), exchanges[-1]) + step_cells(steps[-1]))
    names = [str(workers) for workers in WORKERS]
    parameters = f"{count(WORKERS_PARAMETERS)} parameters"
    plot_against(output, "workers", parameters, names, exchanges, steps)
    return table(["workers", *EXCHANGE_HEAD, *STEP_HEAD], rows)


def step_cells(figures):
    step = figures["optimizer step, one-bit, s"]
    return [milliseconds(step), times(step) if "times_faster" in step else "does not fit"]


STEP_HEAD = ["step, ms", "faster than Gloo + AdamW"]


def plot_against(output, what, same, names, exchanges, steps):
    """Exchanges, and how much faster steps are, against what is different among them."""
    plot_exchanges(
        output / f"performance-{what}.png",
        f"An exchange at 1 Gbit/s, {same}",
        what,
        names,
        exchanges,
    )
    rows = [figures["optimizer step, one-bit, s"] for figures in steps]
    plot(
        output / f"performance-{what}-speedup.png",
        f"How many times faster a step is than with DDP's all-reduce (Gloo) + AdamW,\n"
        f"1 Gbit/s, {same}",
        what,
        {"Signpost, one-bit": [row.get("times_faster", float("nan")) for row in rows]},
        names,
        "times faster",
        "linear",
    )


def with_a_core_each(runs):
    """Links as slow as cores are few: 1 Gbit/s, in slow motion, of hosts that have one each."""
    rows = []
    sizes = [(RATE_PARAMETERS, workers) for workers in WORKERS] + [(100_000_000, 4)]
    for parameters, workers in sizes:
        mbit = min(1000, 1000 * os.cpu_count() // (2 * workers))
        size = [f"--workers={workers}", f"--parameters={parameters}"]
        few = ["--what=mean", *turns(3, 5)]
        found = runs.figures("exchange", f"--netns={mbit}mbit", *size, *few)
        mean = found["gradients to mean, one-bit, s"]
        played = runs.figures("scale", f"--link={mbit}mbit", "--cores=1", *size)
        played = played["exchange, one-bit, s"]
        ratio = f"{mean['value'] / played['value']:.2f}"
        rows.append([count(parameters), str(workers), f"{mbit} Mbit/s", milliseconds(mean)])
        rows[-1] += [of_bound(mean), milliseconds(played), ratio]
    head = ["parameters", "workers", "link", "gradients to mean, ms", "times the bound"]
    return table([*head, "as played, ms", "measured by played"], rows)


def against_peers(runs):
    peers = [peer for peer in PEERS if peer != "mpi" or shutil.which("mpirun")]
    if len(peers) < len(PEERS):
        print("performance.py: there is no mpirun, so Open MPI is left out", file=sys.stderr)
    few = [f"--parameters={PEERS_PARAMETERS}", *turns(3, 5)]
    found = runs.figures("exchange", "--netns=1gbit", f"--peers={','.join(peers)}", *few)
    frames = found["packed frames, one-bit, s"]
    mean = found["gradients to mean, one-bit, s"]
    rows = [["Signpost, packed frames", milliseconds(frames), "", ""]]
    rows += [["Signpost, gradients to mean", milliseconds(mean), "", ""]]
    for peer in peers:
        row = found[f"{peer}, s"]
        faster = [f"{row['value'] / ours['value']:.1f}×" for ours in (frames, mean)]
        rows.append([PEERS[peer], milliseconds(row), *faster])
    head = ["exchange", "ms", "packed frames are faster", "gradients to mean are faster"]
    return table(head, rows)


def of_the_largest(runs):
    size = [f"--parameters={LARGEST_PARAMETERS}", *turns(3, 2)]
    rows = []
    for rate in ("1gbit", ""):
        links_of = [f"--netns={rate}"] if rate else ["--aggregators=2"]
        found = runs.figures("step", *links_of, *size)
        step = found["optimizer step, one-bit, s"]
        memory = found["optimizer step, one-bit: memory of all, GB"]
        hosts = "4 + 4" if rate else "4 + 2"
        rows.append([name_of(rate), hosts, milliseconds(step), of_bound(step)])
        rows[-1].append(f"{memory['value']:.2f}")
    head = ["link", "workers + aggregators", "one-bit, ms", "times the bound"]
    return table([*head, "memory, GB"], rows)


def plot_exchanges(file, title, x_label, x_names, found):
    names = {
        "Gloo, fp32": "gloo-fp32, s",
        "Signpost, gradients to mean, one-bit": "gradients to mean, one-bit, s",
        "Signpost, packed frames, one-bit": "packed frames, one-bit, s",
    }
    series = {label: [row[name]["value"] for row in found] for label, name in names.items()}
    frames = [row["packed frames, one-bit, s"] for row in found]
    series["the bound"] = [row.get("bound", float("nan")) for row in frames]
    plot(file, title, x_label, series, x_names)


def against_memory(runs):
    rows = runs.figures("kernels")
    kernels = [row for row in rows.values() if row["unit"] == "GB/s"]
    return table(
        ["kernel", "GB/s", "Gelem/s", "of read-modify-write", "of the same reads and writes"],
        [
            [row["name"], f"{row['value']:.1f}", f"{rows[row['name'] + ', Gelem/s']['value']:.2f}"]
            + [f"{100 * row['of_bound']:.0f}%", f"{100 * row['times_faster']:.0f}%"]
            for row in kernels
        ],
    )


def volumes():
    bits = 1 + 32 / 4096
    head = ["share of warm-up", *(f"{share:.0%}" for share in WARM_UP_SHARES)]
    rows = [
        [
            f"times less than {of} gradients",
            *(f"{1 / (w + (1 - w) * bits / width):.1f}" for w in WARM_UP_SHARES),
        ]
        for of, width in (("fp32", 32), ("fp16", 16))
    ]
    return table(head, rows)


def processor():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "?")


def enter_own_network():
    """Goes on in a network namespace, where TCP's congestion control is Linux's default."""
    if "SIGNPOST_OWN_NETWORK" in os.environ:
        return
    os.environ["SIGNPOST_OWN_NETWORK"] = "1"
    script = """ip link set lo up
    echo cubic >/proc/sys/net/ipv4/tcp_congestion_control || {
      echo "performance.py: this kernel does not let network namespaces choose cubic. To let them: sysctl \\
-w net.ipv4.tcp_allowed_congestion_control=\\"\\$(sysctl -n net.ipv4.tcp_allowed_congestion_control) cubic\\"" >&2
      exit 1
    }
    exec "$0" "$@"
    """
    command = ["sh", "-c", script, sys.executable, *sys.argv]
    os.execvp("unshare", ["unshare", "--net", *command])


def write(runs, output):
    report = Path("bench/performance.md.in").read_text()
    report = report.replace("@RATES@", against_rates(runs, output))
    report = report.replace("@EXCHANGE_RATES@", exchanges_against_rates(runs, output))
    report = report.replace("@PARAMETERS@", against_parameters(runs, output))
    report = report.replace("@WORKERS@", against_workers(runs, output))
    report = report.replace("@CORE_EACH@", with_a_core_each(runs))
    report = report.replace("@PEERS@", against_peers(runs))
    report = report.replace("@LARGEST@", of_the_largest(runs))
    report = report.replace("@KERNELS@", against_memory(runs))
    report = report.replace("@VOLUMES@", volumes())
    machine = f"{os.cpu_count()} cores of an {processor()}"
    report = report.replace("@MACHINE@", f"{runs.dates()}; {machine}")
    (output / "performance.md").write_text(report)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("/tmp/signpost-performance"))
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("performance.py: links of a rate are network namespaces, which need root")
    enter_own_network()
    output = ROOT / "docs"
    write(Runs(arguments.runs), output)
    print(f"written: {output / 'performance.md'}")


if __name__ == "__main__":
    main()
