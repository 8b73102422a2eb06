"""Ranks that attach to the worker of their node."""

import os
import re
import tempfile

import pytest
from ranks_test import JOB, digest_of, run_job, start, torchrun


def test_ranks_of_a_node_train_through_its_worker():
    for scenario in (
        ["average"],
        ["clipped"],
        ["clipped_alone"],
        ["overlap", "02"],
        ["overlap", "02", "zero_one_adam"],
        ["reduce"],
    ):
        code, output = run_job(4, 2, *scenario, options=["--per-node", "2"])
        assert code == 0
        digest_of(output, 4)


def test_what_a_program_changes_behind_the_nodes_worker_is_refused():
    code, output = run_job(2, 1, "changes_a_parameter", options=["--per-node", "2"])
    assert code == 1
    refusal = "RuntimeError: 0.weight was changed since its last step. The node's worker has the"
    assert refusal in output


@pytest.mark.parametrize("scenario", ["dies_once", "dies_in_a_backward_pass"])
def test_a_node_goes_on_with_the_same_bits_when_one_of_its_ranks_has_died(scenario, tmp_path):
    options = ["--per-node", "2", "--worker-restarts", "1"]
    code, output = run_job(4, 1, scenario, str(tmp_path), options=options)
    assert code == 0
    assert output.count("begins at step 17") == 2
    undisturbed = run_job(4, 1, scenario, str(tmp_path), options=options)[1]
    assert "begins at step 17" not in undisturbed
    assert digest_of(output, 4) == digest_of(undisturbed, 4)


@pytest.mark.parametrize(
    "scenario, norm, begin_again", [("dies_in_a_local_interval", "0.5", 2), ("dies_once", "0.5", 4)]
)
def test_two_nodes_go_on_when_a_rank_has_died(scenario, norm, begin_again, tmp_path):
    """Those that exchange norms in each step all begin again; others have nothing to begin again
    for but on the node itself."""
    options = ["--per-node", "2", "--worker-restarts", "1"]
    code, output = run_job(4, 1, scenario, str(tmp_path), norm, options=options)
    assert code == 0
    assert output.count("begins at step 17") == begin_again
    undisturbed = run_job(4, 1, scenario, str(tmp_path), norm, options=options)[1]
    assert "begins at step 17" not in undisturbed
    assert digest_of(output, 4) == digest_of(undisturbed, 4)


@pytest.mark.parametrize("scenario", ["corrects_its_rates", "corrects_its_rates_clipped"])
def test_ranks_of_a_node_whose_rates_differ_can_correct_them(scenario):
    code, output = run_job(4, 1, scenario, options=["--per-node", "2"])
    assert code == 0
    refused = "refused: local rank 1 .* has other rates than local rank 0 in group 0"
    assert len(re.findall(refused, output)) == 4
    digest_of(output, 4)


def test_torchrun_restarts_ranks_that_go_on_with_their_nodes_worker(tmp_path):
    aggregator, address = start("aggregator", "--drain-grace=0s")
    worker, node = start(
        *("worker", f"--listen=unix:{tempfile.mkdtemp(dir='/tmp')}/worker", "--processes=2"),
        *("--rank=0", "--world-size=1", f"--aggregators={address}"),
    )
    environment = {"SIGNPOST_AGGREGATORS": address, "SIGNPOST_NODE": node}
    try:
        job = [JOB, "dies_once", str(tmp_path), "0.5"]  # with a reduction beside it
        output = torchrun(environment, "--max_restarts=1", *job)
        assert output.count("begins at step 17") == 2
        undisturbed = torchrun(environment, *job, name="undisturbed")
        assert digest_of(output, 2) == digest_of(undisturbed, 2)
    finally:
        for process in (worker, aggregator):
            process.terminate()
            assert process.wait() == 0
    assert not os.path.exists(node[len("unix:") :])
