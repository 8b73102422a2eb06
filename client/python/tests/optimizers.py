"""What the tests of optimizers, in jobs of one worker, share."""

import signpost.torch as signpost
import torch
from torch import nn

SHAPES = ((30, 20), (5000,), ())

FREEZE_STEP, SAVED_AT, STEPS = 4, 7, 12
# Steps 6 and 7 are an interval, and so are 8 to 11: SAVED_AT is between two synchronisations.
LOCAL = dict(
    var_freeze_step=FREEZE_STEP, var_update_scaler=1, local_step_scaler=2, local_step_clipper=4
)
ONE_BIT = dict(freeze_step=FREEZE_STEP)
AS_DEEPSPEED = dict(compat="deepspeed")


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
