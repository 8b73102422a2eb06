"""Signpost's communication hook under DistributedDataParallel, on two ranks."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import signpost.torch as signpost
import torch
from ranks_test import digest_of, digests_of, printed_in, run
from signpost import UnavailableError
from signpost.torch import _ddp_hook
from signpost.torch._device import PlacedReduction

JOB = str(Path(__file__).with_name("ddp_job.py"))


RANKS = 2
SCENARIOS = [
    "dense",
    "compressed bf16 onebit",
    "not_finite",
    "empty_parameters",
    "double_precision",
    "other_buckets",
]


def run_ddp(directory, *words):
    """The exit code and all output of the ranks of one job."""
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    job = [sys.executable, JOB, str(directory / "rendezvous"), *words]
    return run(RANKS, 2, *job, **environment)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What the ranks printed in each scenario, one after the other in the same processes; and all of
    it as "output", since what they write to stderr may come when the next scenario has begun."""
    code, output = run_ddp(tmp_path_factory.mktemp("together"), *" + ".join(SCENARIOS).split())
    assert code == 0
    return {**printed_in(SCENARIOS, output), "output": output}


def test_the_fp32_hook_is_ddp_without_a_hook(together):
    digest_of(together["dense"], RANKS)


def test_compressed_gradients_learn(together):
    assert len(digests_of(together["compressed bf16 onebit"], RANKS)) == 2


def test_a_gradient_that_is_not_finite_is_nan_on_all_ranks(together):
    assert "the values of rank 1 are not finite" in together["output"]


def test_empty_parameters_are_left_out(together):
    digest_of(together["empty_parameters"], RANKS)


def test_gradients_that_would_be_rounded_are_refused(together):
    refused = "refused: ddp_hook got gradients of torch.float64; wanted float32"
    assert together["double_precision"].count(refused) == RANKS


def test_buckets_that_change_behind_the_start_step_are_an_error(together):
    refused = r"refused: .*DDP has put other parameters into bucket \d"
    assert len(re.findall(refused, together["other_buckets"])) == RANKS


def test_an_error_that_ddp_has_made_another_of_ends_the_process_with_its_own_exit_code(tmp_path):
    code, output = run_ddp(tmp_path, "left_alone")
    assert re.search(r"RuntimeError: .*FailedPreconditionError: .*rank 1 has left job", output)
    assert code == 75


def test_the_state_checks_its_options():
    with pytest.raises(ValueError, match="codec is 'int3'"):
        signpost.DdpHookState("int3")
    with pytest.raises(ValueError, match="start_step is 1, wanted at least 2"):
        signpost.DdpHookState("onebit", start_step=1)


class DenseReduction:
    """One that cannot be left."""

    def leave(self):
        raise UnavailableError("the aggregator is gone")


def test_dense_reductions_are_left_unless_ranks_may_be_late(monkeypatch):
    state = signpost.DdpHookState("onebit", name="leaving")
    state._dense = {3: PlacedReduction(DenseReduction(), torch.device("cpu"))}
    options = SimpleNamespace(round_deadline_s=1.0)
    monkeypatch.setattr(_ddp_hook, "world", lambda: SimpleNamespace(options=lambda: options))
    state._leave_dense(kept=set())
    assert list(state._dense) == [3]
    options.round_deadline_s = 0.0
    with pytest.warns(UserWarning, match="could not leave a reduction: the aggregator is gone"):
        state._leave_dense(kept=set())
    assert not state._dense


def test_buckets_behind_one_that_has_failed_wait_for_nobody(monkeypatch):
    state = signpost.DdpHookState("onebit", name="failing")
    monkeypatch.setattr(state, "_check_world", lambda: None)
    waits = []

    def wait_in_vain(*_):
        waits.append(1)
        raise UnavailableError("the aggregator is gone")

    monkeypatch.setattr(state, "_reduce_densely", wait_in_vain)
    parameter = torch.zeros(3)
    means = [
        state.exchange(
            SimpleNamespace(
                index=lambda: index,
                buffer=lambda: torch.zeros(3),
                parameters=lambda: [parameter],
                is_last=lambda: False,
            )
        )
        for index in range(5)
    ]
    for mean in means:
        with pytest.raises(RuntimeError, match="the aggregator is gone"):
            mean.wait()
    assert len(waits) == 1


def test_two_states_of_one_name_are_refused():
    first = signpost.DdpHookState("onebit", name="twins")
    with pytest.raises(ValueError, match="a DdpHookState of the name 'twins' already"):
        signpost.DdpHookState("onebit", name="twins")
    del first
    signpost.DdpHookState("onebit", name="twins")


def test_a_state_is_its_processs(monkeypatch):
    state = signpost.DdpHookState(name="forked")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(RuntimeError, match="'forked' is process .*, and this is process 1, a fork"):
        state.exchange(None)
