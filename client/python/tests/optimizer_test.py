"""Adam, 1-bit Adam, 1-bit LAMB and 0/1 Adam as optimizers of PyTorch, in a job of one worker."""

import copy
import math
import re
import warnings
from fractions import Fraction

import numpy as np
import pytest
import signpost.torch as signpost
import torch
from optimizers import (
    AS_DEEPSPEED,
    LOCAL,
    ONE_BIT,
    SHAPES,
    STEPS,
    assert_same_step,
    set_gradients,
    tensors,
    train_like_adamw,
)
from signpost import InvalidArgumentError, Session
from signpost.torch import _job_optimizer
from torch import nn

# A variance that stays as it was frozen, and nothing lost before: as the paper has it.
AS_PUBLISHED = {"variance_refresh_interval": 0, "warm_up_codec": "fp32"}


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
    a = make(signpost.OneBitAdam, ours, lr=0.01, freeze_step=10, **AS_PUBLISHED)
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
    options = {"freeze_step": freeze, **AS_PUBLISHED}
    optimizer = make(signpost.OneBitAdam, [x], lr=lr, weight_decay=decay, **options)
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
        **AS_PUBLISHED,
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
        variance_codec="fp32",
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


def test_auto_freezes_once_the_variance_fits_the_gradients(make):
    [x] = tensors((1000,))
    optimizer = make(signpost.OneBitAdam, [x], betas=(0.9, 0.9))
    for step in range(100):
        # The variance is looked at every 10 steps. Of the first gradients' squares, 400 times the
        # later ones', 0.9^10 is left after each 10 steps: 140 at step 20, 17 at 40.
        x.grad = torch.full_like(x, 10.0 if step < 10 else 0.5)
        optimizer.step()
        if optimizer.report.one_bit:
            break
    assert step == 40


def test_a_floor_raises_the_variance_at_the_freeze(make):
    moves = []
    for floor in (0.0, 0.5):
        [x] = tensors((100,))
        options = {"variance_floor": floor, **AS_PUBLISHED}
        optimizer = make(signpost.OneBitAdam, [x], freeze_step=1, **options)
        x.grad = torch.ones(100)
        x.grad[0] = 1e-3
        optimizer.step()
        before = x[0].item()
        optimizer.step()
        moves.append(abs(x[0].item() - before))
    # Without a floor it moves by its momentum of 1e-3, which one bit makes far larger, over a root
    # of 1e-3; but by no more than 10 learning rates.
    assert moves[0] == pytest.approx(10 * 1e-3, rel=1e-3)
    assert moves[0] > 3 * moves[1]


def test_groups_have_their_own_rates(make):
    def groups():
        a, b, c = tensors((40,), (50,), (60,))
        return [{"params": [a, b], "lr": 0.1}, {"params": [c], "weight_decay": 0.5}]

    train_like_adamw(make, groups(), groups())


@pytest.mark.parametrize(
    "kind, own",
    [
        (signpost.Adam, {}),
        (signpost.OneBitAdam, ONE_BIT),
        (signpost.OneBitLamb, ONE_BIT),
        (signpost.ZeroOneAdam, LOCAL),
    ],
)
def test_a_group_without_a_learning_rate_stays_as_it_is_until_it_gets_one(make, kind, own):
    x, later = tensors((100,), (100,))
    groups = [{"params": [x]}, {"params": [later], "lr": 0.0}]
    optimizer = make(kind, groups, weight_decay=0.1, **own)
    before = later.clone()
    for step in range(STEPS):
        set_gradients([x, later], step)
        optimizer.step()
        assert torch.equal(later, before)
    optimizer.param_groups[1]["lr"] = 1e-3
    set_gradients([x, later], STEPS)
    optimizer.step()
    assert (later != before).all()


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
        message = (
            f"step {step}: the gradient of rank 0 is not finite, .*; 1 blocks take no part in it"
        )
        with pytest.warns(UserWarning, match=message):
            optimizer.step()
        assert not torch.equal(good, before[0])
        assert bad.isfinite().all()


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
            {"freeze_step": 5, "warm_up_codec": "fp32", "variance_codec": "bf16"},
            "with variance_codec 'bf16' .* with warm_up_codec and variance_codec 'fp32'",
        ),
        (
            signpost.OneBitLamb,
            {"freeze_step": 5, "warm_up_codec": "int4", "variance_codec": "int8"},
            "with warm_up_codec 'int4' and variance_codec 'int8'",
        ),
        (signpost.ZeroOneAdam, {"var_freeze_step": 5}, "with codec 'onebit' and variance_codec 'int8'"),
    ],
)
def test_another_beta1_where_gradients_lose_something_is_refused_at_once(make, kind, options, why):
    def groups():
        x, y = tensors((10,), (20,))
        return [{"params": [x]}, {"params": [y], "betas": (0.8, 0.999)}]

    with pytest.raises(
        ValueError, match=rf"group 1 has betas\[0\] 0.8, and group 0 has 0.9: {why}"
    ):
        make(kind, groups(), **options)
    exact = {name: "fp32" if "codec" in name else value for name, value in options.items()}
    if kind is signpost.ZeroOneAdam:
        exact.update(codec="fp32", variance_codec="fp32")
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


def test_a_gradient_that_is_not_finite_is_warned_of_and_skipped(make):
    parameters = tensors((10,))
    before = parameters[0].detach().clone()
    optimizer = make(signpost.Adam, parameters)
    set_gradients(parameters, 0)
    parameters[0].grad[3] = float("nan")
    with pytest.warns(UserWarning, match="step 0: the gradient of rank 0 is not finite"):
        optimizer.step()
    assert torch.equal(parameters[0], before)


def test_a_copy_has_no_job(make):
    optimizer = copy.deepcopy(make(signpost.Adam, tensors((10,))))
    with pytest.raises(RuntimeError, match="without a job"):
        optimizer.step()


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


@pytest.mark.parametrize("made_by", [torch.optim.Adam, torch.optim.AdamW])
def test_groups_that_pytorch_has_made_are_taken(make, made_by):
    [x] = tensors((10,))
    other = made_by([x])
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
        ("lr", "1e-3"),  # so YAML reads 1e-3: PyYAML wants 1.0e-3
        ("lr", None),
        ("lr", torch.ones(2)),
        ("weight_decay", [0.1]),
        ("betas", 0.9),
        ("betas", (0.9,)),
        ("betas", (0.9, 0.99, 0.999)),
        ("betas", ("0.9", 0.999)),
        ("eps", "1e-8"),
    ],
)
def test_what_is_no_number_is_named_with_its_group(make, name, wrong):
    [x] = tensors((10,))
    message = re.escape(f"{name} {wrong!r}")
    with pytest.raises(ValueError, match=f"group 0 has .*{message}.* wanted"):
        make(signpost.Adam, [x], **{name: wrong})
    optimizer = make(signpost.Adam, [x])
    optimizer.param_groups[0][name] = wrong
    set_gradients([x], 0)
    with pytest.raises(ValueError, match=f"group 0 has .*{message}.* wanted"):
        optimizer.step()


def test_rates_may_be_numbers_of_any_kind(make):
    def of(number):
        [x] = tensors((10,))
        rates = dict(lr=number(0.5), betas=[number(0.5), number(0.75)], weight_decay=number(0))
        optimizer = make(signpost.Adam, [x], **rates)
        set_gradients([x], 0)
        optimizer.step()
        return x

    for number in (torch.tensor, np.float32, np.array, Fraction):
        assert torch.equal(of(number), of(float))


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
    for bits, codec in ((32, "fp32"), (16, "bf16")):
        optimizer = make(signpost.OneBitAdam, parameters, freeze_step=10, warm_up_codec=codec)
        set_gradients(parameters, 0)
        optimizer.step()
        assert optimizer.sent_bits == bits
        payload = 100_000 * bits / 8
        assert payload < optimizer.report.sent_bytes < 1.5 * payload  # TCP sends some again
        optimizer.leave()


def test_processes_that_load_data_are_forked_from_a_job_without_harm(make):
    [x] = tensors((8,))
    optimizer = make(signpost.Adam, [x])
    data = torch.utils.data.TensorDataset(torch.randn(16, 8))
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2):
        x.grad = batch.sum(0)
        optimizer.step()
    assert optimizer.steps == 4


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


def test_leaving_ends_an_optimizer(make):
    parameters = tensors((10,))
    optimizer = make(signpost.Adam, parameters)
    optimizer.leave()
    set_gradients(parameters, 0)
    with pytest.raises(RuntimeError, match="has left its job"):
        optimizer.step()
