"""Adam, 1-bit Adam, 1-bit LAMB and 0/1 Adam as optimizers of PyTorch, in a job of one worker."""

import copy
import inspect
import io
import math
import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import signpost.torch as signpost
import torch
from signpost import DataLossError, FailedPreconditionError, InvalidArgumentError, Session
from signpost.torch import _device, _job_optimizer
from torch import nn
from torch.cuda.amp import grad_scaler


@pytest.fixture(scope="module", autouse=True)
def world():
    return signpost.init()


def tensors(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(parameters, step):
    """The same for every list of the same shapes."""
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter.dtype)


@torch.no_grad()
def assert_same_step(ours, theirs):
    for a, b in zip(ours, theirs):
        # Where a value crosses 0 it is small against the step, about 0.01 here.
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * 0.01)
        b.copy_(a)  # rounding does not add up


def train_like_adamw(make, ours, theirs, steps=20, prepare=set_gradients, **options):
    """Takes the same steps on both, and compares after each."""
    options = {"lr": 0.01, "weight_decay": 0.0, **options}
    a, b = make(signpost.Adam, ours, **options), torch.optim.AdamW(theirs, **options)
    a_parameters = [p for group in a.param_groups for p in group["params"]]
    b_parameters = [p for group in b.param_groups for p in group["params"]]
    for step in range(steps):
        for optimizer, parameters in ((a, a_parameters), (b, b_parameters)):
            prepare(parameters, step)
            optimizer.step()
        assert_same_step(a_parameters, b_parameters)
    return a


SHAPES = ((30, 20), (5000,), ())


def test_adam_in_another_codec_is_a_warm_up_in_it_without_an_end(make):
    ours, theirs = tensors(*SHAPES), tensors(*SHAPES)
    a = make(signpost.Adam, ours, codec="int8")
    b = make(signpost.OneBitAdam, theirs, freeze_step=2**62, warm_up_codec="int8")
    for step in range(5):
        for optimizer, parameters in ((a, ours), (b, theirs)):
            set_gradients(parameters, step)
            optimizer.step()
    assert a.parameters_crc32c() == b.parameters_crc32c()
    assert 8 < a.sent_bits < 8.2
    with pytest.raises(ValueError, match="codec is 'int7', wanted one of"):
        make(signpost.Adam, tensors((4,)), codec="int7")


def test_steps_as_adamw(make):
    options = {"betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    train_like_adamw(make, tensors(*SHAPES), tensors(*SHAPES), **options)


def test_steps_as_adam(make):
    ours, theirs = tensors(*SHAPES), tensors(*SHAPES)
    a, b = make(signpost.Adam, ours), torch.optim.Adam(theirs)
    for step in range(20):
        for optimizer, parameters in ((a, ours), (b, theirs)):
            set_gradients(parameters, step)
            optimizer.step()
        assert_same_step(ours, theirs)


def test_one_bit_adam_steps_as_adamw_until_the_freeze(make):
    ours, theirs = tensors(*SHAPES), tensors(*SHAPES)
    a = make(signpost.OneBitAdam, ours, lr=0.01, freeze_step=10)
    b = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0)
    for step in range(12):
        for optimizer, parameters in ((a, ours), (b, theirs)):
            set_gradients(parameters, step)
            optimizer.step()
        assert a.report.one_bit == (step >= 10)
        if step < 10:
            assert_same_step(ours, theirs)
    assert not torch.allclose(ours[0], theirs[0], rtol=1e-6)


def test_one_bit_steps_follow_the_paper(make):
    """Against its formulas in double precision, on one block: ARCHITECTURE.md's arithmetic."""
    freeze, beta1, beta2, eps, lr, decay, gamma = 5, 0.9, 0.999, 1e-8, 0.01, 0.1, 1.35
    [x] = tensors((1000,))
    optimizer = make(signpost.OneBitAdam, [x], lr=lr, weight_decay=decay, freeze_step=freeze)
    wanted, m, v = x.detach().double(), torch.zeros(1000).double(), torch.zeros(1000).double()
    worker_error, aggregator_error = torch.zeros(1000).double(), torch.zeros(1000).double()

    def compress(u):
        return torch.sign(u) * gamma * u.norm() / len(u) ** 0.5

    for step in range(20):
        set_gradients([x], step)
        g = x.grad.double()
        if step < freeze:
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            m_corrected, v_corrected = m / (1 - beta1 ** (step + 1)), v / (1 - beta2 ** (step + 1))
            update = m_corrected / (v_corrected.sqrt() + eps)
        else:
            if step == freeze:
                m, v = m_corrected, v_corrected.clamp(min=0.01 * v_corrected.mean().item())
            u = beta1 * m + (1 - beta1) * g + worker_error
            sent = compress(u)
            worker_error = u - sent
            u = sent + aggregator_error
            m = compress(u)
            aggregator_error = u - m
            update = m / (v.sqrt() + eps)
        wanted = wanted - lr * (update + decay * wanted)
        optimizer.step()
        torch.testing.assert_close(x.detach(), wanted.float(), rtol=1e-5, atol=1e-6)


def test_lamb_steps_follow_the_papers(make):
    """Likewise, with a trust ratio until the freeze, and a factor from then on."""
    freeze, beta1, beta2, eps, lr, decay, gamma = 5, 0.9, 0.99, 1e-8, 0.01, 0.1, 1.35
    [x] = tensors((1000,))
    optimizer = make(
        signpost.OneBitLamb,
        [x],
        lr=lr,
        betas=(beta1, beta2),
        weight_decay=decay,
        freeze_step=freeze,
        max_coeff=0.9,
        coeff_beta=0.5,
        factor_threshold=0.05,
    )
    wanted, m, v = x.detach().double(), torch.zeros(1000).double(), torch.zeros(1000).double()
    worker_error, aggregator_error = torch.zeros(1000).double(), torch.zeros(1000).double()
    average, weight, factor = 0.0, 0.0, 1.0

    def compress(u):
        return torch.sign(u) * gamma * u.norm() / len(u) ** 0.5

    for step in range(20):
        set_gradients([x], step)
        g = x.grad.double()
        if step < freeze:
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            m_corrected, v_corrected = m / (1 - beta1 ** (step + 1)), v / (1 - beta2 ** (step + 1))
            update = m_corrected / (v_corrected.sqrt() + eps) + decay * wanted
            scale = min(max((wanted.norm() / update.norm()).item(), 0.01), 0.9)
            average, weight = 0.5 * average + 0.5 * scale, 0.5 * weight + 0.5
        else:
            if step == freeze:
                m, v = m_corrected, v_corrected.clamp(min=0.01 * v_corrected.mean().item())
                fresh = v
            before = m
            u = beta1 * m + (1 - beta1) * g + worker_error
            sent = compress(u)
            worker_error = u - sent
            u = sent + aggregator_error
            m = compress(u)
            aggregator_error = u - m
            fresh = beta2 * fresh + (1 - beta2) * ((m - beta1 * before) / (1 - beta1)) ** 2
            adam = m / (v.sqrt() + eps)
            update = adam + decay * wanted
            share = min(1.0, (adam.norm() / update.norm()).item())
            largest = ((v.sqrt() + eps) / (fresh.sqrt() + eps)).max().item()
            clipped = min(max(largest * share + 1 - share, 0.5), 4.0)
            factor = min(max(clipped, 0.95 * factor), 1.05 * factor)
            scale = average / weight * factor
        wanted = wanted - lr * scale * update
        optimizer.step()
        assert optimizer.report.one_bit == (step >= freeze)
        torch.testing.assert_close(x.detach(), wanted.float(), rtol=1e-5, atol=1e-6)
    assert factor != 1


def test_zero_one_adam_steps_follow_the_paper(make):
    """Likewise: docs/algorithms.md. The variance is updated in steps 0, 1 and 3; steps 8 and 9 are
    an interval, and so are 10 to 13 and 14 to 17."""
    freeze, beta1, beta2, eps, lr, decay, gamma = 6, 0.9, 0.99, 1e-8, 0.01, 0.1, 1.35
    updates, ends = {0: 1, 1: 1, 3: 2}, {6: 1, 7: 1, 9: 2, 13: 4, 17: 4}  # and their intervals
    [x] = tensors((1000,))
    optimizer = make(
        signpost.ZeroOneAdam,
        [x],
        lr=lr,
        betas=(beta1, beta2),
        weight_decay=decay,
        var_freeze_step=freeze,
        var_update_scaler=1,
        local_step_scaler=2,
        local_step_clipper=4,
    )
    wanted, m, v = x.detach().double(), torch.zeros(1000).double(), torch.zeros(1000).double()
    worker_error, aggregator_error = torch.zeros(1000).double(), torch.zeros(1000).double()
    floor, last_update, bits = 0.0, 0, 0.0

    def exchange(u):
        nonlocal worker_error, aggregator_error
        sent = compress(u + worker_error)
        worker_error = u + worker_error - sent
        answer = compress(sent + aggregator_error)
        aggregator_error = sent + aggregator_error - answer
        return answer

    def compress(u):
        return torch.sign(u) * gamma * u.norm() / len(u) ** 0.5

    for step in range(18):
        # Rates that change tell the sum of them from their number.
        optimizer.param_groups[0]["lr"] = rate = lr * 0.9**step
        set_gradients([x], step)
        g = x.grad.double()
        if step < freeze:
            if step > 1:
                floor = 0.01 * (v / (1 - beta2 ** (last_update + 1))).mean().item()
            if step in updates:
                kept, last_update = beta2 ** updates[step], step
                v = kept * v + (1 - kept) * g * g
                codec, sent = "fp32", 32.0
            else:
                g = exchange(g)
                codec, sent = "onebit", 1.032
            m = beta1 * m + (1 - beta1) * g
            corrected = (v / (1 - beta2 ** (last_update + 1))).clamp(min=floor)
            update = m / (1 - beta1 ** (step + 1)) / (corrected.sqrt() + eps)
            wanted = wanted - rate * (update + decay * wanted)
        else:
            if step == freeze:
                m = m / (1 - beta1**freeze)
                v = v / (1 - beta2 ** (last_update + 1))
                d = 1 / (v.clamp(min=0.01 * v.mean().item()).sqrt() + eps)
                worker_error, aggregator_error = (
                    (1 - beta1) * worker_error,
                    (1 - beta1) * aggregator_error,
                )
                anchor, u, total = wanted, torch.zeros(1000).double(), 0.0
            m = beta1 * m + (1 - beta1) * g
            u, total = u + rate * m, total + rate
            if step in ends:
                m = exchange(u / total)
                wanted = anchor - total * (d * m + decay * anchor)
                anchor, u, total = wanted, torch.zeros(1000).double(), 0.0
                codec, sent = "onebit", 1.032
            else:
                wanted = wanted - rate * (d * m + decay * wanted)
                codec, sent = "none", 0.0
        optimizer.step()
        bits += sent
        assert optimizer.report.codec == codec
        assert optimizer.is_synchronised == (codec != "none")
        assert optimizer.sent_bits == pytest.approx(bits / (step + 1))
        torch.testing.assert_close(x.detach(), wanted.float(), rtol=1e-5, atol=1e-6)


def test_every_refresh_of_the_variance_is_dense(make):
    parameters = tensors((1000,), (7,))
    optimizer = make(signpost.OneBitAdam, parameters, freeze_step=2, variance_refresh_interval=3)
    dense = []
    for step in range(12):
        set_gradients(parameters, step)
        optimizer.step()
        if not optimizer.report.one_bit:
            dense.append(step)
    assert dense == [0, 1, 5, 8, 11]


def test_auto_freezes_once_the_variance_has_settled(make):
    [x] = tensors((1000,))
    optimizer = make(signpost.OneBitAdam, [x], betas=(0.9, 0.9), freeze_step="auto")
    for step in range(200):
        # Settled from step 10 on; the variance is looked at every 10 steps.
        x.grad = torch.full_like(x, 10.0 - step if step < 10 else 0.5)
        optimizer.step()
        if optimizer.report.one_bit:
            break
    # What was before has 0.9^10 of its weight at each look: 55 becomes 4% of 0.25 in 80 steps.
    assert step % 10 == 0 and 40 <= step <= 100


def test_a_floor_raises_the_variance_at_the_freeze(make):
    moves = []
    for floor in (0.0, 0.5):
        [x] = tensors((100,))
        optimizer = make(signpost.OneBitAdam, [x], freeze_step=1, variance_floor=floor)
        x.grad = torch.ones(100)
        x.grad[0] = 1e-3
        optimizer.step()
        before = x[0].item()
        optimizer.step()
        moves.append(abs(x[0].item() - before))
    assert moves[0] > 100 * moves[1]


def test_groups_have_their_own_rates(make):
    def groups():
        a, b, c = tensors((40,), (50,), (60,))
        return [{"params": [a, b], "lr": 0.1}, {"params": [c], "weight_decay": 0.5}]

    train_like_adamw(make, groups(), groups())


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


def write_again(optimizer):
    """What looks for infinities multiplies gradients by 1."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(1)


class GradScalerOf2:
    """What PyTorch 2's GradScaler does around step(); that of 1.13 needs CUDA."""

    def __init__(self, scale, is_unscaled=False):
        self.scale, self.is_unscaled = torch.tensor(scale), is_unscaled

    def step(self, optimizer):
        assert optimizer._step_supports_amp_scaling
        assert "grad_scaler" not in inspect.signature(optimizer.step).parameters
        if not self.is_unscaled:
            write_again(optimizer)
        # PyTorch multiplies by what a second scaler may have left there.
        scale = self.scale * getattr(optimizer, "grad_scale", 1)
        optimizer.grad_scale = None if self.is_unscaled else scale
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf


class GradScalerOf1(torch.cuda.amp.GradScaler):
    """PyTorch 1.13's, as far as it does without CUDA."""

    def __init__(self, scale):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().__init__()
        self._enabled, self._scale = True, torch.tensor([scale])
        self._per_optimizer_states = defaultdict(grad_scaler._refresh_per_optimizer_state)
        self._growth_tracker = torch.tensor(0)

    def _check_inf_per_device(self, optimizer):
        write_again(optimizer)


@pytest.mark.parametrize("scaler", [GradScalerOf1, GradScalerOf2])
def test_a_grad_scaler_s_scale_is_divided_out(make, scaler):
    ours, theirs = tensors(*SHAPES), tensors(*SHAPES)
    a = make(signpost.Adam, ours, lr=0.01)
    b = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0)
    for step in range(5):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        for parameter in ours:
            parameter.grad.mul_(1024)
        scaling = scaler(1024.0)
        scaling.step(a)
        b.step()
        assert_same_step(ours, theirs)


@pytest.mark.parametrize("anew", [0, 1, 2])
@pytest.mark.parametrize("scaler", [GradScalerOf1, GradScalerOf2])
def test_a_step_that_was_refused_unscales_and_clips_each_gradient_once(make, scaler, anew):
    """Tried again with so many new gradients, which come into the memory of those before."""

    def backward(parameters):
        for parameter, numbers in zip(parameters, scaled):
            parameter.grad.copy_(numbers)

    parameters = tensors((30,), (40,))
    groups = [{"params": [parameter]} for parameter in parameters]
    options = dict(freeze_step=9, warm_up_codec="bf16", max_grad_norm=0.5)
    optimizer = make(signpost.OneBitAdam, groups, **options)
    exchanged, reduction = [], optimizer._clipping._reduction
    reduce = reduction.reduce
    reduction.reduce = lambda addresses: exchanged.append(reduce(addresses))
    set_gradients(parameters, 0)
    norm = torch.cat([parameter.grad for parameter in parameters]).norm()
    wanted = [parameter.grad * 0.5 / norm for parameter in parameters]
    scaled = [parameter.grad * 1024 for parameter in parameters]
    scaling = scaler(1024.0)
    backward(parameters)
    optimizer.param_groups[1]["betas"] = (0.8, 0.999)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="beta1 of parameter group 1 is 0.8"):
            scaling.step(optimizer)
    optimizer.param_groups[1]["betas"] = (0.9, 0.999)
    backward(parameters[:anew])
    scaling.step(optimizer)
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
    x.data = x.data.clone()
    with pytest.raises(RuntimeError, match="is not where it was"):
        optimizer.step()
    assert not hasattr(optimizer, "grad_scale")
    del optimizer.grad_scale  # as some do in the end


def test_what_one_rank_alone_fails_at_it_does_before_the_norm_is_exchanged(make):
    x = nn.Parameter(torch.ones(10, dtype=torch.float16))
    optimizer = make(signpost.Adam, [x], max_grad_norm=1.0)
    optimizer._clipping.norm = lambda own: pytest.fail("it was exchanged")
    x.grad = torch.ones(10, dtype=torch.float16)
    with pytest.raises(ValueError, match="is float16 and would underflow"):
        GradScalerOf2(1024.0).step(optimizer)
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
    x.grad = torch.full((10,), 3.0)
    GradScalerOf2(1024.0, is_unscaled=True).step(optimizer)
    assert x.grad[0] == 3


def test_an_overflow_under_a_grad_scaler_skips_the_step(make):
    [x] = tensors((10,))
    before = x.detach().clone()
    optimizer = make(signpost.Adam, [x])
    x.grad = torch.full((10,), math.inf)
    with pytest.warns(UserWarning, match="the gradient of rank 0 is not finite"):
        GradScalerOf2(1024.0).step(optimizer)
    assert optimizer.steps == 1 and torch.equal(x, before)


def test_float16_gradients_are_not_unscaled(make):
    x = nn.Parameter(torch.ones(10, dtype=torch.float16))
    optimizer = make(signpost.Adam, [x])
    x.grad = torch.ones(10, dtype=torch.float16)
    with pytest.raises(ValueError, match="parameter 0 of group 0 is float16 and would underflow"):
        GradScalerOf2(1024.0).step(optimizer)


def test_a_grad_scaler_and_overlap_exclude_each_other(make):
    [x] = tensors((10,))
    optimizer = make(signpost.Adam, [x], overlap=True)
    (1024 * x.sum()).backward()
    with pytest.raises(RuntimeError, match="as the GradScaler has scaled them"):
        GradScalerOf2(1024.0).step(optimizer)


def test_max_grad_norm_counts_all_types_and_layouts_of_gradients(make):
    dense, sparse, half, unused = tensors((30,), (20, 5), (10,), (7,))
    half = nn.Parameter(half.detach().bfloat16())
    optimizer = make(signpost.Adam, [dense, sparse, half, unused], max_grad_norm=1.0)
    dense.grad = torch.full((30,), 2.0)
    rows = torch.tensor([[3, 3, 4]])  # row 3 twice: 2 + 2
    sparse.grad = torch.sparse_coo_tensor(rows, torch.full((3, 5), 2.0), (20, 5))
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
    assert optimizer._gradient(optimizer._tensors[1]).dtype == torch.float32
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
    with pytest.warns(UserWarning, match="the gradient of rank 0 is not finite; 1 chunks"):
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


def test_changes_of_parameters_count_after_a_synchronisation_and_are_refused_before(make):
    for dtype in (torch.float32, torch.bfloat16):
        x = nn.Parameter(torch.zeros(100, dtype=dtype))
        optimizer = make(signpost.ZeroOneAdam, [x], **LOCAL)
        while optimizer.steps < 6:
            x.grad = torch.zeros_like(x)
            optimizer.step()
        with torch.no_grad():
            x.fill_(5)
        while optimizer.steps < STEPS:
            assert torch.equal(x, torch.full_like(x, 5))
            x.grad.zero_()
            optimizer.step()
        while optimizer.is_synchronised:
            optimizer.step()
        with torch.no_grad():
            x.fill_(3)
        refusal = "parameter 0 of group 0 was changed .* change parameters after a step with"
        with pytest.raises(RuntimeError, match=refusal):
            optimizer.step()


def test_slices_of_one_tensor_are_not_taken_for_changed(make):
    slices = [nn.Parameter(part) for part in torch.zeros(200).split(100)]
    optimizer = make(signpost.ZeroOneAdam, slices, **LOCAL)
    while optimizer.steps < STEPS:
        optimizer.step()


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


def test_a_local_step_leaves_out_what_is_not_finite(make):
    good, bad = tensors((100,), (100,))
    optimizer = make(signpost.ZeroOneAdam, [good, bad], **LOCAL)
    for step in range(STEPS):
        set_gradients([good, bad], step)
        if step < 6:
            optimizer.step()
            continue
        before = good.detach().clone(), bad.detach().clone()
        bad.grad[3] = math.nan
        message = f"step {step}: the gradient of rank 0 is not finite; 1 blocks take no part in it"
        with pytest.warns(UserWarning, match=message):
            optimizer.step()
        assert not torch.equal(good, before[0])
        assert bad.isfinite().all()


def test_max_grad_norm_must_be_positive(make):
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_grad_norm is .*, wanted a positive number"):
            make(signpost.Adam, tensors((4,)), max_grad_norm=wrong)


def test_max_grad_norm_and_overlap_exclude_each_other(make):
    with pytest.raises(ValueError, match="max_grad_norm needs all gradients"):
        make(signpost.Adam, tensors((4,)), max_grad_norm=1.0, overlap=True)


def test_groups_have_their_own_betas_and_eps(make):
    def groups():
        a, b, c = tensors((40,), (50,), (60,))
        return [{"params": [a], "betas": (0.5, 0.9)}, {"params": [b, c], "eps": 1e-3}]

    train_like_adamw(make, groups(), groups())


@pytest.mark.parametrize(
    "kind, options, why",
    [
        (signpost.Adam, {"codec": "int8"}, "with codec 'int8' .* with codec 'fp32'"),
        (
            signpost.OneBitAdam,
            {"freeze_step": 5, "variance_codec": "bf16"},
            "with variance_codec 'bf16' .* with warm_up_codec and variance_codec 'fp32'",
        ),
        (
            signpost.OneBitLamb,
            {"freeze_step": 5, "warm_up_codec": "int4", "variance_codec": "int8"},
            "with warm_up_codec 'int4' and variance_codec 'int8'",
        ),
        (signpost.ZeroOneAdam, {"var_freeze_step": 5}, "with codec 'onebit' .* with codec and"),
    ],
)
def test_another_beta1_where_gradients_lose_something_is_refused_at_once(make, kind, options, why):
    def groups():
        x, y = tensors((10,), (20,))
        return [{"params": [x]}, {"params": [y], "betas": (0.8, 0.999)}]

    with pytest.raises(ValueError, match=rf"group 1 has betas\[0\] 0.8, and group 0 has 0.9: {why}"):
        make(kind, groups(), **options)
    exact = {name: "fp32" if "codec" in name else value for name, value in options.items()}
    if kind is signpost.ZeroOneAdam:
        exact["codec"] = "fp32"
    optimizer = make(kind, groups(), **exact)
    set_gradients([p for group in optimizer.param_groups for p in group["params"]], 0)
    optimizer.step()


def test_learning_rate_schedulers_work(make):
    ours, theirs = tensors(*SHAPES), tensors(*SHAPES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pairs = []
        for optimizer in (make(signpost.Adam, ours), torch.optim.AdamW(theirs, weight_decay=0)):
            one_cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=20)
            pairs.append((optimizer, one_cycle))
        for step in range(20):
            for parameters, (optimizer, scheduler) in zip((ours, theirs), pairs):
                set_gradients(parameters, step)
                optimizer.step()
                scheduler.step()
            assert_same_step(ours, theirs)


def test_closure_is_called_with_gradients_enabled_and_its_loss_returned(make):
    [x] = tensors((10,))
    optimizer = make(signpost.Adam, [x], lr=0.1)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = (x**2).sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert calls == losses
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad_clears_gradients(make, set_to_none):
    parameters = tensors((10,))
    optimizer = make(signpost.Adam, parameters)
    set_gradients(parameters, 0)
    optimizer.zero_grad(set_to_none=set_to_none)
    gradient = parameters[0].grad
    assert (gradient is None) if set_to_none else (gradient == 0).all()


def test_gradients_accumulate_between_steps(make):
    [x], [y] = tensors((10,)), tensors((10,))
    a, b = make(signpost.Adam, [x], lr=0.1), make(signpost.Adam, [y], lr=0.1)
    for _ in range(3):
        a.zero_grad()
        for part in (x[:4], x[4:]):
            (part**2).sum().backward()
        a.step()
        b.zero_grad()
        (y**2).sum().backward()
        b.step()
    assert torch.equal(x, y)


def test_a_parameter_without_a_gradient_counts_as_one_with_zeros(make):
    def every_third_step(parameters, step):
        set_gradients(parameters, step)
        if step % 3 == 1:
            parameters[1].grad.zero_()

    def none_every_third_step(parameters, step):
        every_third_step(parameters, step)
        if step % 3 == 1 and parameters is not theirs:
            parameters[1].grad = None

    ours, theirs = tensors((30,), (40,)), tensors((30,), (40,))
    a, b = make(signpost.Adam, ours), make(signpost.Adam, theirs)
    for step in range(9):
        none_every_third_step(ours, step)
        every_third_step(theirs, step)
        a.step()
        b.step()
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs))


def test_frozen_and_empty_parameters_are_left_alone(make):
    x, frozen, empty = tensors((10,), (10,), (0, 3))
    frozen.requires_grad_(False)
    before = frozen.clone()
    optimizer = make(signpost.Adam, [x, frozen, empty], lr=0.1, weight_decay=0.1)
    set_gradients([x, empty], 0)
    optimizer.step()
    assert torch.equal(frozen, before)


def test_a_parameter_that_is_frozen_later_is_refused(make):
    x, y = tensors((10,), (10,))
    optimizer = make(signpost.Adam, [x, y])
    set_gradients([x, y], 0)
    y.requires_grad_(False)
    optimizer.step()  # with the gradient that it had
    optimizer.zero_grad(set_to_none=True)
    set_gradients([x], 1)
    before = x.clone()
    with pytest.raises(RuntimeError, match="parameter 1 of group 0 was frozen after the optimizer"):
        optimizer.step()
    assert torch.equal(x, before)
    y.requires_grad_()
    optimizer.step()


class CtrlC(Exception):
    pass


def interrupt_behind(monkeypatch, owner, name, calls=True):
    """Has the function raise once, behind what it does, or instead of it."""
    function = getattr(owner, name)

    def interrupted(*args):
        monkeypatch.setattr(owner, name, function)
        if calls:
            function(*args)
        raise CtrlC

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("behind_exchange", [False, True])
def test_a_step_that_was_taken_counts_though_its_end_is_interrupted(
    make, monkeypatch, overlap, behind_exchange
):
    """Otherwise its values, of which a parameter in bf16 has none yet, would be taken back."""
    crcs = []
    for at in (None, 2):
        [x] = tensors((300,))
        x = nn.Parameter(x.detach().bfloat16())
        optimizer = make(signpost.Adam, [x], lr=0.1, overlap=overlap)
        for step in range(5):
            optimizer.zero_grad()
            (x * (step + 1)).sum().backward()
            if step != at:
                optimizer.step()
                continue
            before = x.clone()
            if behind_exchange:
                interrupt_behind(monkeypatch, Session, "finish_step" if overlap else "step")
            else:
                interrupt_behind(monkeypatch, _job_optimizer, "after_step", calls=False)
            with pytest.raises(CtrlC):
                optimizer.step()
            assert optimizer.steps == 3
            assert torch.equal(x, before) != behind_exchange
        crcs.append(optimizer.parameters_crc32c())
    assert crcs[0] == crcs[1]


def test_the_norm_of_an_interrupted_step_clips_no_other(make, monkeypatch):
    [x] = tensors((100,))
    optimizer = make(signpost.Adam, [x], max_grad_norm=1.0)
    x.grad = torch.full((100,), 1.0)
    interrupt_behind(monkeypatch, Session, "step")
    with pytest.raises(CtrlC):
        optimizer.step()
    x.grad = torch.full((100,), 5.0)
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(50)


def test_a_frozen_parameter_that_gets_a_gradient_is_refused(make):
    x, frozen = tensors((10,), (10,))
    frozen.requires_grad_(False)
    optimizer = make(signpost.Adam, [x, frozen])
    frozen.requires_grad_(True)
    set_gradients([x, frozen], 0)
    with pytest.raises(RuntimeError, match="was frozen when the optimizer was made"):
        optimizer.step()


def test_nothing_to_train_is_refused(make):
    [empty] = tensors((0,))
    with pytest.raises(ValueError, match="nothing to train"):
        make(signpost.Adam, [empty])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.output = nn.Linear(6, 11)
        self.output.weight = self.embedding.weight

    def forward(self, x):
        return self.output(self.scale * self.embedding(x))


def test_tied_weights_and_scalars_train_as_with_adamw(make):
    def backward(parameters, step):
        model = ours if parameters[0] is ours.scale else theirs
        for parameter in parameters:
            parameter.grad = None
        bytes_in = torch.arange(8) + step % 3
        nn.functional.cross_entropy(model(bytes_in), bytes_in).backward()

    ours, theirs = Tied(), Tied()
    train_like_adamw(make, ours.parameters(), theirs.parameters(), prepare=backward)
    assert ours.output.weight is ours.embedding.weight


def test_a_parameter_that_is_named_twice_is_trained_once(make):
    [x], [y] = tensors((10,)), tensors((10,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own
        a = make(signpost.Adam, [x, x])
    b = make(signpost.Adam, [y])
    for step in range(3):
        set_gradients([x], step)
        set_gradients([y], step)
        a.step()
        b.step()
    assert torch.equal(x, y)


def test_sparse_gradients_are_taken_as_dense(make):
    sparse, dense = nn.Embedding(1000, 3, sparse=True), nn.Embedding(1000, 3)
    dense.load_state_dict(sparse.state_dict())
    optimizers = [make(signpost.Adam, model.parameters()) for model in (sparse, dense)]
    for step in range(5):
        for model, optimizer in zip((sparse, dense), optimizers):
            optimizer.zero_grad()
            (model(torch.tensor([step, 7, 7])) ** 2).sum().backward()
            optimizer.step()
    assert sparse.weight.grad.is_sparse
    assert torch.equal(sparse.weight, dense.weight)


# Of numbers that are all alike a gamma of 1 loses nothing, so one-bit steps are as dense ones; LAMB's
# trust ratio is that of the parameters, close to 1. The last of 0/1 Adam's intervals is of 8 steps.
@pytest.mark.parametrize(
    "kind, own",
    [
        (signpost.Adam, {}),
        (signpost.OneBitAdam, dict(freeze_step=40, gamma=1.0)),
        (signpost.OneBitLamb, dict(freeze_step=40, gamma=1.0)),
        (signpost.ZeroOneAdam, dict(var_freeze_step=40, gamma=1.0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_have_fp32_values_behind_them(make, dtype, kind, own):
    x = nn.Parameter(torch.ones(10, dtype=dtype))
    optimizer = make(kind, [x], lr=1e-4, **own)  # too little to be subtracted from 1
    for _ in range(200):
        x.grad = torch.ones_like(x)
        optimizer.step()
    assert optimizer.is_synchronised
    assert x.dtype == dtype
    wanted = torch.full((10,), 0.98)
    torch.testing.assert_close(x.detach().float(), wanted, rtol=torch.finfo(dtype).eps, atol=0)


def test_values_that_the_program_writes_into_a_low_precision_parameter_are_taken(make):
    x = nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))
    optimizer = make(signpost.Adam, [x], lr=0.5)
    with torch.no_grad():
        x.fill_(3)
    x.grad = torch.ones_like(x)
    optimizer.step()
    assert torch.equal(x, torch.full_like(x, 2.5))


# Those that have fp32 values behind them.
@pytest.fixture(params=["bf16", "fp16", "transposed"])
def copied(request):
    """Makes parameters [4, 3] of one value."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(request.param, torch.float32)
    return lambda value: nn.Parameter(torch.full((3, 4), value, dtype=dtype).t())


def test_values_that_are_written_behind_autograd_s_back_are_taken(make, copied):
    x = copied(3.0)
    optimizer = make(signpost.Adam, [x], lr=0.5)
    x.data.div_(3)
    x.grad = torch.ones_like(x)
    optimizer.step()
    assert torch.equal(x, torch.full_like(x, 0.5))
    x.data = torch.full_like(x, 2.0)
    x.grad = torch.zeros_like(x)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(x, torch.full_like(x, 2.0))


def test_the_same_values_written_again_change_no_bit(make, copied):
    checksums = []
    for rewrites in (False, True):
        x = copied(1.0)
        optimizer = make(signpost.Adam, [x], lr=1e-4)  # too little to be subtracted from 1
        for _ in range(5):
            if rewrites:
                with torch.no_grad():
                    x.copy_(x.clone())
                    x[0] = x[0] + 0
            x.grad = torch.ones_like(x)
            optimizer.step()
        checksums.append(optimizer.parameters_crc32c())
    assert checksums[0] == checksums[1]


def test_only_the_values_that_were_written_are_rounded(make, copied):
    x = copied(1.0)
    optimizer = make(signpost.Adam, [x], lr=1e-4)
    for _ in range(200):
        with torch.no_grad():
            x[0, 0] = 1.0
        x.grad = torch.ones_like(x)
        optimizer.step()
    wanted = torch.full((4, 3), 0.98)
    wanted[0, 0] = 1.0
    rounding = torch.finfo(x.dtype).eps
    torch.testing.assert_close(x.detach().float(), wanted, rtol=rounding, atol=2e-4)


def test_an_embedding_with_a_max_norm_that_is_never_reached_trains_as_one_without(make):
    checksums = []
    for max_norm in (None, 1e6):
        embedding = nn.Embedding(4, 8, max_norm=max_norm).bfloat16()
        nn.init.constant_(embedding.weight, 64.0)
        optimizer = make(signpost.Adam, embedding.parameters(), lr=0.05)
        for _ in range(20):
            optimizer.zero_grad()
            embedding(torch.tensor([0, 1])).float().sum().backward()
            optimizer.step()
        checksums.append(optimizer.parameters_crc32c())
    assert checksums[0] == checksums[1]
    assert embedding.weight[0, 0] == 63


def test_a_model_s_own_state_loaded_behind_its_optimizer_s_changes_no_bit(make):
    model = nn.Linear(30, 4).bfloat16()
    optimizer = make(signpost.Adam, model.parameters(), lr=1e-4)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    of_model, of_optimizer = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    optimizer.step()
    wanted = optimizer.parameters_crc32c()
    optimizer.load_state_dict(of_optimizer)
    model.load_state_dict(of_model)
    optimizer.step()
    assert optimizer.parameters_crc32c() == wanted


def test_values_that_are_written_before_a_state_is_saved_are_in_it(make, tmp_path, copied):
    x = copied(0.0)
    optimizer = make(signpost.Adam, [x])
    x.grad = torch.ones_like(x)
    optimizer.step()
    before = optimizer.parameters_crc32c()
    x.data.fill_(5)
    assert optimizer.parameters_crc32c() != before
    x.data.fill_(6)
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(x, torch.full_like(x, 6))
    x.data.fill_(7)
    optimizer.checkpoint(str(tmp_path))
    resumed = copied(0.0)
    make(signpost.Adam, [resumed], resume=str(tmp_path))
    assert torch.equal(resumed, torch.full_like(x, 7))


def test_what_a_step_would_refuse_is_not_saved(make, tmp_path):
    [x] = tensors((10,))
    optimizer = make(signpost.Adam, [x])
    x.data = x.data.clone()
    for save in (
        optimizer.state_dict,
        optimizer.parameters_crc32c,
        lambda: optimizer.checkpoint(str(tmp_path)),
    ):
        with pytest.raises(RuntimeError, match="parameter 0 of group 0 is not where it was"):
            save()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_of_another_shape_is_refused(make, dtype):
    x = nn.Parameter(torch.ones(10, dtype=dtype))
    optimizer = make(signpost.Adam, [x])
    x.data = x.data[:5]  # at the same address
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 is not where it was in memory"):
        optimizer.step()


def test_parameters_that_are_not_contiguous_are_trained(make):
    def transposed():
        return [nn.Parameter(torch.arange(12.0).reshape(3, 4).t()), *tensors((5,))]

    ours = train_like_adamw(make, transposed(), transposed()).param_groups[0]["params"]
    assert not ours[0].is_contiguous()


def test_gradients_that_are_not_contiguous_are_read_as_they_are(make):
    def transposed_gradient(parameters, step):
        set_gradients(parameters, step)
        parameters[0].grad = parameters[0].grad.t().contiguous().t()

    train_like_adamw(make, tensors((6, 7)), tensors((6, 7)), prepare=transposed_gradient)


def test_contiguous_fp32_parameters_are_trained_where_they_are(make):
    [x] = tensors((10,))
    before = x.detach().clone()
    view, address = x.detach(), x.data_ptr()
    optimizer = make(signpost.Adam, [x])
    set_gradients([x], 0)
    optimizer.step()
    assert x.data_ptr() == address
    assert not torch.equal(view, before)


def test_a_parameter_that_has_moved_is_refused(make):
    [x] = tensors((10,))
    optimizer = make(signpost.Adam, [x])
    x.data = x.data.clone()
    set_gradients([x], 0)
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 is not where it was in memory"):
        optimizer.step()


def test_a_parameter_that_has_been_transposed_where_it_is_is_refused(make):
    [x] = tensors((3, 3))
    optimizer = make(signpost.Adam, [x])
    x.data = x.data.t()
    set_gradients([x], 0)
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 is not where it was in memory"):
        optimizer.step()


CHANGED_GROUPS = {
    "replaced": lambda groups, new: groups[1]["params"].__setitem__(0, new),
    "appended": lambda groups, new: groups[1]["params"].append(new),
    "removed": lambda groups, new: groups[1]["params"].pop(),
    "grouped": lambda groups, new: groups.insert(1, {**groups[1], "params": [new]}),
}


@pytest.mark.parametrize("change", CHANGED_GROUPS.values(), ids=CHANGED_GROUPS)
def test_parameters_of_a_group_stay_what_they_are(make, change):
    x, y, new = tensors((2,), (3,), (4,))
    optimizer = make(signpost.Adam, [{"params": [x]}, {"params": [y]}])
    change(optimizer.param_groups, new)
    with pytest.raises(RuntimeError, match="the parameters of group 1 are not those with which"):
        optimizer.step()


def tied_by_data(dtype):
    embedding = torch.ones(4, 3, dtype=dtype)
    return [nn.Parameter(embedding), nn.Parameter(embedding.data)]


def overlapping_slices():
    flat = torch.zeros(8)
    return [nn.Parameter(flat[4:]), nn.Parameter(flat[:5])]


def overlapping_columns():
    matrix = torch.zeros(3, 6)
    return [nn.Parameter(matrix[:, :4]), nn.Parameter(matrix[:, 3:])]


def one_inside_another():
    flat = torch.zeros(100)
    return [nn.Parameter(flat), nn.Parameter(torch.zeros(7)), nn.Parameter(flat[90:])]


@pytest.mark.parametrize(
    "parameters",
    [
        tied_by_data(torch.float32),
        tied_by_data(torch.bfloat16),
        overlapping_slices(),
        overlapping_columns(),
        one_inside_another(),
    ],
)
def test_parameters_with_the_same_memory_are_refused(make, parameters):
    named = {f"p{i}": parameter for i, parameter in enumerate(parameters)}
    first, last = "p0", f"p{len(parameters) - 1}"
    pair = f"^({first} and {last}|{last} and {first}) are two Parameters with the same memory"
    with pytest.raises(ValueError, match=pair):
        make(signpost.Adam, named.items())
    with pytest.raises(ValueError, match="parameter 0 of group . are two .* share the Parameter"):
        make(signpost.Adam, [{"params": [parameter]} for parameter in parameters])


def test_parameters_that_lie_in_one_tensor_and_do_not_overlap_are_trained(make):
    def parts():
        flat, matrix = torch.arange(10.0), torch.arange(12.0).reshape(3, 4)
        views = [flat[:5], flat[5:], matrix[:, :3], matrix[:, 3:]]
        return [nn.Parameter(view) for view in views]

    train_like_adamw(make, parts(), parts())


def test_an_expanded_parameter_is_refused(make):
    x = nn.Parameter(torch.ones(1).expand(4))
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 \[4\] is expanded"):
        make(signpost.Adam, [x])


def test_autograd_notices_that_a_step_has_changed_parameters(make):
    [x] = tensors((10,))
    optimizer = make(signpost.Adam, [x])
    loss = (x**2).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "parameter, problem",
    [
        (torch.zeros(3, dtype=torch.float64), "torch.float64"),
        (torch.zeros(3, dtype=torch.complex64), "torch.complex64"),
        (
            torch.zeros(3, device="meta"),
            "is on meta; Signpost trains tensors on the CPU or",
        ),
    ],
)
def test_what_cannot_be_trained_is_named(make, parameter, problem):
    [x] = tensors((2,))
    with pytest.raises(TypeError, match=r"parameter 1 of group 0 \[3\] is") as raised:
        make(signpost.Adam, [x, nn.Parameter(parameter)])
    assert problem in str(raised.value)


def test_parameters_may_have_names(make):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = make(signpost.Adam, model.named_parameters())
    set_gradients(model.parameters(), 0)
    optimizer.step()
    for parameter, old in zip(model.parameters(), before):
        assert not torch.equal(parameter, old)
    model[1].weight.data = model[1].weight.data.clone()
    with pytest.raises(RuntimeError, match="1.weight is not where it was in memory"):
        optimizer.step()


@pytest.mark.parametrize(
    "parameter, name", [("weight", "weight, parameter 0 of group 1"), ("bias", "bias")]
)
def test_parameters_of_two_models_may_have_the_same_names(make, parameter, name):
    models = [nn.Linear(2, 1), nn.Linear(3, 1)]
    models[0].bias.requires_grad_(False)  # so that its name is free
    optimizer = make(signpost.Adam, [{"params": model.named_parameters()} for model in models])
    moved = getattr(models[1], parameter)
    moved.data = moved.data.clone()
    with pytest.raises(RuntimeError, match=f"^{name} is not where it was"):
        optimizer.step()


def test_parameters_of_groups_may_have_names_and_saved_states_have_them_too(make):
    x, y = tensors((2,), (3,))
    optimizer = make(signpost.Adam, [{"params": [("embedding", x)]}, {"params": [y], "lr": 0.1}])
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    other = make(signpost.Adam, [{"params": [x]}, {"params": [y], "lr": 0.1}])
    here = r"tensor 0 is 'parameter 0 of group 0' \[2\] here but 'embedding' \[2\]"
    with pytest.raises(FailedPreconditionError, match=here):
        other.load_state_dict(state)


def test_a_gpu_that_cannot_be_used_is_told_of_before_joining(make, monkeypatch, world):
    monkeypatch.setattr(_device, "gpu_of", lambda tensor: 99)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(_device, "current_stream", lambda gpu: stream)
    monkeypatch.setattr(world, "aggregators", ["127.0.0.1:1"])  # where none is
    with pytest.raises(
        InvalidArgumentError, match="built without CUDA: build it with|GPU 99 cannot be used: "
    ):
        make(signpost.Adam, tensors((10,)))


def test_a_gradient_that_is_not_finite_is_warned_of_and_skipped(make):
    parameters = tensors((10,))
    before = parameters[0].detach().clone()
    optimizer = make(signpost.Adam, parameters)
    set_gradients(parameters, 0)
    parameters[0].grad[3] = float("nan")
    with pytest.warns(UserWarning, match="step 0: the gradient of rank 0 is not finite"):
        optimizer.step()
    assert torch.equal(parameters[0], before)


def test_parameters_cannot_be_added(make):
    x, y = tensors((10,), (10,))
    optimizer = make(signpost.Adam, [x])
    with pytest.raises(RuntimeError, match="cannot get more parameters"):
        optimizer.add_param_group({"params": [y]})


def test_a_copy_has_no_job(make):
    optimizer = copy.deepcopy(make(signpost.Adam, tensors((10,))))
    with pytest.raises(RuntimeError, match="without a job"):
        optimizer.step()


def test_a_copy_loads_nothing(make):
    optimizer = make(signpost.Adam, tensors((10,)))
    with pytest.raises(RuntimeError, match="without a job"):
        copy.deepcopy(optimizer).load_state_dict(optimizer.state_dict())


def test_a_state_is_not_loaded_while_what_is_trained_is_frozen(make):
    x, y = tensors((10,), (10,))
    optimizer = make(signpost.Adam, [x, y])
    state = optimizer.state_dict()
    y.requires_grad_(False)
    frozen = "parameter 1 of group 0 has requires_grad=False"
    with pytest.raises(ValueError, match=frozen):
        optimizer.load_state_dict(state)
    y.requires_grad_()
    optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    "option", [{"maximize": True}, {"amsgrad": True}, {"learning_rate": 9.0}, {"momentum": 0}]
)
def test_options_of_a_group_that_nobody_reads_are_refused(make, option):
    [name] = option
    x, y = tensors((2,), (3,))
    with pytest.raises(ValueError, match=f"group 1 has {name} .*; wanted lr, betas, eps"):
        make(signpost.Adam, [{"params": [x]}, {"params": [y], **option}])


def test_of_a_tensor_that_nobody_reads_the_shape_is_shown(make):
    [x] = tensors((3, 2))
    with pytest.raises(ValueError, match=r"group 0 has exp_avg_mask of Tensor\[3, 2\], which"):
        make(signpost.Adam, [{"params": [x], "exp_avg_mask": torch.ones(3, 2)}])


def test_groups_that_pytorch_has_made_are_taken(make):
    [x] = tensors((10,))
    other = torch.optim.Adam([x])
    torch.optim.lr_scheduler.OneCycleLR(other, 0.01, total_steps=20)
    torch.optim.swa_utils.SWALR(other, swa_lr=0.05)
    optimizer = make(signpost.Adam, other.param_groups)
    optimizer.param_groups[0]["mine"] = 1
    optimizer.step()


def test_wrong_options_are_named(make):
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="freeze_step is .*, wanted at least 1"):
            make(signpost.OneBitAdam, tensors((10,)), freeze_step=wrong)
    with pytest.raises(ValueError, match="freeze_step is .*, wanted at most"):
        make(signpost.OneBitAdam, tensors((10,)), freeze_step=2**64)
    with pytest.raises(ValueError, match="freeze_step is 'Auto', wanted a number or \"auto\""):
        make(signpost.OneBitAdam, tensors((10,)), freeze_step="Auto")
    share = r"freeze_step is 0.15, wanted a whole number of steps, such as int\(0.15 \* total_steps"
    with pytest.raises(TypeError, match=share):
        make(signpost.OneBitAdam, tensors((10,)), freeze_step=0.15)
    with pytest.raises(TypeError, match="freeze_step is 1000.0, wanted a whole number$"):
        make(signpost.OneBitAdam, tensors((10,)), freeze_step=1e3)
    with pytest.raises(TypeError, match="bias_correction is None, wanted True or False"):
        make(signpost.Adam, tensors((10,)), bias_correction=None)
    for name in ("lr", "weight_decay"):
        for wrong in (-0.1, math.inf):
            refusal = f"group 1 has {name} {wrong}, wanted a finite number, 0 or more"
            x, y = tensors((10,), (10,))
            with pytest.raises(ValueError, match=refusal):
                make(signpost.Adam, [{"params": [x]}, {"params": [y], name: wrong}])
    with pytest.raises(ValueError, match="variance_refresh_interval is -1"):
        make(signpost.OneBitAdam, tensors((10,)), freeze_step=1, variance_refresh_interval=-1)
    with pytest.raises(ValueError, match="group 0 has lr nan"):
        make(signpost.Adam, tensors((10,)), lr=math.nan)
    with pytest.raises(signpost.SignpostError, match="variance_refresh_interval is 1"):
        make(signpost.OneBitAdam, tensors((10,)), freeze_step=1, variance_refresh_interval=1)
    with pytest.raises(signpost.SignpostError, match="gamma is 1.6"):
        make(signpost.OneBitAdam, tensors((10,)), freeze_step=1, gamma=1.6)
    for wrong in ({"betas": (1.0, 0.999)}, {"betas": (0.9, -0.1)}, {"eps": 0.0}):
        with pytest.raises(ValueError, match="group 0 has betas .*; wanted"):
            make(signpost.Adam, tensors((10,)), **wrong)


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("max_coeff", 0.001),
        ("min_coeff", 0),
        ("coeff_beta", 1),
        ("factor_max", 0.5),
        ("factor_min", 0),
        ("factor_threshold", 1),
    ],
)
def test_wrong_options_of_lamb_are_named(make, name, wrong):
    with pytest.raises(signpost.SignpostError, match=f"option {name} is {wrong}, wanted"):
        make(signpost.OneBitLamb, tensors((10,)), freeze_step=1, **{name: wrong})
    with pytest.raises(TypeError, match=f"{name} is None, wanted a number"):
        make(signpost.OneBitLamb, tensors((10,)), freeze_step=1, **{name: None})


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("var_freeze_step", 0),
        ("var_update_scaler", 0),
        ("var_update_scaler", 2**32),
        ("local_step_scaler", -1),
        ("local_step_clipper", 0),
        ("local_step_clipper", 2**32),
    ],
)
def test_wrong_options_of_zero_one_adam_are_named(make, name, wrong):
    options = {**LOCAL, name: wrong}
    with pytest.raises(ValueError, match=f"{name} is {wrong}, wanted at"):
        make(signpost.ZeroOneAdam, tensors((10,)), **options)


def test_zero_one_adam_says_what_the_library_does_not_take(make):
    for name, wrong in (("var_freeze_step", 2**50), ("local_step_clipper", 2**20)):
        options = {**LOCAL, name: wrong}
        with pytest.raises(signpost.SignpostError, match=f"{name.replace('var_', '')} .*"):
            make(signpost.ZeroOneAdam, tensors((10,)), **options)
    with pytest.raises(TypeError, match="var_freeze_step is 'auto', wanted a whole number"):
        make(signpost.ZeroOneAdam, tensors((10,)), var_freeze_step="auto")


def test_a_local_step_scaler_of_none_is_as_many_steps_as_before_the_freeze(make):
    parameters = tensors((100,))
    options = dict(var_freeze_step=3, var_update_scaler=1, local_step_clipper=2)
    optimizer = make(signpost.ZeroOneAdam, parameters, **options)
    local = []
    for step in range(12):
        set_gradients(parameters, step)
        optimizer.step()
        if not optimizer.is_synchronised:
            local.append(step)
    assert local == [6, 8, 10]


def test_a_bf16_warm_up_sends_half_the_bytes(make):
    parameters = tensors((100_000,))
    sent = []
    for options in ({}, {"warm_up_codec": "bf16"}):
        optimizer = make(signpost.OneBitAdam, parameters, freeze_step=10, **options)
        set_gradients(parameters, 0)
        optimizer.step()
        sent.append(optimizer.report.sent_bytes)
        optimizer.leave()
    assert 400_000 < sent[0] < 420_000
    assert 200_000 < sent[1] < 220_000


def test_processes_that_load_data_are_forked_from_a_job_without_harm(make):
    [x] = tensors((8,))
    optimizer = make(signpost.Adam, [x])
    data = torch.utils.data.TensorDataset(torch.randn(16, 8))
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2):
        x.grad = batch.sum(0)
        optimizer.step()
    assert optimizer.steps == 4


FREEZE_STEP, SAVED_AT, STEPS = 4, 7, 12
# Steps 6 and 7 are an interval, and so are 8 to 11: SAVED_AT is between two synchronisations.
LOCAL = dict(
    var_freeze_step=FREEZE_STEP, var_update_scaler=1, local_step_scaler=2, local_step_clipper=4
)
ONE_BIT = dict(freeze_step=FREEZE_STEP)


AS_DEEPSPEED = dict(compat="deepspeed")

EACH = pytest.mark.parametrize(
    "kind, own",
    [
        (signpost.OneBitAdam, ONE_BIT),
        (signpost.OneBitLamb, ONE_BIT),
        (signpost.OneBitLamb, {**ONE_BIT, "codec": "int8"}),
        (signpost.ZeroOneAdam, LOCAL),
        (signpost.OneBitAdam, {**ONE_BIT, **AS_DEEPSPEED}),
        (signpost.OneBitLamb, {**ONE_BIT, **AS_DEEPSPEED}),
        # Ranks synchronise in step 5, of which the number is 6, then in 7 and 11.
        (signpost.ZeroOneAdam, {**LOCAL, "local_step_scaler": 1, **AS_DEEPSPEED}),
    ],
)


def train(make, kind, parameters, saved_at=None, directory=None, **options):
    """Goes on to STEPS; at `saved_at` it saves, and with no directory to resume stops."""
    optimizer = make(kind, parameters, lr=0.1, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.9**step, last_epoch=optimizer.steps - 1
    )
    while optimizer.steps < STEPS:
        set_gradients(parameters, optimizer.steps)
        optimizer.step()
        scheduler.step()
        if optimizer.steps == saved_at:
            if directory is not None:
                optimizer.checkpoint(str(directory))
            return optimizer
    return optimizer


def resumable():
    x, y = tensors((5000,), (3, 4))
    return [x, y, nn.Parameter(torch.full((7,), 0.5, dtype=torch.bfloat16))]


@EACH
@pytest.mark.parametrize("saved_at", [2, FREEZE_STEP, SAVED_AT])
def test_a_job_that_resumes_has_the_bits_of_one_that_did_not_end(
    make, tmp_path, saved_at, kind, own
):
    uninterrupted, interrupted = resumable(), resumable()
    wanted = train(make, kind, uninterrupted, **own).parameters_crc32c()
    train(make, kind, interrupted, saved_at, tmp_path, **own).leave()
    with torch.no_grad():
        for parameter in interrupted:
            parameter.zero_()
    resumed = train(make, kind, interrupted, resume=str(tmp_path), **own)
    assert resumed.steps == STEPS
    assert resumed.parameters_crc32c() == wanted
    assert all(torch.equal(a, b) for a, b in zip(uninterrupted, interrupted))


@EACH
@pytest.mark.parametrize("saved_at", [2, FREEZE_STEP, SAVED_AT])
def test_state_dict_leads_back_to_the_same_bits(make, saved_at, kind, own):
    wanted = train(make, kind, resumable(), **own).parameters_crc32c()
    parameters = resumable()
    saved = train(make, kind, parameters, saved_at, **own)
    is_synchronised = saved.is_synchronised
    assert is_synchronised == (kind is not signpost.ZeroOneAdam or saved_at != SAVED_AT)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    saved.leave()
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()

    optimizer = make(kind, parameters, lr=1, **own)
    file.seek(0)
    optimizer.load_state_dict(copy.deepcopy(torch.load(file)))
    assert optimizer.steps == saved_at
    assert optimizer.is_synchronised == is_synchronised
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**saved_at)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.9**step, last_epoch=saved_at - 1
    )
    while optimizer.steps < STEPS:
        set_gradients(parameters, optimizer.steps)
        optimizer.step()
        scheduler.step()
    assert optimizer.parameters_crc32c() == wanted


@pytest.fixture(
    params=[
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    ]
)
def scheduler_of(request):
    """Makes schedulers whose rates follow from those before, or that change betas too."""
    return request.param


def rates_until(step, optimizer, scheduler):
    """Of all steps that it takes until there."""
    parameters, rates = optimizer.param_groups[0]["params"], []
    while optimizer.steps < step:
        rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
        set_gradients(parameters, optimizer.steps)
        optimizer.step()
        scheduler.step()
    return rates


def test_a_scheduler_is_brought_to_where_a_job_resumes(make, tmp_path, scheduler_of):
    whole = make(signpost.OneBitAdam, tensors((10,)), lr=0.1, **ONE_BIT)
    wanted = rates_until(STEPS, whole, scheduler_of(whole))
    saved = make(signpost.OneBitAdam, tensors((10,)), lr=0.1, **ONE_BIT)
    rates_until(SAVED_AT, saved, scheduler_of(saved))
    saved.checkpoint(str(tmp_path))
    resumed = make(signpost.OneBitAdam, tensors((10,)), lr=0.1, resume=str(tmp_path), **ONE_BIT)
    scheduler = scheduler_of(resumed)
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        while scheduler.last_epoch < resumed.steps:
            scheduler.step()
    assert rates_until(STEPS, resumed, scheduler) == wanted[SAVED_AT:]
    assert resumed.parameters_crc32c() == whole.parameters_crc32c()


def test_a_scheduler_goes_on_from_its_own_state_dict(make, scheduler_of):
    whole = make(signpost.OneBitAdam, tensors((10,)), lr=0.1, **ONE_BIT)
    wanted = rates_until(STEPS, whole, scheduler_of(whole))
    saved = make(signpost.OneBitAdam, tensors((10,)), lr=0.1, **ONE_BIT)
    scheduler = scheduler_of(saved)
    rates_until(SAVED_AT, saved, scheduler)
    states = copy.deepcopy((saved.state_dict(), scheduler.state_dict()))
    other = make(signpost.OneBitAdam, tensors((10,)), lr=0.1, **ONE_BIT)
    scheduler = scheduler_of(other)
    other.load_state_dict(states[0])
    scheduler.load_state_dict(states[1])
    assert rates_until(STEPS, other, scheduler) == wanted[SAVED_AT:]
    assert other.parameters_crc32c() == whole.parameters_crc32c()


def test_state_dict_with_compat_leads_nowhere_else(make):
    state = make(signpost.OneBitAdam, tensors((8,)), **ONE_BIT, **AS_DEEPSPEED).state_dict()
    plain = make(signpost.OneBitAdam, tensors((8,)), **ONE_BIT)
    with pytest.raises(FailedPreconditionError, match="option block_elements is 4096 here but 8"):
        plain.load_state_dict(state)


@pytest.mark.parametrize("kind", [signpost.OneBitAdam, signpost.OneBitLamb, signpost.ZeroOneAdam])
def test_with_compat_the_first_step_changes_nothing(make, kind):
    name = "var_freeze_step" if kind is signpost.ZeroOneAdam else "freeze_step"
    parameters = tensors(*SHAPES)
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = make(kind, parameters, weight_decay=0.1, **{name: 3}, **AS_DEEPSPEED)
    for step in range(6):
        set_gradients(parameters, step)
        optimizer.step()
        for parameter, old in zip(parameters, before):
            assert parameter.isfinite().all()
            assert torch.equal(parameter, old) == (step == 0)


def test_with_compat_zero_one_adam_synchronises_when_deepspeed_does(make):
    """In steps whose number, from 1, is a multiple of the interval, which doubles every two: those
    that are local_step_scaler's None."""
    parameters = tensors((100,))
    options = dict(var_freeze_step=2, var_update_scaler=1, local_step_clipper=8)
    optimizer = make(signpost.ZeroOneAdam, parameters, **options, **AS_DEEPSPEED)
    numbers = []
    for step in range(16):
        set_gradients(parameters, step)
        optimizer.step()
        if optimizer.is_synchronised:
            numbers.append(step + 1)
    assert numbers == [1, 2, 3, 4, 5, 6, 8, 16]


@pytest.mark.parametrize("kind", [signpost.OneBitAdam, signpost.OneBitLamb, signpost.ZeroOneAdam])
def test_what_compat_leaves_no_choice_of_is_named(make, kind):
    own = LOCAL if kind is signpost.ZeroOneAdam else ONE_BIT
    for choice, named in (
        ({"gamma": 1.0}, "gamma$"),
        ({"variance_floor": 0.0, "gamma": 1.0}, "variance_floor and gamma$"),
    ):
        with pytest.raises(ValueError, match=named):
            make(kind, tensors((8,)), **own, **AS_DEEPSPEED, **choice)
    with pytest.raises(ValueError, match="compat is 'apex', wanted \"deepspeed\" or None"):
        make(kind, tensors((8,)), **own, compat="apex")


def test_with_compat_a_freeze_behind_the_step_that_is_lost_is_wanted(make):
    for kind in (signpost.OneBitAdam, signpost.OneBitLamb):
        with pytest.raises(InvalidArgumentError, match="freeze_step is 1, wanted at least 2"):
            make(kind, tensors((8,)), freeze_step=1, **AS_DEEPSPEED)


def test_state_dict_before_the_first_step_can_be_loaded(make):
    (x,) = tensors((10,))
    state = make(signpost.Adam, [x]).state_dict()
    other = make(signpost.Adam, tensors((10,)), lr=7)
    other.load_state_dict(state)
    assert (other.steps, other.param_groups[0]["lr"]) == (0, 1e-3)
    assert torch.equal(other.param_groups[0]["params"][0], x)


def test_state_dict_that_is_damaged_or_of_another_model_is_refused(make):
    parameters = tensors((10,))
    optimizer = make(signpost.Adam, parameters)
    set_gradients(parameters, 0)
    optimizer.step()
    state = optimizer.state_dict()
    with pytest.raises(FailedPreconditionError, match=r"saved state is .*\[10\]"):
        make(signpost.Adam, tensors((11,))).load_state_dict(state)
    with pytest.raises(FailedPreconditionError, match="saved state is .*'freeze_step=3' here"):
        make(signpost.OneBitAdam, tensors((10,)), freeze_step=3).load_state_dict(state)
    state["signpost"][100] ^= 1
    with pytest.raises(DataLossError, match="saved state is damaged: the CRC-32C of section 0"):
        make(signpost.Adam, tensors((10,))).load_state_dict(state)
    state["signpost"] = torch.empty(0, dtype=torch.uint8)
    with pytest.raises(ValueError, match="the saved state is empty"):
        make(signpost.Adam, tensors((10,))).load_state_dict(state)


def test_what_cannot_be_loaded_changes_nothing(make):
    (x,) = tensors((10,))
    x = nn.Parameter(x.detach().bfloat16())
    optimizer = make(signpost.Adam, [x], lr=0.1)
    set_gradients([x], 0)
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.2
    wanted, values = optimizer.parameters_crc32c(), x.clone()
    state["signpost"][-1] ^= 1
    with pytest.raises(DataLossError):
        optimizer.load_state_dict(state)
    assert (optimizer.steps, optimizer.param_groups[0]["lr"]) == (2, 0.2)
    assert optimizer.parameters_crc32c() == wanted
    assert torch.equal(x, values)
    state["signpost"][-1] ^= 1
    optimizer.load_state_dict(state)
    assert (optimizer.steps, optimizer.param_groups[0]["lr"]) == (1, 0.1)
    optimizer.step()
    assert optimizer.parameters_crc32c() == wanted


def test_state_dict_with_clipping_and_overlap_can_be_loaded(make):
    for options in (dict(max_grad_norm=1.0), dict(overlap=True)):
        parameters = tensors((10,))
        optimizer = make(signpost.Adam, parameters, **options)
        state = None
        for step in (0, 1, 2):
            optimizer.zero_grad()
            (parameters[0] * 3).square().sum().backward()
            optimizer.step()
            if step == 1:
                state = optimizer.state_dict()
        wanted = optimizer.parameters_crc32c()
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
        (parameters[0] * 3).square().sum().backward()
        optimizer.step()
        assert optimizer.parameters_crc32c() == wanted, options
        optimizer.leave()


def test_state_dict_of_another_optimizer_is_refused(make):
    parameters = tensors((10,))
    optimizer = make(signpost.Adam, parameters)
    with pytest.raises(ValueError, match="not the state_dict"):
        optimizer.load_state_dict(torch.optim.Adam(parameters).state_dict())


def test_what_cannot_be_made_or_loaded_counts_as_a_job_too(make, world):
    """As on ranks where it could, which wait for this one in a job of the next number."""

    def number():
        return int(world.next_job().job.decode().rpartition("-")[2])

    optimizer, frozen = make(signpost.Adam, tensors((4,))), torch.zeros(4)
    of_adamw = torch.optim.AdamW(tensors((4,))).state_dict()
    for fails in (
        lambda: optimizer.load_state_dict(of_adamw),
        lambda: make(signpost.Adam, [frozen]),
        lambda: make(signpost.Adam, tensors((4,)), codec="int7"),
        lambda: make(signpost.OneBitAdam, tensors((4,)), freeze_step=0),
        lambda: make(signpost.OneBitLamb, tensors((4,)), freeze_step=0),
        lambda: make(signpost.ZeroOneAdam, tensors((4,)), var_freeze_step=0),
    ):
        before = number()
        with pytest.raises(ValueError):
            fails()
        assert number() == before + 2


def test_resume_without_a_checkpoint_says_where(make, tmp_path):
    with pytest.raises(signpost.SignpostError, match=str(tmp_path)):
        make(signpost.Adam, tensors((10,)), resume=str(tmp_path))


def test_leaving_ends_an_optimizer(make):
    parameters = tensors((10,))
    optimizer = make(signpost.Adam, parameters)
    optimizer.leave()
    set_gradients(parameters, 0)
    with pytest.raises(RuntimeError, match="has left its job"):
        optimizer.step()
