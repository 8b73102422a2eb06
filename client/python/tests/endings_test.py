"""Programs that fail on two ranks, under each launcher: they say why, and end with the code for it."""

import os
import re
import subprocess
import sys

import pytest
from signpost._program import start_private_aggregator

# Rank 1's model is another one. Trainers make torch.distributed's group behind init(); so does this.
PROGRAM = """
import signpost.torch as signpost, torch, torch.distributed as dist
signpost.init(join_timeout_s=30)
dist.init_process_group("gloo")
signpost.Adam(torch.nn.Linear(10, 3 + signpost.rank()).parameters())
"""
# Without a launcher a process is alone.
ALONE = """
import signpost.torch as signpost, torch
signpost.init()
signpost.Adam(torch.nn.Linear(10, 3).parameters(), resume="/nowhere")
"""
TOLD = r"FailedPreconditionError: .*tensor 0 is 'parameter 0 of group 0' \[[34], 10\] here but"
TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--nproc_per_node=2",
    "--master_port=0",
    "--rdzv_backend=c10d",
]
TORCHRUN += ["--rdzv_endpoint=127.0.0.1:0"]
ACCELERATE = [
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_processes=2",
    "--num_machines=1",
]
ACCELERATE += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
LAUNCHERS = {
    "signpost run": (["-m", "signpost", "run", "-n", "2", "--", sys.executable], PROGRAM, 76, TOLD),
    "torchrun": ([*TORCHRUN], PROGRAM, 1, TOLD),
    "accelerate launch": ([*ACCELERATE], PROGRAM, 1, TOLD),
    "python": ([], ALONE, 64, "NotFoundError: .*/nowhere"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_program_that_fails_says_why(launcher, tmp_path):
    launch, program, code, told = LAUNCHERS[launcher]
    script = tmp_path / "train.py"
    script.write_text(program)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["HF_HOME"] = str(tmp_path)
    environment["ACCELERATE_USE_CPU"] = "true"
    if launcher in ("torchrun", "accelerate launch"):
        environment["SIGNPOST_AGGREGATORS"] = start_private_aggregator()
        environment["SIGNPOST_JOB"] = "endings"
    ended = subprocess.run(
        [sys.executable, *launch, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        timeout=120,
    )
    print(ended.stdout)
    assert ended.returncode == code
    assert re.search(told, ended.stdout)
    assert "Traceback" in ended.stdout
