"""Ranks that attach to the worker of their node."""

import os
import re
import subprocess
import tempfile

import pytest
from ranks_test import (
    JOB,
    KINDS,
    WITHOUT_LIBUV,
    digest_of,
    digests_of,
    run_job,
    run_together,
    start,
    torchrun_command,
)

DIES_WITH_OVERLAP = "dies_in_a_backward_pass"
DIES_CLIPPED = ["dies_once", "dies_in_a_local_interval"]
CORRECTS = ["corrects_its_rates", "corrects_its_rates_clipped"]


@pytest.fixture(scope="module")
def had_died(tmp_path_factory):
    """A directory with which the scenarios where a rank dies run undisturbed."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "has_died").touch()
    return directory


@pytest.fixture(scope="module")
def together(had_died):
    return run_together(
        4,
        2,
        "average",
        "clipped",
        "clipped_alone",
        "overlap none 02",
        "reduce",
        "changes_a_parameter",
        *CORRECTS,
        f"{DIES_WITH_OVERLAP} {had_died}",
        *(f"{scenario} {had_died} 0.5" for scenario in DIES_CLIPPED),
        options=["--per-node", "2"],
    )


def test_ranks_of_a_node_train_through_its_worker(together):
    for scenario in ("average", "clipped", "clipped_alone", "reduce"):
        digest_of(together[scenario], 4)
    digests = digests_of(together["overlap none 02"], 4)
    assert len(digests) == 2 * len(KINDS)
    assert digests[::2] == digests[1::2]


def test_what_a_program_changes_behind_the_nodes_worker_is_refused(together):
    refusal = "refused: 0.weight was changed since its last step. The node's worker has the"
    assert together["changes_a_parameter"].count(refusal) == 4


def run_with_death(*scenario):
    """All output of a job of two nodes, of which a rank dies and is started again."""
    options = ["--per-node", "2", "--worker-restarts", "1"]
    code, output = run_job(4, 1, *scenario, options=options)
    assert code == 0
    return output


def test_a_node_goes_on_with_the_same_bits_when_a_rank_has_died_in_its_backward_pass(
    together, had_died, tmp_path
):
    output = run_with_death(DIES_WITH_OVERLAP, str(tmp_path))
    assert output.count("begins at step 17") == 2
    undisturbed = together[f"{DIES_WITH_OVERLAP} {had_died}"]
    assert "begins at step 17" not in undisturbed
    assert digest_of(output, 4) == digest_of(undisturbed, 4)


@pytest.mark.parametrize("scenario, begin_again", list(zip(DIES_CLIPPED, [4, 2])))
def test_two_nodes_go_on_when_a_rank_has_died(together, had_died, scenario, begin_again, tmp_path):
    """Where norms are exchanged in each step, all ranks begin again. Otherwise only the ranks of the
    node do."""
    output = run_with_death(scenario, str(tmp_path), "0.5")
    assert output.count("begins at step 17") == begin_again
    undisturbed = together[f"{scenario} {had_died} 0.5"]
    assert "begins at step 17" not in undisturbed
    assert digest_of(output, 4) == digest_of(undisturbed, 4)


@pytest.mark.parametrize("scenario", CORRECTS)
def test_ranks_of_a_node_whose_rates_differ_can_correct_them(together, scenario):
    refused = "refused: local rank 1 .* has other rates than local rank 0 in group 0"
    assert len(re.findall(refused, together[scenario])) == 4
    digest_of(together[scenario], 4)


def test_torchrun_restarts_ranks_that_go_on_with_their_nodes_worker(tmp_path):
    """With the bits of ranks that `signpost run` starts, of which none dies: one has died before."""
    aggregator, address = start("aggregator", "--drain-grace=0s")
    worker, node = start(
        *("worker", f"--listen=unix:{tempfile.mkdtemp(dir='/tmp')}/worker", "--processes=2"),
        *("--rank=0", "--world-size=1", f"--aggregators={address}"),
    )
    environment = {"SIGNPOST_AGGREGATORS": address, "SIGNPOST_NODE": node, **WITHOUT_LIBUV}
    job = ["dies_once", str(tmp_path), "0.5"]  # with a reduction beside it
    command = torchrun_command(
        tmp_path / "rendezvous", "--nproc_per_node=2", "--max_restarts=1", JOB, *job
    )
    try:
        output = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, **environment},
        ).stdout
        print(output)
    finally:
        for process in (worker, aggregator):
            process.terminate()
            assert process.wait() == 0
    assert not os.path.exists(node[len("unix:") :])
    assert output.count("begins at step 17") == 2
    code, undisturbed = run_job(2, 1, *job, options=["--per-node", "2"])
    assert code == 0
    assert digest_of(output, 2) == digest_of(undisturbed, 2)
