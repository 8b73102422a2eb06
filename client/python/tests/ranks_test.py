"""Jobs of several ranks, as `signpost run` and torchrun start them.

Importing PyTorch takes longer than most scenarios of job.py. So those that end well run one after the
other in the same three ranks, and each test looks at what the ranks printed in its scenario.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

JOB = str(Path(__file__).with_name("job.py"))
TWO_TENSORS = "client/examples/two_tensors"
SIGNPOST = [sys.executable, "-m", "signpost"]


def run(workers, aggregators, *command, options=(), **environment):
    """The exit code and all output of `signpost run`."""
    launch = [*SIGNPOST, "run", "-n", str(workers), "--aggregators", str(aggregators)]
    launch += [*options, "--"]
    # One thread each: this machine may have fewer cores than ranks.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
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


KINDS = ["one_bit_adam", "one_bit_lamb", "zero_one_adam"]
EACH_KIND = ",".join(KINDS)


def run_together(workers, aggregators, *scenarios, options=()):
    """Runs the scenarios one after the other in the same processes. Returns the lines that the ranks
    printed in each scenario."""
    words = " + ".join(scenarios).split()
    code, output = run_job(workers, aggregators, *words, options=options)
    assert code == 0
    return printed_in(scenarios, output)


def printed_in(scenarios, output):
    """The lines that the ranks printed in each scenario, by job.py's run_scenarios()."""
    printed = dict.fromkeys(scenarios, "")
    scenario_of = {}  # for each rank, where it is
    for line, rank, text in re.findall(r"^(\[rank (\d+)\] (.*)\n)", output, re.MULTILINE):
        if text.startswith("scenario "):
            scenario_of[rank] = text.removeprefix("scenario ")
        elif rank in scenario_of:
            printed[scenario_of[rank]] += line
    return printed


def digests_of(output, workers):
    """The checksums of parameters that each rank printed: all ranks the same, in the same order."""
    of_ranks = [
        re.findall(rf"^\[rank {rank}\] .*parameters ([0-9a-f]{{8}})", output, re.MULTILINE)
        for rank in range(workers)
    ]
    assert of_ranks[0] and of_ranks == [of_ranks[0]] * workers
    return of_ranks[0]


def digest_of(output, workers):
    """The checksum of the parameters that all ranks ended with."""
    digests = re.findall(r"parameters ([0-9a-f]{8})", output)
    assert len(digests) == workers and len(set(digests)) == 1
    return digests[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where saves_alone() saves."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def together(saved):
    return run_together(
        3,
        2,
        "average",
        "reduce",
        "two_tensors",
        "late_head",
        "thaws",
        "as_deepspeed",
        f"train {EACH_KIND}",
        f"saves_alone {saved}",
        "overlap none 1 012",
        "other_seed",
        "tries_again",
        "tries_again refused",
        "clipped",
        "clipped_alone",
    )


def test_adam_on_all_ranks_is_adamw_on_the_mean_of_their_gradients(together):
    digest_of(together["average"], 3)


def test_all_reduce_gives_all_ranks_the_bytes_of_their_mean(together):
    digest_of(together["reduce"], 3)


def test_one_bit_rounds_have_the_bits_of_a_program_in_c(together):
    _, in_c = run(3, 2, TWO_TENSORS)
    assert digest_of(together["two_tensors"], 3) == digest_of(in_c, 3)


def test_what_has_its_first_gradient_late_is_learnt_as_by_adamw(together):
    digest_of(together["late_head"], 3)


def test_what_is_thawed_or_added_is_learnt_as_by_adamw(together):
    digest_of(together["thaws"], 3)


def test_one_bit_adam_steps_as_deepspeeds(together):
    digest_of(together["as_deepspeed"], 3)
    code, output = run_job(1, 1, "as_deepspeed")
    assert code == 0
    digest_of(output, 1)


def test_a_job_that_is_killed_and_resumes_has_the_bits_of_one_that_is_not(together, tmp_path):
    train = ["train", EACH_KIND, str(tmp_path)]
    code, _ = run_job(3, 2, *train, "25")
    assert code == 128 + 9
    _, output = run_job(3, 1, *train)
    assert output.count("goes on from step 21") == 3 * len(KINDS)
    digests = digests_of(output, 3)
    assert len(digests) == len(KINDS) and digests == digests_of(together[f"train {EACH_KIND}"], 3)


def test_a_job_goes_on_from_what_its_ranks_have_saved_in_their_own_files(together, saved):
    assert len(list(saved.iterdir())) == 3 * len(KINDS)
    _, output = run_job(3, 1, "goes_on_from_file", str(saved))
    digests = digests_of(output, 3)
    assert len(digests) == len(KINDS) and digests == digests_of(together[f"saves_alone {saved}"], 3)


def test_ranks_go_on_from_what_rank_0_has_saved_alone(together, saved):
    code, output = run_job(3, 1, "loads_file_of_rank_0", str(saved))
    assert code == 0
    digest_of(output, 3)
    assert len(set(re.findall(r"\[rank (\d)\] .*no error of rank \1, only of other", output))) == 2


def test_a_state_of_another_number_of_ranks_is_refused(together, saved):
    code, output = run_job(2, 1, "loads_file_of_rank_0", str(saved))
    assert code == 76
    assert "the saved state is that of 3 ranks, and this job has 2" in output


def test_a_state_of_another_step_than_the_others_is_refused_by_the_next_step():
    code, output = run_job(3, 1, "loads_states_of_different_steps")
    assert code in (75, 76)  # of the rank that was refused, or of one that was there before
    assert re.search("FailedPreconditionError: .*first_step (was to be|is) [23]", output)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_died_comes_back_with_the_values_of_the_others(tmp_path, kind):
    options = ["--round-deadline=500ms", "--min-workers=1", "--worker-restarts=1"]
    code, output = run_job(2, 1, "comes_back", str(tmp_path), kind, options=options)
    assert code == 0
    digest_of(output, 2)


def test_overlap_on_some_ranks_or_all_changes_no_bit(together):
    digests = digests_of(together["overlap none 1 012"], 3)
    assert len(digests) == 3 * len(KINDS)
    for kind, first in zip(KINDS, range(0, len(digests), 3)):
        assert len(set(digests[first : first + 3])) == 1, kind


def test_ranks_that_begin_apart_begin_with_the_values_of_rank_0(together):
    digest_of(together["other_seed"], 3)


def test_parameters_that_are_not_finite_at_the_start_are_named():
    code, output = run_job(2, 1, "not_finite")
    assert code == 64
    assert "rank 0 begins with are not finite, or out of range: tensor 'parameter 3" in output


def test_a_clipped_step_that_one_rank_is_refused_has_the_bits_of_one_that_it_is_not(together):
    output = together["tries_again refused"]
    assert output.count("refused: beta1 of parameter group 1 is 0.8") == 2
    assert digest_of(output, 3) == digest_of(together["tries_again"], 3)


def test_gradients_are_clipped_alike_on_all_ranks(together):
    digest_of(together["clipped"], 3)


def test_between_synchronisations_each_rank_clips_its_own_gradients(together):
    digest_of(together["clipped_alone"], 3)


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


def test_what_the_readme_shows_runs():
    [program] = re.findall("```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    program += 'print(f"parameters {optimizer.parameters_crc32c():08x}", flush=True)\n'
    code, output = run(2, 1, sys.executable, "-c", program)
    assert code == 0
    digest_of(output, 2)
    assert len(re.findall(r"loss 0\.\d+, (?:1\.\d|2\.[0-2])\d bits per parameter", output)) == 2


def start(*arguments):
    """A command of the program that serves, and where it listens."""
    process = subprocess.Popen([*SIGNPOST, *arguments], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().split()[-1]


# Debian's PyTorch is built without libuv. There torchrun's agents meet only in a file, and only if they
# and their ranks are told not to use libuv.
WITHOUT_LIBUV = {"USE_LIBUV": "0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def torchrun_command(file, *arguments, name="test"):
    """A command whose agents meet in the file."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--rdzv_id={name}"]
    command += ["--rdzv_backend=c10d", "--rdzv_conf=store_type=file", f"--rdzv_endpoint={file}"]
    return [*command, *arguments]


def test_ranks_of_two_torchruns_come_together_after_one_has_died(tmp_path):
    job = ["--nnodes=2", "--nproc_per_node=1", "--max_restarts=2", "--monitor_interval=1"]
    job += [JOB, "dies_once", str(tmp_path), "0.5"]  # with a reduction beside it
    aggregator, address = start("aggregator", "--drain-grace=0s")
    environment = {**os.environ, **WITHOUT_LIBUV, "SIGNPOST_AGGREGATORS": address}
    agents = []
    try:
        for _ in range(2):
            command = torchrun_command(tmp_path / "rendezvous", *job)
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
