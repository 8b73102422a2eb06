"""PyTorch's own tools around an optimizer, on two ranks: its checkpoints, and its wrappers."""

import re
import sys
from pathlib import Path

import pytest
from ranks_test import digests_of, printed_in, run

JOB = str(Path(__file__).with_name("torch_tools_job.py"))
RANKS = 2


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Runs all scenarios; returns the lines that the ranks printed in each."""
    directory = tmp_path_factory.mktemp("dcp")
    scenarios = [
        f"saved_and_loaded_by_dcp {directory}",
        "looked_at_by_one_rank",
        "wrapped",
        "sharded",
        "in_another_order",
        "used_again",
    ]
    words = " + ".join(scenarios).split()
    code, output = run(RANKS, 2, sys.executable, JOB, *words, GLOO_SOCKET_IFNAME="lo")
    assert code == 0, output
    printed = printed_in(scenarios, output)
    return {scenario.split()[0]: text for scenario, text in printed.items()}


def test_saving_by_dcp_changes_no_bit_and_leads_back_to_the_same_bits(together):
    digests = digests_of(together["saved_and_loaded_by_dcp"], RANKS)
    assert len(digests) == 9
    for first in (0, 3, 6):
        assert len(set(digests[first : first + 3])) == 1


def test_a_rank_may_look_at_the_state_alone(together):
    without, with_it = digests_of(together["looked_at_by_one_rank"], RANKS)
    assert without == with_it


def refusals(text, rank):
    return re.findall(rf"^\[rank {rank}\] refused: (.*)", text, re.MULTILINE)


def test_a_model_that_ddp_averages_is_refused_unless_the_hook_leaves_gradients_alone(together):
    for rank in range(RANKS):
        [refusal] = refusals(together["wrapped"], rank)
        assert "parameter 0 of group 0 is wrapped in DistributedDataParallel" in refusal
        assert "register_comm_hook(None, signpost.local_gradients)" in refusal
    plain, with_hook = digests_of(together["wrapped"], RANKS)
    assert plain == with_hook


def test_shards_are_refused(together):
    for rank in range(RANKS):
        zero, flat, original, dtensor = refusals(together["sharded"], rank)
        assert zero.startswith("ZeroRedundancyOptimizer gives each rank other parameters")
        for of_fsdp in (flat, original):
            assert "is a shard of FullyShardedDataParallel's flat parameter" in of_fsdp
        assert "the model is sharded over all 2 processes" in dtensor


def test_parameters_and_optimizers_in_another_order_are_refused(together):
    of_parameters, of_optimizers = refusals(together["in_another_order"], 1)
    for refusal in (of_parameters, of_optimizers):
        assert "list parameters, and make optimizers, in the same order on all ranks" in refusal
    assert all("has left job" in refusal for refusal in refusals(together["in_another_order"], 0))


def test_processes_are_used_again_in_other_worlds(together):
    assert len(set(digests_of(together["used_again"], RANKS))) == 1
