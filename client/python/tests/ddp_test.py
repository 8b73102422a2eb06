"""Signpost's communication hook under DistributedDataParallel, on two ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import signpost.torch as signpost
import torch
from signpost import UnavailableError
from signpost.torch import _ddp_hook
from signpost.torch._device import PlacedReduction

JOB = str(Path(__file__).with_name("ddp_job.py"))


def run(tmp_path, *arguments):
    launch = [sys.executable, "-m", "signpost", "run", "-n", "2", "--aggregators", "2", "--"]
    ended = subprocess.run(
        [*launch, sys.executable, JOB, str(tmp_path / "rendezvous"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    print(ended.stdout)
    return ended.returncode, ended.stdout


def assert_replicas_are_identical(output):
    digests = re.findall(r"parameters ([0-9a-f]{8})", output)
    assert len(digests) == 2 and len(set(digests)) == 1


def test_the_fp32_hook_is_ddp_without_a_hook(tmp_path):
    code, output = run(tmp_path, "dense")
    assert code == 0
    assert_replicas_are_identical(output)


@pytest.mark.parametrize("codec", ["bf16", "onebit"])
def test_compressed_gradients_learn(tmp_path, codec):
    code, output = run(tmp_path, "compressed", codec)
    assert code == 0
    assert_replicas_are_identical(output)


def test_a_gradient_that_is_not_finite_is_nan_on_all_ranks(tmp_path):
    code, output = run(tmp_path, "not_finite")
    assert code == 0
    assert "the values of rank 1 are not finite" in output


def test_empty_parameters_are_left_out(tmp_path):
    code, output = run(tmp_path, "empty_parameters")
    assert code == 0
    assert_replicas_are_identical(output)


def test_gradients_that_would_be_rounded_are_refused(tmp_path):
    code, output = run(tmp_path, "double_precision")
    assert code == 1
    assert "TypeError: ddp_hook got gradients of torch.float64; wanted float32" in output


def test_buckets_that_change_behind_the_start_step_are_an_error(tmp_path):
    code, output = run(tmp_path, "other_buckets")
    assert code == 1
    assert re.search(r"DDP has put other parameters into bucket \d", output)


def test_an_error_that_ddp_has_made_another_of_ends_the_process_with_its_own_exit_code(tmp_path):
    code, output = run(tmp_path, "left_alone")
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
    options = SimpleNamespace(round_deadline_s=1.0, node=None)
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
