"""max_grad_norm, and gradients that a GradScaler has scaled."""

import math
import warnings

import pytest
import signpost.torch as signpost
import torch
from optimizers import FREEZE_STEP, LOCAL, SHAPES, STEPS, assert_same_step, set_gradients, tensors
from signpost import InvalidArgumentError
from torch import nn

SCALE = 1024.0


def grad_scaler():
    """Returns PyTorch's own GradScaler, after a loss was multiplied by SCALE."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    assert scaler.scale(torch.ones(())) == SCALE
    return scaler


@pytest.mark.parametrize("max_norm", [0.5, 1e4])
def test_max_grad_norm_clips_as_clip_grad_norm(make, max_norm):
    ours, theirs = tensors(*SHAPES), tensors(*SHAPES)
    a = make(signpost.Adam, ours, lr=0.01, max_grad_norm=max_norm)
    b = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0)
    for step in range(5):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        a.step()
        norm = nn.utils.clip_grad_norm_(theirs, max_norm)
        b.step()
        assert a.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        for x, y in zip(ours, theirs):
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-8)
        assert_same_step(ours, theirs)


def test_a_grad_scaler_s_scale_is_divided_out(make):
    ours, theirs = tensors(*SHAPES), tensors(*SHAPES)
    scaler = grad_scaler()
    a = make(signpost.Adam, ours, lr=0.01)
    b = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0)
    for step in range(5):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        for parameter in ours:
            parameter.grad.mul_(SCALE)
        scaler.step(a)
        scaler.update()
        b.step()
        assert_same_step(ours, theirs)


@pytest.mark.parametrize("anew", [0, 1, 2])
def test_a_step_that_was_refused_unscales_and_clips_each_gradient_once(make, anew):
    """Tried again with so many new gradients, which come into the memory of those before."""

    def backward(parameters):
        for parameter, numbers in zip(parameters, scaled):
            parameter.grad.copy_(numbers)

    parameters = tensors((30,), (40,))
    groups = [{"params": [parameter]} for parameter in parameters]
    options = dict(freeze_step=9, warm_up_codec="bf16", max_grad_norm=0.5)
    optimizer = make(signpost.OneBitAdam, groups, **options)
    exchanged, reduction = [], optimizer._progress.member.clipping._reduction
    reduce = reduction.reduce
    reduction.reduce = lambda addresses: exchanged.append(reduce(addresses))
    set_gradients(parameters, 0)
    norm = torch.cat([parameter.grad for parameter in parameters]).norm()
    wanted = [parameter.grad * 0.5 / norm for parameter in parameters]
    scaled = [parameter.grad * SCALE for parameter in parameters]
    scaler = grad_scaler()
    backward(parameters)
    optimizer.param_groups[1]["betas"] = (0.8, 0.999)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="beta1 of parameter group 1 is 0.8"):
            scaler.step(optimizer)
    optimizer.param_groups[1]["betas"] = (0.9, 0.999)
    backward(parameters[:anew])
    scaler.step(optimizer)
    assert len(exchanged) == 1
    assert optimizer.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for parameter, gradient in zip(parameters, wanted):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-8)
    set_gradients(parameters, 1)  # of a step of its own
    optimizer.step()
    assert len(exchanged) == 2
    assert torch.cat([p.grad for p in parameters]).norm().item() == pytest.approx(0.5, rel=1e-5)


def test_a_grad_scaler_s_scale_is_gone_when_a_step_has_failed(make):
    [x] = tensors((10,))
    optimizer = make(signpost.Adam, [x])
    optimizer.grad_scale = torch.tensor(8.0)
    x.data = x.data.double()
    with pytest.raises(RuntimeError, match="torch.float64"):
        optimizer.step()
    assert not hasattr(optimizer, "grad_scale")
    del optimizer.grad_scale  # as some do in the end


def test_what_one_rank_alone_fails_at_it_does_before_the_norm_is_exchanged(make):
    x = nn.Parameter(torch.ones(10, dtype=torch.float16))
    optimizer = make(signpost.Adam, [x], max_grad_norm=1.0)
    optimizer._progress.member.clipping.norm = lambda own: pytest.fail("it was exchanged")
    x.grad = torch.ones(10, dtype=torch.float16)
    with pytest.raises(ValueError, match="is float16 and would underflow"):
        grad_scaler().step(optimizer)
    x.grad.data = torch.ones(5)
    with pytest.raises(RuntimeError, match=r"gradient of parameter 0 of group 0 is \[5\], wanted"):
        optimizer.step()


def test_gradients_that_cannot_be_written_to_are_clipped_as_others_are(make):
    x, y = tensors((4,), (4,))
    optimizer = make(signpost.Adam, [x, y], max_grad_norm=1.0)
    with torch.inference_mode():
        y.grad = torch.ones(4)
    x.grad = torch.ones(1).expand(4)
    optimizer.step()
    for parameter in (x, y):
        torch.testing.assert_close(parameter.grad, torch.full((4,), 8**-0.5))


def test_what_a_grad_scaler_has_unscaled_is_left_as_it_is(make):
    [x] = tensors((10,))
    optimizer = make(signpost.Adam, [x])
    x.grad = torch.full((10,), 3 * SCALE)
    scaler = grad_scaler()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert torch.equal(x.grad, torch.full((10,), 3.0))


def test_an_overflow_under_a_grad_scaler_skips_the_step(make):
    [x] = tensors((10,))
    before = x.detach().clone()
    optimizer = make(signpost.Adam, [x])
    x.grad = torch.full((10,), math.inf)
    with pytest.warns(UserWarning, match="the gradient of rank 0 is not finite"):
        grad_scaler().step(optimizer)
    assert optimizer.steps == 1 and torch.equal(x, before)


def test_float16_gradients_are_not_unscaled(make):
    x = nn.Parameter(torch.ones(10, dtype=torch.float16))
    optimizer = make(signpost.Adam, [x])
    x.grad = torch.ones(10, dtype=torch.float16)
    with pytest.raises(ValueError, match="parameter 0 of group 0 is float16 and would underflow"):
        grad_scaler().step(optimizer)


def test_a_grad_scaler_and_overlap_exclude_each_other(make):
    [x] = tensors((10,))
    optimizer = make(signpost.Adam, [x], overlap=True)
    (1024 * x.sum()).backward()
    with pytest.raises(RuntimeError, match="as the GradScaler has scaled them"):
        grad_scaler().step(optimizer)


def test_max_grad_norm_counts_all_types_and_layouts_of_gradients(make):
    dense, sparse, half, unused = tensors((30,), (20, 5), (10,), (7,))
    half = nn.Parameter(half.detach().bfloat16())
    optimizer = make(signpost.Adam, [dense, sparse, half, unused], max_grad_norm=1.0)
    dense.grad = torch.full((30,), 2.0)
    rows = torch.tensor([[3, 3, 4]])  # row 3 twice: 2 + 2
    values = torch.full((3, 5), 2.0)
    sparse.grad = torch.sparse_coo_tensor(rows, values, (20, 5), check_invariants=True)
    half.grad = torch.full((10,), 3.0, dtype=torch.bfloat16)
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx((30 * 4 + 5 * 16 + 5 * 4 + 10 * 9) ** 0.5)
    factor = 1 / optimizer.grad_norm
    assert dense.grad[0].item() == pytest.approx(2 * factor)
    assert sparse.grad.to_dense()[3, 0].item() == pytest.approx(4 * factor)
    assert half.grad[0].item() == pytest.approx(3 * factor, rel=0.01)


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def default_dtype(request):
    """What PyTorch makes of factory calls that do not say a type."""
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


def test_what_the_library_reads_is_fp32_whatever_is_pytorchs_default(make, default_dtype):
    used, unused = (nn.Parameter(torch.ones(1000, dtype=torch.float32)) for _ in range(2))
    optimizer = make(signpost.Adam, [used, unused], max_grad_norm=1.0)
    used.grad = torch.full_like(used, 0.31)
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(0.31 * 1000**0.5, rel=1e-6)
    assert optimizer._progress.member.zeros.at_least(1).dtype == torch.float32
    assert torch.equal(unused, torch.ones_like(unused))


@pytest.mark.parametrize("large", [1e14, 1e30])
def test_a_norm_that_is_too_large_clips_nothing(make, large):
    [x] = tensors((4,))
    optimizer = make(signpost.Adam, [x], max_grad_norm=1.0)
    x.grad = torch.full((4,), large)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the library takes for not finite
        optimizer.step()
    assert math.isnan(optimizer.grad_norm)
    assert torch.equal(x.grad, torch.full((4,), large))


@pytest.mark.parametrize("large", [1e12, 1e-12])
def test_max_grad_norm_takes_norms_of_any_size(make, large):
    [x] = tensors((4,))
    optimizer = make(signpost.Adam, [x], max_grad_norm=large / 10)
    x.grad = torch.full((4,), large)
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(2 * large)
    assert x.grad[0].item() == pytest.approx(large * min(1, large / 10 / (2 * large + 1e-6)))


def test_a_norm_that_is_not_finite_clips_nothing(make):
    big, bad = tensors((2**19,), (2**19,))
    optimizer = make(signpost.Adam, [big, bad], max_grad_norm=1.0)
    big.grad, bad.grad = torch.ones(2**19), torch.full((2**19,), float("nan"))
    with pytest.warns(UserWarning, match="the gradient of rank 0 is not finite, .*; 1 chunks"):
        optimizer.step()
    assert math.isnan(optimizer.grad_norm)
    assert big.grad[0] == 1


def test_zero_one_adam_exchanges_no_norm_in_local_steps(make):
    parameters = tensors((1000,))
    optimizer = make(signpost.ZeroOneAdam, parameters, max_grad_norm=0.5, **LOCAL)
    sent_bytes = 0
    for step in range(STEPS):
        set_gradients(parameters, step)
        norm = parameters[0].grad.norm().item()
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(norm, rel=1e-6)
        assert parameters[0].grad.norm().item() == pytest.approx(0.5, rel=1e-5)
        sent = optimizer.report.sent_bytes - sent_bytes
        sent_bytes = optimizer.report.sent_bytes
        assert (sent < 100) == (optimizer.report.codec == "none")  # a ping may be among them


def test_of_a_norm_of_its_own_that_is_not_finite_a_rank_clips_nothing(make):
    good, bad = tensors((100,), (100,))
    optimizer = make(signpost.ZeroOneAdam, [good, bad], max_grad_norm=1.0, **LOCAL)
    for step in range(FREEZE_STEP):
        set_gradients([good, bad], step)
        optimizer.step()
    good.grad.fill_(1.0)
    bad.grad.fill_(math.inf)
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step()
    assert math.isnan(optimizer.grad_norm)
    assert good.grad[0] == 1


def test_max_grad_norm_must_be_positive(make):
    for wrong in (0.0, -1.0, float("nan"), "1.0"):
        with pytest.raises(ValueError, match=f"max_grad_norm is {wrong!r}, wanted a positive"):
            make(signpost.Adam, tensors((4,)), max_grad_norm=wrong)


def test_max_grad_norm_and_overlap_exclude_each_other(make):
    with pytest.raises(ValueError, match="max_grad_norm needs all gradients"):
        make(signpost.Adam, tensors((4,)), max_grad_norm=1.0, overlap=True)
