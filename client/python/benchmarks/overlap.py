"""Times steps with and without overlap, on two hosts that a 1 Gbit/s Ethernet joins.

    python3 overlap.py      # as root: each host is a network namespace, with a worker and a shard

Each worker trains a transformer, or with `--processes` so many processes of its host do, which share
one exchange (`shard_mesh`). In turns it computes gradients only, exchanges only, does the one after the other, and
does both at once. With overlap a step should take as long as the longer of computing and
exchanging. `--idle-ms` waits in the backward pass, as for an accelerator: otherwise the exchange's
own computing takes the cores from the model's, unless there are enough of them.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import signpost.torch as signpost
import torch
from torch.distributed.device_mesh import init_device_mesh

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import language_model  # noqa: E402

HOSTS = 2
PORT = 4000
SIGNPOST = [sys.executable, "-m", "signpost"]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rate", default="1gbit", help="of the link, in each direction, as tc has it")
    add("--processes", type=int, default=1, help="of each host, which share one exchange")
    add("--batch", type=int, default=16, help="windows of text per worker and step")
    add("--context", type=int, default=64)
    add("--width", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--rounds", type=int, default=8, help="turns of each way")
    add("--steps", type=int, default=5, help="in a turn")
    add("--idle-ms", type=float, default=0, help="wait so long in each layer's backward pass")
    return parser.parse_args()


class Idle(torch.autograd.Function):
    """The identity, whose backward pass waits."""

    @staticmethod
    def forward(context, x, seconds):
        context.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        time.sleep(context.seconds)
        return gradient, None


class Training:
    """One worker's model and optimizer in one stage, and the ways to take its steps."""

    def __init__(self, arguments, freeze_step, meshes):
        torch.manual_seed(1)
        self.model = language_model.Transformer(
            language_model.BYTES, arguments.context, arguments.width, arguments.layers
        )
        if arguments.idle_ms > 0:
            for layer in self.model.layers.layers:
                layer.register_forward_hook(
                    lambda _, __, output: Idle.apply(output, arguments.idle_ms / 1000)
                )
        parameters = self.model.parameters()
        if freeze_step is None:
            self.optimizer = signpost.Adam(parameters, lr=1e-4, overlap=True, **meshes)
        else:
            self.optimizer = signpost.OneBitAdam(
                parameters, lr=1e-4, freeze_step=freeze_step, overlap=True, **meshes
            )
        self.inputs = torch.randint(256, (arguments.batch, arguments.context + 1))

    def backward(self):
        self.optimizer.zero_grad(set_to_none=True)
        inputs, targets = self.inputs[:, :-1], self.inputs[:, 1:]
        language_model.loss_of(self.model, inputs, targets).backward()

    def compute(self):
        with self.optimizer.no_sync():
            self.backward()

    def exchange(self):
        self.optimizer.step()

    def one_after_the_other(self):
        self.compute()
        self.optimizer.step()

    def both_at_once(self):
        self.backward()
        self.optimizer.step()


STAGES = {"fp32": None, "one-bit": 1}  # the freeze step
WAYS = ["compute", "exchange", "one_after_the_other", "both_at_once"]


def work(arguments):
    """What each worker does."""
    signpost.init(exchange_timeout_s=120)
    meshes = {}
    if arguments.processes > 1:
        torch.distributed.init_process_group("gloo")
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (HOSTS, arguments.processes), mesh_dim_names=names)
        meshes = {"replicate_mesh": mesh["replicate"], "shard_mesh": mesh["shard"]}
    stages = {name: Training(arguments, step, meshes) for name, step in STAGES.items()}
    times = {(stage, way): [] for stage in stages for way in WAYS}
    blocked = {(stage, way): [] for stage in stages for way in WAYS}
    for turn in range(1 + arguments.rounds):  # the first does not count
        for stage, training in stages.items():
            for way in WAYS:
                training.exchange()  # both workers begin at once
                for _ in range(arguments.steps):
                    start = time.perf_counter()
                    getattr(training, way)()
                    if turn > 0:
                        times[stage, way].append(time.perf_counter() - start)
                        report = training.optimizer.report
                        blocked[stage, way].append(report.wire_s + report.wait_s)
    if signpost.rank() != 0:
        return
    elements = sum(p.numel() for p in stages["fp32"].model.parameters())
    who = f"{HOSTS} hosts of {arguments.processes}"
    print(f"{elements} parameters, {who}, {arguments.rate}; ms, medians of steps")
    for stage in stages:
        compute, exchange, one_after, both = (
            1000 * statistics.median(times[stage, way]) for way in WAYS
        )
        print(
            f"{stage:8} compute {compute:6.1f}  exchange {exchange:6.1f}  one after the other "
            f"{one_after:6.1f}  both at once {both:6.1f}, {both / max(compute, exchange):.2f} of "
            "the longer one",
            flush=True,
        )
        one_after, both = (1000 * statistics.median(blocked[stage, way]) for way in WAYS[2:])
        print(
            f"{'':8} of that blocked by the network or the other worker: {one_after:.1f}, {both:.1f}"
        )


def address(host):
    return f"10.77.0.{1 + host}"


def namespace(host):
    return f"signpost-overlap-{os.getpid()}-{host}"


def shell(command):
    path = f"{os.environ.get('PATH', '/usr/bin')}:/usr/sbin:/sbin"  # where tc is
    subprocess.run(command.split(), check=True, env={**os.environ, "PATH": path})


def connect_hosts(rate):
    for host in range(HOSTS):
        shell(f"ip netns add {namespace(host)}")
    ends = [f"name overlap{host} netns {namespace(host)}" for host in range(HOSTS)]
    shell(f"ip link add {ends[0]} type veth peer {ends[1]}")
    for host in range(HOSTS):
        inside = f"ip netns exec {namespace(host)}"
        shell(f"{inside} ip address add {address(host)}/24 dev overlap{host}")
        shell(f"{inside} ip link set overlap{host} up")
        shell(f"{inside} ip link set lo up")
        tbf = f"tbf rate {rate} burst 256kb latency 50ms"
        shell(f"{inside} tc qdisc add dev overlap{host} root {tbf}")


def main():
    arguments = parse_arguments()
    if "SIGNPOST_RANK" in os.environ:
        return work(arguments)
    processes = []
    try:
        connect_hosts(arguments.rate)
        targets = [f"{address(host)}:{PORT}" for host in range(HOSTS)]
        # The namespaces are this machine's own.
        environment = {**os.environ, "SIGNPOST_INSECURE_I_UNDERSTAND": "1"}
        for host, target in enumerate(targets):
            inside = ["ip", "netns", "exec", namespace(host)]
            shard = ["aggregator", "--listen", target, "--shard", f"{host}/{HOSTS}"]
            processes.append(subprocess.Popen([*inside, *SIGNPOST, *shard], env=environment))
        ranks = []
        for host in range(HOSTS):
            inside = ["ip", "netns", "exec", namespace(host)]
            for process in range(arguments.processes):
                rank = str(host * arguments.processes + process)
                size = str(HOSTS * arguments.processes)
                rank = {
                    "OMP_NUM_THREADS": "1",
                    **environment,
                    "SIGNPOST_AGGREGATORS": ",".join(targets),
                    "SIGNPOST_JOB": "overlap",
                    "SIGNPOST_RANK": rank,
                    "SIGNPOST_WORLD_SIZE": size,
                    "RANK": rank,
                    "WORLD_SIZE": size,
                    "MASTER_ADDR": address(0),
                    "MASTER_PORT": str(PORT + 1),
                    "GLOO_SOCKET_IFNAME": f"overlap{host}",
                    "USE_LIBUV": "0",
                }
                ranks.append(subprocess.Popen([*inside, sys.executable, *sys.argv], env=rank))
        processes += ranks
        codes = [rank.wait() for rank in ranks]
        sys.exit(max(codes))
    finally:
        for process in reversed(processes):  # ranks before aggregators
            process.terminate()
            process.wait()
        for host in range(HOSTS):
            subprocess.run(["ip", "netns", "delete", namespace(host)])


if __name__ == "__main__":
    main()
