"""Jobs that resume from a checkpoint, and optimizers that load what state_dict() has saved."""

import copy
import io

import pytest
import signpost.torch as signpost
import torch
from optimizers import (
    AS_DEEPSPEED,
    FREEZE_STEP,
    LOCAL,
    ONE_BIT,
    SAVED_AT,
    STEPS,
    set_gradients,
    tensors,
)
from signpost import FailedPreconditionError
from torch import nn


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


def test_state_has_the_moments_of_adamw(make):
    ours, theirs = tensors((10,), (3, 4)), tensors((10,), (3, 4))
    a, b = make(signpost.Adam, ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, weight_decay=0)
    assert {key for entry in a.state.values() for key in entry} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
        "error",
    }  # before the first step, as torch.distributed.checkpoint wants it
    for step in range(3):
        for optimizer, parameters in ((a, ours), (b, theirs)):
            set_gradients(parameters, step)
            optimizer.step()
    for x, y in zip(ours, theirs):
        assert a.state[x]["step"] == b.state[y]["step"] == 3
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(a.state[x][moment], b.state[y][moment])
        assert not a.state[x]["error"].any()


def test_state_has_what_one_bit_leaves_out(make):
    [x] = tensors((5000,))
    optimizer = make(signpost.OneBitAdam, [x], lr=0.1, **ONE_BIT)
    before = None
    for step in range(FREEZE_STEP + 1):
        set_gradients([x], step)
        if step == FREEZE_STEP:
            before = optimizer.state[x]
        optimizer.step()
    after = optimizer.state[x]
    # A rank sends numbers of one size in a block of 4,096 elements. The rest of its momentum is its error.
    # The error before has what the warm-up's 8 bits left out. A tenth of it is in units of the momentum.
    momentum = 0.9 * before["exp_avg"] / (1 - 0.9**FREEZE_STEP) + 0.1 * x.grad
    momentum += 0.1 * before["error"]
    sent = (momentum - after["error"])[:4096]
    torch.testing.assert_close(sent, sent[0].abs() * momentum[:4096].sign(), rtol=1e-4, atol=0)
    # The variance is that of the freeze: corrected for its beginning, and nowhere below its floor.
    corrected = before["exp_avg_sq"] / (1 - 0.999**FREEZE_STEP)
    torch.testing.assert_close(
        after["exp_avg_sq"], corrected.clamp(min=0.01 * corrected.mean()), rtol=1e-5, atol=0
    )


def test_state_is_a_copy_of_the_last_step_s(make):
    [x] = tensors((10,))
    optimizer = make(signpost.Adam, [x])
    set_gradients([x], 0)
    optimizer.step()
    first = optimizer.state[x]["exp_avg"]
    assert optimizer.state[x]["exp_avg"] is first
    kept = first.clone()
    optimizer.step()
    assert torch.equal(first, kept)
    assert not torch.equal(optimizer.state[x]["exp_avg"], kept)
    wanted = optimizer.parameters_crc32c()
    optimizer.state[x]["exp_avg"].zero_()
    assert optimizer.parameters_crc32c() == wanted


def test_hooks_of_states_see_all_of_them(make):
    [x] = tensors((10,))
    optimizer = make(signpost.Adam, [x])
    set_gradients([x], 0)
    optimizer.step()
    seen = []

    def rename(_, state):
        state["state"] = {
            key: {f"my_{name}": value for name, value in entry.items()}
            for key, entry in state["state"].items()
        }
        seen.append(state["param_groups"][0]["signpost"])

    def back(_, state):
        entries = {
            key: {name[3:]: value for name, value in entry.items()}
            for key, entry in state["state"].items()
        }
        return {**state, "state": entries}

    optimizer.register_state_dict_post_hook(rename)
    optimizer.register_load_state_dict_pre_hook(back)
    optimizer.register_load_state_dict_post_hook(lambda loaded: seen.append(loaded.steps))
    state = optimizer.state_dict()
    assert "my_exp_avg" in state["state"][0]
    optimizer.step()
    optimizer.load_state_dict(state)
    assert '"step":"1"' in seen[0] and seen[1] == 1


def test_a_state_goes_from_unnamed_to_named_parameters_and_back(make):
    for names in (("a", "b"), (None, None)):
        x, y = tensors((2,), (3,))
        named = list(zip(names, (x, y))) if names[0] else [x, y]
        optimizer = make(signpost.Adam, named)
        set_gradients([x, y], 0)
        optimizer.step()
        state = optimizer.state_dict()
        assert state["param_groups"][0].get("param_names") == (list(names) if names[0] else None)
        u, v = tensors((2,), (3,))
        other = make(signpost.Adam, [u, v] if names[0] else [("c", u), ("d", v)])
        other.load_state_dict(state)
        u.data.copy_(x), v.data.copy_(y)
        for taken, parameters in ((optimizer, [x, y]), (other, [u, v])):
            set_gradients(parameters, 1)
            taken.step()
        assert torch.equal(x, u) and torch.equal(y, v)


def test_a_loaded_state_leaves_schedulers_their_rate(make):
    """accelerate's prepare() loads what it has saved, and the program sets its rate afterwards."""
    optimizer = make(signpost.Adam, tensors((10,)), lr=0.001)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.5
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("empty", ["", b""])
def test_a_directory_without_a_name_is_refused(make, empty):
    optimizer = make(signpost.Adam, tensors((10,)))
    with pytest.raises(ValueError, match="directory is empty"):
        optimizer.checkpoint(empty)
    with pytest.raises(ValueError, match="resume is empty"):
        make(signpost.Adam, tensors((10,)), resume=empty)


@pytest.mark.parametrize("as_path", [str, lambda path: path, lambda path: bytes(path)])
def test_a_directory_may_be_any_path(make, tmp_path, as_path):
    optimizer = make(signpost.Adam, tensors((10,)))
    optimizer.checkpoint(as_path(tmp_path))
    assert make(signpost.Adam, tensors((10,)), resume=as_path(tmp_path)).steps == 0


def test_a_copy_loads_nothing(make):
    optimizer = make(signpost.Adam, tensors((10,)))
    with pytest.raises(RuntimeError, match="without a job"):
        copy.deepcopy(optimizer).load_state_dict(optimizer.state_dict())


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
    torch.save((saved.state_dict(), parameters), file)
    saved.leave()

    file.seek(0)
    state, of_model = torch.load(file, weights_only=True)
    parameters = resumable()
    optimizer = make(kind, parameters, lr=1, **own)
    optimizer.load_state_dict(copy.deepcopy(state))
    with torch.no_grad():
        for parameter, value in zip(parameters, of_model):
            parameter.copy_(value)  # behind the optimizer's state, as some trainers do
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
    with torch.no_grad():
        other.param_groups[0]["params"][0].copy_(saved.param_groups[0]["params"][0])
    assert rates_until(STEPS, other, scheduler) == wanted[SAVED_AT:]
    assert other.parameters_crc32c() == whole.parameters_crc32c()


def test_state_dict_with_compat_leads_nowhere_else(make):
    state = make(signpost.OneBitAdam, tensors((8,)), **ONE_BIT, **AS_DEEPSPEED).state_dict()
    plain = make(signpost.OneBitAdam, tensors((8,)), **ONE_BIT)
    plain.load_state_dict(state)
    with pytest.raises(FailedPreconditionError, match="option block_elements is 4096 here but 8"):
        plain.step()


def test_state_dict_before_the_first_step_can_be_loaded(make):
    state = make(signpost.Adam, tensors((10,))).state_dict()
    other = make(signpost.Adam, tensors((10,)), lr=7)
    other.load_state_dict(state)
    assert (other.steps, other.param_groups[0]["lr"]) == (0, 1e-3)
    other.step()
    assert other.steps == 1


def test_state_dict_of_another_model_or_optimizer_is_refused(make):
    parameters = tensors((10,))
    optimizer = make(signpost.Adam, parameters)
    set_gradients(parameters, 0)
    optimizer.step()
    state = optimizer.state_dict()
    with pytest.raises(
        ValueError, match=r"exp_avg of parameter 0 of group 0 is \[10\] .* wanted \[11\]"
    ):
        make(signpost.Adam, tensors((11,))).load_state_dict(state)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        make(
            signpost.Adam, [{"params": tensors((10,))}, {"params": tensors((3,))}]
        ).load_state_dict(state)
    other = make(signpost.OneBitAdam, tensors((10,)), freeze_step=3)
    other.load_state_dict(state)
    with pytest.raises(FailedPreconditionError, match="saved state is .*'freeze_step=3 .*' here"):
        other.step()


def damaged(state, name, value):
    state = copy.deepcopy(state)
    if value is None:
        del state["state"][0][name]
    else:
        state["state"][0][name] = value
    return state


@pytest.mark.parametrize(
    "name, value, why",
    [
        ("exp_avg", None, "has no exp_avg of parameter 0 of group 0"),
        ("exp_avg_sq", torch.zeros(9), r"exp_avg_sq of parameter 0 of group 0 is \[9\]"),
        ("exp_avg", torch.zeros(10, dtype=torch.int64), "exp_avg of .* wanted fp32 numbers"),
        ("error_of_rank_0", "text", "error of parameter 0 of group 0 is str"),
    ],
)
def test_what_cannot_be_loaded_changes_nothing(make, name, value, why):
    (x,) = tensors((10,))
    x = nn.Parameter(x.detach().bfloat16())
    optimizer = make(signpost.Adam, [x], lr=0.1)
    set_gradients([x], 0)
    optimizer.step()
    state, before = optimizer.state_dict(), x.detach().clone()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.2
    wanted, values = optimizer.parameters_crc32c(), x.clone()
    with pytest.raises(ValueError, match=why):
        optimizer.load_state_dict(damaged(state, name, value))
    for description in ("{}", "no JSON", None):
        without = copy.deepcopy(state)
        without["param_groups"][0]["signpost"] = description
        with pytest.raises(ValueError, match="not the state_dict.. of an optimizer of Signpost"):
            optimizer.load_state_dict(without)
    assert (optimizer.steps, optimizer.param_groups[0]["lr"]) == (2, 0.2)
    assert optimizer.parameters_crc32c() == wanted
    assert torch.equal(x, values)
    optimizer.load_state_dict(state)
    x.data.copy_(before)
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
                state, values = optimizer.state_dict(), parameters[0].detach().clone()
        wanted = optimizer.parameters_crc32c()
        optimizer.load_state_dict(state)
        parameters[0].data.copy_(values)
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
