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
from signpost import DataLossError, FailedPreconditionError
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
