"""1-bit Adam whose variance follows the gradients, where a variance frozen once goes wrong.

Each situation ends as torch.optim.AdamW does. One worker, so that a process suffices; answers are
compressed twice all the same. What has its first gradient late is in ranks_test.py.
"""

import pytest
import signpost.torch as signpost
import torch
from torch import nn
from two_heads import adamw

STEPS = 600


def losses_of_one_batch(make_optimizer):
    """Returns the losses of a model that learns 32 examples by heart."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    inputs, wanted = torch.randn(32, 16), torch.randn(32, 1)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = ((model(inputs) - wanted) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("freeze_step", ["auto", 90, 300])
def test_a_batch_that_is_learnt_by_heart_stays_so(make, freeze_step):
    theirs = losses_of_one_batch(lambda parameters: adamw(parameters, lr=1e-3))
    assert max(theirs[300:]) < 1e-4 * theirs[0], "AdamW does it at this learning rate"
    ours = losses_of_one_batch(
        lambda parameters: make(signpost.OneBitAdam, parameters, lr=1e-3, freeze_step=freeze_step)
    )
    assert max(ours[300:]) < 1e-4 * ours[0]


def test_a_batch_that_is_learnt_by_heart_does_not_explode_at_a_large_learning_rate(make):
    # AdamW's loss goes up to 7e-3 in between.
    ours = losses_of_one_batch(lambda parameters: make(signpost.OneBitAdam, parameters, lr=1e-2))
    assert max(ours[300:]) < 0.1 * ours[0]


def test_the_variance_of_1_bit_lamb_follows_too(make):
    # LAMB's own loss is up to 1.4e-3, and that of a variance frozen at step 180 went up to 59.
    ours = losses_of_one_batch(
        lambda parameters: make(signpost.OneBitLamb, parameters, lr=1e-2, freeze_step="auto")
    )
    assert max(ours[300:]) < 1e-4 * ours[0]


def test_what_has_no_gradient_any_more_comes_to_rest_as_with_adamw(make):
    def movement_of(make_optimizer):
        torch.manual_seed(0)
        still, others = nn.Parameter(torch.randn(100)), nn.Parameter(torch.randn(100))
        optimizer = make_optimizer([still, others])
        for step in range(200):
            if step == 20:
                before = still.detach().clone()
            others.grad = torch.randn(100)
            still.grad = torch.randn(100) if step < 20 else torch.zeros(100)
            optimizer.step()
        return (still - before).abs().max().item()

    theirs = movement_of(lambda parameters: adamw(parameters, lr=1e-2))
    ours = movement_of(
        lambda parameters: make(signpost.OneBitAdam, parameters, lr=1e-2, freeze_step=15)
    )
    assert ours < 1.5 * theirs


def test_a_warm_up_without_a_finite_gradient_goes_on(make):
    x = nn.Parameter(torch.full((100,), 2.0))
    optimizer = make(signpost.OneBitAdam, [x], lr=1e-2, freeze_step=45)
    for step in range(350):
        x.grad = torch.full((100,), float("inf")) if step < 60 else 2 * x.detach()
        optimizer.step()
        assert step >= 60 or not optimizer.report.one_bit
    assert optimizer.report.one_bit
    assert x.detach().abs().max() < 0.2


def test_training_in_which_no_step_counts_ends_with_an_error(make):
    x = nn.Parameter(torch.ones(100))
    optimizer = make(signpost.OneBitAdam, [x])
    with pytest.raises(signpost.SignpostError, match="last 100 steps .* gradient was not finite"):
        for _ in range(200):
            x.grad = torch.full((100,), float("nan"))
            optimizer.step()
    assert optimizer.steps in (99, 100)


def test_nothing_set_but_the_learning_rate_sends_little_more_than_one_bit(make):
    torch.manual_seed(0)
    x = nn.Parameter(torch.randn(8192))
    optimizer = make(signpost.OneBitAdam, [x], lr=1e-3)
    for _ in range(2000):
        x.grad = torch.randn(8192) + 0.1 * x.detach()
        optimizer.step()
    assert 1 < optimizer.sent_bits < 1.6
