"""Jobs of several ranks, as `signpost run` and torchrun start them."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

JOB = str(Path(__file__).with_name("job.py"))
TWO_TENSORS = "client/examples/two_tensors"
SIGNPOST = [sys.executable, "-m", "signpost"]


def run(workers, aggregators, *command, options=()):
    """The exit code and all output of `signpost run`."""
    launch = [*SIGNPOST, "run", "-n", str(workers), "--aggregators", str(aggregators)]
    launch += [*options, "--"]
    # One thread each: this machine may have fewer cores than ranks.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*launch, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    print(ended.stdout)
    return ended.returncode, ended.stdout


def run_job(workers, aggregators, *arguments, options=()):
    return run(workers, aggregators, sys.executable, JOB, *arguments, options=options)


each_kind = pytest.mark.parametrize("kind", ["one_bit_adam", "one_bit_lamb", "zero_one_adam"])


def digest_of(output, workers):
    """The checksum of the parameters that all ranks have said that they end with."""
    digests = re.findall(r"parameters ([0-9a-f]{8})", output)
    assert len(digests) == workers and len(set(digests)) == 1
    return digests[0]


def test_adam_on_all_ranks_is_adamw_on_the_mean_of_their_gradients():
    code, output = run_job(4, 2, "average")
    assert code == 0
    digest_of(output, 4)


def test_all_reduce_gives_all_ranks_the_bytes_of_their_mean():
    code, output = run_job(3, 2, "reduce")
    assert code == 0
    digest_of(output, 3)


def test_one_bit_rounds_have_the_bits_of_a_program_in_c():
    _, in_c = run(4, 2, TWO_TENSORS)
    _, in_python = run_job(4, 2, "two_tensors")
    assert digest_of(in_python, 4) == digest_of(in_c, 4)


@pytest.mark.parametrize("workers", [1, 2])
def test_one_bit_adam_steps_as_deepspeeds(workers):
    code, output = run_job(workers, 1, "as_deepspeed")
    assert code == 0
    digest_of(output, workers)


@each_kind
def test_a_job_that_is_killed_and_resumes_has_the_bits_of_one_that_is_not(tmp_path, kind):
    _, output = run_job(2, 2, "train", kind)
    wanted = digest_of(output, 2)
    directory = str(tmp_path / "checkpoints")
    code, _ = run_job(2, 2, "train", kind, directory, "25")
    assert code == 128 + 9
    _, output = run_job(2, 3, "train", kind, directory)
    assert output.count("goes on from step 21") == 2
    assert digest_of(output, 2) == wanted


@each_kind
def test_a_job_goes_on_from_what_its_ranks_have_saved_in_their_own_files(tmp_path, kind):
    _, output = run_job(3, 2, "saves_alone", str(tmp_path), kind)
    wanted = digest_of(output, 3)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank-0", "rank-1", "rank-2"]
    _, output = run_job(3, 1, "goes_on_from_file", str(tmp_path), kind)
    assert digest_of(output, 3) == wanted


def test_a_rank_with_the_state_of_another_is_told_so(tmp_path):
    run_job(2, 1, "saves_alone", str(tmp_path))
    code, output = run_job(2, 1, "goes_on_from_file", str(tmp_path), "one_bit_adam", "0")
    assert code == 76
    assert "the saved state is that of rank 0 of 2, and this is rank 1 of 2" in output
    code, output = run_job(1, 1, "goes_on_from_file", str(tmp_path))
    assert code == 76
    assert "the saved state is that of rank 0 of 2, and this is rank 0 of 1" in output


@each_kind
def test_a_rank_that_died_comes_back_with_the_values_of_the_others(tmp_path, kind):
    options = ["--round-deadline=500ms", "--min-workers=1", "--worker-restarts=1"]
    code, output = run_job(2, 1, "comes_back", str(tmp_path), kind, options=options)
    assert code == 0
    digest_of(output, 2)


@each_kind
def test_overlap_on_some_ranks_or_all_changes_no_bit(kind):
    outputs = [run_job(3, 2, "overlap", ranks, kind)[1] for ranks in ("", "1", "012")]
    assert len({digest_of(output, 3) for output in outputs}) == 1


def test_ranks_that_begin_apart_begin_with_the_values_of_rank_0():
    code, output = run_job(3, 2, "other_seed")
    assert code == 0
    digest_of(output, 3)


def test_parameters_that_are_not_finite_at_the_start_are_named():
    code, output = run_job(2, 1, "not_finite")
    assert code == 64
    assert "rank 0 begins with are not finite, or out of range: tensor 'parameter 3" in output


def test_a_clipped_step_that_one_rank_is_refused_has_the_bits_of_one_that_it_is_not():
    code, output = run_job(2, 1, "tries_again", "refused")
    assert code == 0
    assert output.count("refused: beta1 of parameter group 1 is 0.8") == 2
    assert digest_of(output, 2) == digest_of(run_job(2, 1, "tries_again")[1], 2)


def test_gradients_are_clipped_alike_on_all_ranks():
    code, output = run_job(3, 2, "clipped")
    assert code == 0
    digest_of(output, 3)


def test_between_synchronisations_each_rank_clips_its_own_gradients():
    code, output = run_job(2, 1, "clipped_alone")
    assert code == 0
    digest_of(output, 2)


def test_ranks_that_clip_come_together_at_the_newer_checkpoint(tmp_path):
    wanted = digest_of(run_job(2, 1, "looks_too_early", str(tmp_path))[1], 2)
    options = ["--timeout=100s"]  # the rank that waits would do so for longer
    code, output = run_job(2, 1, "looks_too_early", str(tmp_path), options=options)
    assert code == 0
    assert output.count("again: ") == 1
    assert output.count("goes on from step 2") == 2
    assert digest_of(output, 2) == wanted


def test_ranks_that_clip_to_other_norms_are_refused():
    code, output = run_job(2, 1, "clipped_apart")
    assert code == 76
    assert re.search(r"tensor 0 is 'norm, clipped to \d.0' \[\] here but", output)


def test_a_rank_with_another_model_is_told_which_tensor_differs():
    code, output = run_job(2, 1, "other_model")
    assert code == 76
    assert re.search(r"tensor 0 is 'parameter 0 of group 0' \[\d, 10\] here but", output)


def test_an_exception_on_one_rank_ends_the_job_with_its_traceback():
    code, output = run_job(2, 1, "fails")
    assert code == 1
    report = output[output.index("signpost run:") :]
    assert report.startswith("signpost run: rank 1 failed first: ")
    assert "Traceback" in report and "ValueError: the data is bad" in report


README = """
import torch
from torch.utils.data import DataLoader, DistributedSampler
Model = lambda: torch.nn.Linear(4, 1)
dataset = torch.randn(256, 4)
loss_of = lambda model, batch: model(batch).square().mean()
%s
print(f"parameters {optimizer.parameters_crc32c():08x} after {optimizer.steps} steps", flush=True)
"""


def test_what_the_readme_shows_runs():
    [shown] = re.findall("```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    code, output = run(2, 1, sys.executable, "-c", README % shown)
    assert code == 0
    digest_of(output, 2)
    assert output.count("after 4 steps") == 2


def start(*arguments):
    """A command of the program that serves, and where it listens."""
    process = subprocess.Popen([*SIGNPOST, *arguments], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().split()[-1]


def torchrun_command(*arguments, name="test", port=0):
    command = [sys.executable, "-m", "torch.distributed.run", f"--rdzv_id={name}"]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}"]
    # Under Python 3.11 PyTorch 1.13 stumbles over the default of these, 0.
    return [*command, "--redirects=1", "--tee=1", *arguments]


def torchrun(environment, *arguments, name="test"):
    """What the ranks of a job that torchrun starts have written."""
    output = subprocess.run(
        torchrun_command("--nproc_per_node=2", *arguments, name=name),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **environment},
    ).stdout
    print(output)
    return output


def test_ranks_of_two_torchruns_come_together_after_one_has_died(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    job = ["--nnodes=2", "--nproc_per_node=1", "--max_restarts=2", "--monitor_interval=1"]
    job += [JOB, "dies_once", str(tmp_path), "0.5"]  # with a reduction beside it
    aggregator, address = start("aggregator", "--drain-grace=0s")
    environment = {**os.environ, "SIGNPOST_AGGREGATORS": address}
    agents = []
    try:
        for _ in range(2):
            command = torchrun_command(*job, port=port)
            agents.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            )
        output = "".join(agent.communicate(timeout=150)[0] for agent in agents)
    finally:
        for process in [*agents, aggregator]:
            process.terminate()
            process.wait()
    print(output)
    digest_of(output, 2)
    assert output.count("begins at step 0") == 4


def test_torchrun_starts_jobs_too():
    aggregator, address = start("aggregator", "--drain-grace=0s")
    try:
        output = torchrun({"SIGNPOST_AGGREGATORS": address}, JOB, "train")
    finally:
        aggregator.terminate()
        aggregator.wait()
    digest_of(output, 2)
