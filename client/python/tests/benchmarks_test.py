"""The benchmarks run; what they measure is for docs/measurements.md."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest
import signpost
import torch

PROGRAM = f"{os.path.dirname(signpost.__file__)}/signpost"
BENCHMARKS = "client/python/benchmarks"
PEERS = f"{BENCHMARKS}/peers.py"
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
MPIRUN += ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"]
MPIRUN += ["--mca", "mpi_yield_when_idle", "1", "--mca", "coll_tuned_use_dynamic_rules", "1"]
MPIRUN += ["--mca", "coll_tuned_allreduce_algorithm", "4"]


def output_of(*command):
    return subprocess.run(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def test_step_time_compares_with_pytorch():
    program = f"{BENCHMARKS}/step_time.py"
    output = output_of(program, "--tensors=2", "--width=64", "--steps=2")
    assert output.startswith("8192 parameters")
    assert output.count("OneBitAdam takes") == 2


def test_gpu_steps_compares_with_gloo():
    program = [sys.executable, f"{BENCHMARKS}/gpu_steps.py", "--device=cpu"]
    small = ["--parameters=10000", "--tensors=10", "--steps=2"]
    output = output_of("-m", "signpost", "run", "-n", "2", "--", *program, *small)
    assert "10000 parameters on cpu, 2 ranks" in output
    assert re.search(r"1-bit Adam is \d+\.\d times faster", output)
    assert re.search(r"all_reduce in one bit is \d+\.\d times faster", output)


def test_transport_measures_each_codec():
    output = output_of(f"{BENCHMARKS}/transport.py", "--elements=1000", "--exchanges=1")
    assert output.startswith("1000 elements")
    assert output.count("processor time of the worker") == 4


def may_make_namespaces():
    probe = f"signpost-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe]).returncode != 0:
        return False
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return True


def test_overlap_measures_both_stages():
    if not may_make_namespaces():
        pytest.skip("there may be no named network namespace here")
    small = ["--rounds=1", "--steps=1", "--batch=1", "--context=8", "--width=64", "--layers=1"]
    for processes in (1, 2):
        hosts = f"--processes={processes}"
        output = output_of(f"{BENCHMARKS}/overlap.py", *small, "--idle-ms=1", hosts)
        assert f"parameters, 2 hosts of {processes}, 1gbit" in output
        assert output.count("of the longer one") == 2


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def piped(command, environment):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # PyTorch 2.6 warns of its own enumerations when Python 3.13 imports it.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore::FutureWarning", **environment}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def over_gloo(command):
    """Two processes of this command, as ranks on loopback."""
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    return [piped(command, {**environment, "RANK": str(rank)}) for rank in range(2)]


def ask(processes, line):
    """Gives all of them the line, and returns what each answers."""
    for process in processes:
        process.stdin.write(line)
        process.stdin.flush()
    return [process.stdout.readline() for process in processes]


def seconds_in(answer):
    return [float(word) for word in answer.split()]


def converse(processes):
    """Holds the ranks to what `signpost bench exchange` expects of them."""
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * len(processes)
    for count in (1, 3):
        for answer in ask(processes, f"{count}\n"):
            assert len(seconds_in(answer)) == count
            assert min(seconds_in(answer)) > 0
    for process in processes:
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0


def test_the_program_knows_the_peers_that_there_are():
    named = []
    for command in ("exchange", "step"):
        flags = subprocess.run(
            [PROGRAM, "bench", command, "--help"], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        named += re.search(r"--peers ([\w|-]+),", flags)[1].split("|")
    choices = re.search(r"--peer \{([\w,-]+)\}", output_of(PEERS, "--help"))[1].split(",")
    assert sorted(named) == sorted(choices)


def test_peers_compute_with_as_many_threads_as_they_are_told_to():
    program = f"""
import sys
sys.path.append("{BENCHMARKS}")
import peers, torch
peers.over_gloo = lambda *_: print(torch.get_num_threads())
for threads in (["--threads=3"], []):
    sys.argv = ["peers.py", "--peer=gloo-fp32", "--parameters=1000", *threads]
    peers.main()
"""
    assert output_of("-c", program) == "3\n1\n"


@pytest.mark.parametrize(
    "peer, size",
    [
        ("gloo-fp32", ["--parameters=1000"]),
        ("gloo-adamw", ["--parameters=10"]),
        ("powersgd-1", ["--parameters=1000", "--tensors=3"]),
        ("powersgd-1", ["--parameters=10"]),
    ],
)
def test_peers_take_as_many_exchanges_as_they_are_asked_for(peer, size):
    converse(over_gloo([sys.executable, PEERS, f"--peer={peer}", *size]))


def test_peers_refuse_more_tensors_than_parameters():
    command = [sys.executable, PEERS, "--peer=gloo-adamw", "--parameters=10", "--tensors=11"]
    refused = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert refused.returncode == 2
    assert "10 parameters do not make 11 tensors" in refused.stderr


def test_a_peer_refuses_what_is_not_a_number():
    command = [sys.executable, PEERS, "--peer=gloo-fp32", "--parameters=1000"]
    for rank in over_gloo(command):
        _, errors = rank.communicate("ten\n", timeout=60)
        assert "wanted a number of exchanges" in errors
        assert rank.returncode == 1


# Each rank exchanges with each peer what the test made for it, and leaves what comes out of it.
EXCHANGE_FILE = f"""
import sys
sys.path.append("{BENCHMARKS}")
import peers, torch, torch.distributed as dist
peers.join_gloo()
directory = sys.argv[1]
for peer, values in torch.load(f"{{directory}}/{{dist.get_rank()}}").items():
    exchange = peers.OVER_GLOO[peer](values, 2)
    exchange.exchange()
    results = dict(values=exchange.values, parameters=getattr(exchange, "parameters", None))
    torch.save(results, f"{{directory}}/{{dist.get_rank()}} {{peer}}")
dist.barrier()
peers.leave_gloo()
"""


def random_values(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of_approximation_rank(rank):
    """For each process two matrices of 20 x 20, whose means over the processes have that rank, and 7
    more elements."""
    left, right = random_values(1, 2, 20, rank), random_values(2, 2, rank, 20)
    matrices = (left @ right).flatten()
    return [torch.cat([share * matrices, random_values(3 + share, 7)]) for share in (1, 3)]


DENSE = [random_values(1, 1000), random_values(2, 1000)]
# What each of two processes gives to a peer.
GIVEN = {
    "gloo-fp32": DENSE,
    "gloo-fp16": DENSE,
    "gloo-bf16": DENSE,
    "gloo-adamw": DENSE,
    "powersgd-1": of_approximation_rank(1),
    "powersgd-2": of_approximation_rank(2),
}


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    """For each peer, what comes out of it on each process."""
    directory = tmp_path_factory.mktemp("exchanged")
    for rank in range(2):
        torch.save({peer: values[rank] for peer, values in GIVEN.items()}, directory / str(rank))
    for process in over_gloo([sys.executable, "-c", EXCHANGE_FILE, str(directory)]):
        errors = process.communicate(timeout=60)[1]
        assert process.returncode == 0, errors
    return {peer: [torch.load(directory / f"{rank} {peer}") for rank in range(2)] for peer in GIVEN}


@pytest.mark.parametrize(
    "peer, rtol, atol",
    [
        ("gloo-fp32", 1e-6, 1e-6),
        ("gloo-fp16", 2e-3, 2e-3),
        ("gloo-bf16", 2e-2, 2e-2),
        ("powersgd-1", 1e-3, 1e-4),
        ("powersgd-2", 1e-3, 1e-4),
    ],
)
def test_peers_come_to_the_mean(exchanged, peer, rtol, atol):
    for results in exchanged[peer]:
        wanted = sum(GIVEN[peer]) / 2
        torch.testing.assert_close(results["values"], wanted, rtol=rtol, atol=atol)


def test_the_peer_with_an_optimizer_steps_with_the_mean(exchanged):
    for results in exchanged["gloo-adamw"]:
        assert len(results["parameters"]) == 2
        # Adam's first step from zero, whatever the gradient: the learning rate, against its sign.
        stepped = torch.cat(results["parameters"]).detach()
        torch.testing.assert_close(stepped, -1e-3 * torch.sign(sum(DENSE)))


def mpi_is_missing():
    if os.environ.get("CI"):
        return False  # then its tests fail
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        return True
    return shutil.which("mpirun") is None


needs_mpi = pytest.mark.skipif(mpi_is_missing(), reason="needs openmpi-bin and python3-mpi4py")
MPI_PEER = [sys.executable, PEERS, "--peer=mpi", "--parameters=1000"]


@needs_mpi
def test_mpi_takes_as_many_exchanges_as_it_is_asked_for():
    converse([piped([*MPIRUN, *MPI_PEER], {})])


@needs_mpi
def test_mpi_comes_to_the_mean():
    program = f"""
import sys
sys.path.append("{BENCHMARKS}")
import peers, torch
mpi = peers.Mpi()
mpi.values = torch.tensor([1.0, 4.0]) if mpi.rank == 0 else torch.tensor([2.0, -8.0])
mpi.exchange()
print(mpi.values.tolist())
"""
    assert output_of_mpi([sys.executable, "-c", program]) == "[1.5, -2.0]\n" * 2


def output_of_mpi(command):
    return subprocess.run([*MPIRUN, *command], stdout=subprocess.PIPE, text=True, check=True).stdout


@needs_mpi
@pytest.mark.parametrize("links", [[], ["--netns=1gbit"]], ids=["loopback", "links"])
def test_the_program_measures_peers_in_turns_with_itself(links, tmp_path):
    if links and not may_make_namespaces():
        pytest.skip("there may be no named network namespace here")
    few = ["--workers=2", "--aggregators=1", "--parameters=20000", "--turns=1", "--exchanges=1"]
    peers = ["--what=mean", "--peers=gloo-fp32,mpi"]
    written = tmp_path / "figures.json"
    python = f"--python={sys.executable}"
    command = [PROGRAM, "bench", "exchange", *few, *peers, *links, python, f"--json={written}"]
    directory = tmp_path / "tmp"
    directory.mkdir()
    environment = {**os.environ, "TMPDIR": str(directory)}
    subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=True)
    assert list(directory.iterdir()) == []  # mpirun's included
    figures = json.loads(written.read_text())["figures"]
    assert [figure["name"] for figure in figures][1:] == ["gloo-fp32", "mpi"]
    assert figures[0]["peer"] == "gloo-fp32"
    assert {figure["peer"] for figure in figures[1:]} == {"gradients to mean, one-bit"}
    product = figures[0]["times_faster"] * figures[1]["times_faster"]  # of one turn
    assert product == pytest.approx(1)
    assert min(figure["value"] for figure in figures) > 0


def test_the_mpi_peer_says_what_is_missing(tmp_path):
    alone = subprocess.run(MPI_PEER, stderr=subprocess.PIPE, text=True)
    assert alone.returncode == 1
    assert "mpirun" in alone.stderr and "apt-get install openmpi-bin" in alone.stderr
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')")
    environment = {**os.environ, "OMPI_COMM_WORLD_SIZE": "2", "PYTHONPATH": str(tmp_path)}
    without = subprocess.run(MPI_PEER, stderr=subprocess.PIPE, text=True, env=environment)
    assert without.returncode == 1
    assert "apt-get install python3-mpi4py" in without.stderr
