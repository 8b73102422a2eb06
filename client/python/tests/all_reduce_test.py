"""Reductions of PyTorch's tensors, in a job of one worker. Of several: ranks_test.py."""

import threading
import warnings

import pytest
import signpost.torch as signpost
import torch
from signpost import SignpostError
from signpost.torch import _all_reduce


@pytest.fixture(scope="module", autouse=True)
def world():
    return signpost.init()


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(), (1,), (30, 20), (100_000,)])
def test_fp32_of_one_rank_is_the_tensor(shape, op):
    tensor = numbers(*shape)
    wanted = tensor.clone()
    assert signpost.all_reduce(tensor, op=op) is tensor
    assert torch.equal(tensor, wanted)


def test_one_bit_sends_later_what_it_leaves_out_now():
    # Outliers take longer: a block's scale grows with what it owes.
    tensor, sent = numbers(5000).clamp(-1, 1), torch.zeros(5000)
    for call in range(200):
        result = signpost.all_reduce(tensor.clone(), "onebit", name="average")
        if call == 0:
            assert len(result.abs().unique()) == 2  # two blocks, of a scale each
        sent += result
    # What is left is in errors, which do not grow with the calls.
    assert (sent / 200 - tensor).abs().max() < 0.05


def test_errors_are_kept_by_name():
    first = signpost.all_reduce(numbers(100), "onebit", name="one")
    assert torch.equal(signpost.all_reduce(numbers(100), "onebit", name="another"), first)
    assert not torch.equal(signpost.all_reduce(numbers(100), "onebit", name="one"), first)


def test_bf16_rounds_and_makes_up_for_it():
    value = 1 + 2**-10
    results = [
        signpost.all_reduce(torch.full((10,), value), "bf16", name="fine")[0].item()
        for _ in range(80)
    ]
    assert results[0] == 1.0
    assert sum(results) / 80 == pytest.approx(value, abs=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_go_through_fp32(dtype):
    tensor = numbers(40).to(dtype)
    wanted = tensor.clone()
    signpost.all_reduce(tensor)
    assert tensor.dtype == dtype and torch.equal(tensor, wanted)


def test_a_tensor_with_gaps_is_reduced_and_what_is_between_stays():
    memory = numbers(20, 10)
    before, wanted = memory.clone(), memory[:, ::2].clone()
    signpost.all_reduce(memory[:, ::2], "onebit", name="gaps")
    assert torch.equal(memory[:, 1::2], before[:, 1::2])
    assert torch.equal(memory[:, ::2].sign(), wanted.sign())
    assert len(memory[:, ::2].abs().unique()) == 1


def test_autograd_sees_a_change_in_place():
    weight = torch.nn.Parameter(numbers(5))
    loss = (weight * weight).sum()
    signpost.all_reduce(weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("codec", ["fp32", "bf16", "onebit"])
def test_a_value_that_is_not_finite_makes_its_chunk_nan_and_is_warned_of(codec):
    tensor = numbers(2**21)  # two chunks
    tensor[3] = float("inf")
    name = f"not finite {codec}"
    with pytest.warns(
        UserWarning, match=f"'{name}': the values of rank 0 are not finite; 1 chunks"
    ):
        signpost.all_reduce(tensor, codec, name=name)
    assert tensor[:1000].isnan().all() and not tensor[-1000:].isnan().any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert signpost.all_reduce(numbers(2**21), codec, name=name).isfinite().all()


def test_codecs_with_errors_need_a_name():
    for codec in ("onebit", "bf16"):
        with pytest.raises(ValueError, match=f"codec='{codec}' needs a name"):
            signpost.all_reduce(numbers(3), codec)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(codec="int3"), "codec is 'int3', wanted one of fp32, bf16, fp16, int8, int4, onebit"),
        (dict(op="max"), "op is 'max', wanted mean or sum"),
    ],
)
def test_arguments_are_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        signpost.all_reduce(numbers(3), name="checked", **wrong)
    signpost.all_reduce(numbers(3), name="checked")  # nothing has stayed under the name


@pytest.mark.parametrize(
    "tensor, error, message",
    [
        (torch.zeros(3, dtype=torch.int32), TypeError, "torch.int32"),
        (torch.zeros(3, dtype=torch.float64), TypeError, "torch.float64"),
        (torch.zeros(3).to_sparse(), TypeError, "torch.sparse_coo; wanted a dense one"),
        (torch.zeros(3, device="meta"), TypeError, "on meta; Signpost reduces .* a CUDA GPU"),
        (torch.zeros(0, 3), ValueError, r"without elements, \[0, 3\]"),
        (0.5, TypeError, "got a float, wanted a tensor"),
    ],
)
def test_what_cannot_be_reduced_is_refused(tensor, error, message):
    with pytest.raises(error, match=message):
        signpost.all_reduce(tensor)


def test_a_name_stands_for_one_shape_codec_and_op():
    signpost.all_reduce(numbers(3, 4), name="settled")
    for tensor, options in (
        (numbers(4, 3), {}),
        (numbers(3, 4), dict(codec="bf16")),
        (numbers(3, 4), dict(op="sum")),
    ):
        with pytest.raises(ValueError, match=r"'settled' had a tensor \[3, 4\].*another name"):
            signpost.all_reduce(tensor, name="settled", **options)


def test_a_call_that_cannot_join_leaves_the_name_to_one_that_has(monkeypatch):
    """The first call fails, while a second one with the name waits for its turn, and joins."""
    joins = []
    begun, second_waits, failed = threading.Event(), threading.Event(), threading.Event()
    reduction_for = _all_reduce._device.reduction_for

    def join(*arguments, **how):
        joins.append(arguments)
        if len(joins) == 1:
            begun.set()
            assert second_waits.wait(20)
            raise SignpostError("nobody came")
        assert failed.wait(20)  # its call is over
        return reduction_for(*arguments, **how)

    def first():
        with pytest.raises(SignpostError, match="nobody came"):
            signpost.all_reduce(numbers(3), name="shared")
        failed.set()

    monkeypatch.setattr(_all_reduce._device, "reduction_for", join)
    one = threading.Thread(target=first)
    one.start()
    assert begun.wait(20)
    monkeypatch.setattr(_all_reduce._Named, "reduce", announcing(second_waits))
    signpost.all_reduce(numbers(3), name="shared")
    one.join()
    signpost.all_reduce(numbers(3), name="shared")
    assert len(joins) == 2


def announcing(event, reduce=_all_reduce._Named.reduce):
    def announce(named, tensor):
        event.set()
        return reduce(named, tensor)

    return announce


def test_a_name_is_free_again_when_nobody_could_join(monkeypatch):
    def fail(*_, **__):
        raise SignpostError("nobody came")

    with monkeypatch.context() as patch:
        patch.setattr(_all_reduce._device, "reduction_for", fail)
        with pytest.raises(SignpostError, match="nobody came"):
            signpost.all_reduce(numbers(3), name="free")
    signpost.all_reduce(numbers(4), name="free")


def test_tensors_that_cannot_be_written_are_refused_before_the_exchange():
    with torch.inference_mode():
        inference = numbers(10)
        signpost.all_reduce(inference)
    with pytest.raises(ValueError, match="inference_mode"):
        signpost.all_reduce(inference)
    with pytest.raises(ValueError, match=r"a tensor \[3, 5\] whose elements share memory"):
        signpost.all_reduce(numbers(3, 1).expand(3, 5))
