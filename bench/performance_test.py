"""That performance.py makes its report of what the program prints: from small runs, without links."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, "bench")
import performance  # noqa: E402

# What of a run's arguments makes it long, or takes root.
LONG = ("--netns=", "--aggregators=", "--parameters=", "--workers=", "--turns=", "--exchanges=")


class SmallRuns(performance.Runs):
    def figures(self, what, *arguments):
        if what == "scale":  # plays its hosts
            return super().figures(what, *arguments)
        if what == "kernels":
            return super().figures(what, "--elements=65536", "--rounds=1")
        kept = [argument for argument in arguments if not argument.startswith(LONG)]
        small = ["--workers=2", "--parameters=50000", "--turns=1", "--exchanges=1"]
        return super().figures(what, *kept, *small)


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    directory = tmp_path_factory.mktemp("docs")
    performance.write(SmallRuns(tmp_path_factory.mktemp("runs")), directory)
    return directory


def sections(output):
    """What stands below each heading."""
    report = (output / "performance.md").read_text()
    parts = [part.partition("\n") for part in report.split("\n## ")]
    return {head: body for head, _, body in parts}


def rows_of(section):
    """Of its table, a list of cells each, below the head."""
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_table_has_its_rows(output):
    rows = {head: rows_of(body) for head, body in sections(output).items()}
    assert [row[0] for row in rows["Steps against the rate of the links"]] == [
        "0.1 Gbit/s",
        "1 Gbit/s",
        "10 Gbit/s",
        "none (loopback)",
    ]
    assert len(rows["Exchanges against the rate of the links"]) == 4
    assert [row[0] for row in rows["Against the number of parameters"]] == [
        "1M",
        "5M",
        "25M",
        "100M",
        "340M",
    ]
    assert [row[0] for row in rows["Against the number of workers"]] == ["1", "2", "4", "8"]
    assert len(rows["Exchanges of hosts with a core each"]) == 5
    assert len(rows["Exchanges against what else there is"]) == 2 + len(performance.PEERS)
    assert [row[1] for row in rows["The largest model"]] == ["4 + 4", "4 + 2"]
    assert len(rows["Kernels"]) > 20
    assert len(rows["Volume of a whole run"]) == 2


def test_every_cell_that_can_be_known_is_a_figure(output):
    for head, body in sections(output).items():
        for row in rows_of(body):
            # What is played has no bound, and a peer has nothing that it is faster than.
            known = [cell for cell in row[1:] if cell and cell != "does not fit"]
            assert all(any(c.isdigit() for c in cell) for cell in known), f"{head}: {row}"
            assert known, f"{head}: {row}"


def test_volumes_are_those_of_the_formula(output):
    fp32, fp16 = rows_of(sections(output)["Volume of a whole run"])
    assert fp32[1:3] == ["31.8", "12.5"]  # 1 / b, 1 / (0.05 + 0.95 b); b = (1 + 32/4096) / 32
    assert fp16[1] == "15.9"
    assert fp32[-1] == fp16[-1] == "1.0"


def test_every_plot_that_is_shown_was_drawn(output):
    report = (output / "performance.md").read_text()
    shown = {part.partition(")")[0] for part in report.split("](") if ".png)" in part}
    drawn = {file.name for file in output.glob("*.png")}
    assert shown == drawn and len(shown) == 7
    assert all((output / name).read_bytes().startswith(b"\x89PNG") for name in drawn)


def test_nothing_is_left_of_the_template(output):
    text = (output / "performance.md").read_text()
    for line in Path("bench/performance.md.in").read_text().splitlines():
        if line.startswith("@"):
            assert line not in text


def test_a_run_that_is_there_is_not_made_again(output, tmp_path, monkeypatch):
    runs = performance.Runs(tmp_path)
    first = runs.figures("kernels", "--elements=65536", "--rounds=1")
    monkeypatch.setattr(performance.subprocess, "run", None)
    assert runs.figures("kernels", "--elements=65536", "--rounds=1") == first


class ToldRuns:
    """Runs that were never made: their rows by name, and what was asked for."""

    def __init__(self, values):
        self.asked = []
        self._values = values

    def figures(self, *arguments):
        self.asked.append(arguments)
        return {name: {"value": value} for name, value in self._values.items()}


def test_a_bound_is_reached_as_many_times_as_it_takes_longer():
    assert performance.of_bound({"of_bound": 0.4}) == "2.50"
    assert performance.of_bound({}) == ""


def test_peers_are_slower_by_what_they_take_longer(monkeypatch):
    monkeypatch.setattr(performance.shutil, "which", lambda _: None)  # no mpirun
    values = {"packed frames, one-bit, s": 0.2, "gradients to mean, one-bit, s": 0.4}
    runs = ToldRuns({**values, **{f"{peer}, s": 1 for peer in performance.PEERS}})
    rows = rows_of(performance.against_peers(runs))
    assert rows[0] == ["Signpost, packed frames", "200", "", ""]
    all_but_mpi = len(performance.PEERS) - 1
    assert [row[1:] for row in rows[2:]] == [["1,000", "5.0×", "2.5×"]] * all_but_mpi


def test_hosts_with_a_core_each_have_links_slower_by_the_cores_they_lack(monkeypatch):
    monkeypatch.setattr(performance.os, "cpu_count", lambda: 2)
    names = ("gradients to mean, one-bit, s", "exchange, one-bit, s")
    runs = ToldRuns(dict(zip(names, (0.3, 0.2))))
    rows = rows_of(performance.with_a_core_each(runs))
    # Each worker makes two hosts, of which the two cores are enough for one worker's at 1 Gbit/s.
    assert [int(row[2].split()[0]) for row in rows] == [1000, 500, 250, 125, 250]
    measured = [arguments[1] for arguments in runs.asked if arguments[0] == "exchange"]
    played = [arguments[1] for arguments in runs.asked if arguments[0] == "scale"]
    mbits = [row[2].split()[0] for row in rows]
    assert measured == [f"--netns={mbit}mbit" for mbit in mbits]
    assert played == [f"--link={mbit}mbit" for mbit in mbits]
    assert all(row[3:] == ["300", "", "200", "1.50"] for row in rows)
    monkeypatch.setattr(performance.os, "cpu_count", lambda: 16)
    assert rows_of(performance.with_a_core_each(runs))[3][2] == "1000 Mbit/s"
