"""Parameters that are added, thawed and frozen while a job trains: add_param_group() and requires_grad."""

import pytest
import signpost.torch as signpost
import torch
from optimizers import LOCAL, ONE_BIT, assert_same_step, set_gradients, tensors

BEFORE, AFTER = 5, 10  # steps before the change, and after all


def gradients_for(parameters, step):
    """Sets gradients of those that are trained; each parameter's are always the same in that step."""
    for index, parameter in enumerate(parameters):
        parameter.grad = None
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(100 * step + index)
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(optimizer, parameters, steps):
    for step in steps:
        gradients_for(parameters, step)
        optimizer.step()


def grow(make_optimizer):
    """Trains with a group that is added, and yields the parameters after each step."""
    x, y, z = parameters = tensors((30, 20), (50,), ())
    optimizer = make_optimizer([x])
    for step in range(AFTER):
        if step == BEFORE:
            optimizer.add_param_group({"params": [y, z], "lr": 0.02})
        gradients_for(parameters if step >= BEFORE else parameters[:1], step)
        optimizer.step()
        yield parameters


def test_an_added_group_is_trained_as_by_adamw(make):
    ours = grow(lambda parameters: make(signpost.Adam, parameters, lr=0.01))
    theirs = grow(lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0))
    for a, b in zip(ours, theirs):
        assert_same_step(a, b)


def thaw_and_freeze(make_optimizer):
    """Thaws the second parameter, and later freezes the first."""
    x, y = parameters = tensors((30, 20), (50,))
    y.requires_grad_(False)
    optimizer = make_optimizer(parameters)
    for step in range(AFTER + 3):
        y.requires_grad_(step >= BEFORE)
        x.requires_grad_(step < AFTER)
        gradients_for(parameters, step)
        optimizer.step()
        yield parameters


def test_what_is_thawed_or_frozen_is_trained_as_by_adamw(make):
    ours = thaw_and_freeze(lambda parameters: make(signpost.Adam, parameters, lr=0.01))
    theirs = thaw_and_freeze(
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0)
    )
    for a, b in zip(ours, theirs):
        assert_same_step(a, b)


CHANGED_GROUPS = {
    "replaced": lambda groups, new: groups[1]["params"].__setitem__(0, new),
    "appended": lambda groups, new: groups[1]["params"].append(new),
    "removed": lambda groups, new: groups[1]["params"].pop(),
    "moved": lambda groups, new: groups[0]["params"].append(groups[1]["params"].pop()),
    "grouped": lambda groups, new: groups.insert(1, {**groups[1], "lr": 0.03, "params": [new]}),
}


@pytest.mark.parametrize("change", CHANGED_GROUPS.values(), ids=CHANGED_GROUPS)
def test_groups_that_a_program_changes_are_trained_as_by_adamw(make, change):
    def parameters_of(make_optimizer):
        parameters = x, y, new = tensors((20,), (30,), (40,))
        optimizer = make_optimizer([{"params": [x], "lr": 0.02}, {"params": [y]}])
        for step in range(AFTER):
            if step == BEFORE:
                change(optimizer.param_groups, new)
            gradients_for(parameters, step)
            optimizer.step()
            yield parameters

    ours = parameters_of(lambda groups: make(signpost.Adam, groups, lr=0.01))
    theirs = parameters_of(lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0))
    for a, b in zip(ours, theirs):
        assert_same_step(a, b)


@pytest.mark.parametrize("kind", [signpost.Adam, signpost.OneBitAdam, signpost.OneBitLamb])
def test_other_parameters_go_on_with_the_same_bits(make, kind):
    options = {"freeze_step": 1000, "warm_up_codec": "fp32"} if kind is not signpost.Adam else {}
    x, y = tensors((30, 20), (50,))
    [alone] = tensors((30, 20))
    optimizer, other = make(kind, [x], **options), make(kind, [alone], **options)
    train(optimizer, [x], range(BEFORE))
    train(other, [alone], range(AFTER))
    optimizer.add_param_group({"params": [y]})
    train(optimizer, [x, y], range(BEFORE, AFTER))
    assert torch.equal(x, alone)
    assert optimizer.steps == AFTER


@pytest.mark.parametrize("kind", [signpost.OneBitAdam, signpost.OneBitLamb])
def test_after_the_freeze_new_parameters_take_steps_of_adams_size(make, kind):
    lr = 1e-3
    x, y = tensors((30, 20), (500,))
    optimizer = make(kind, [x], lr=lr, freeze_step="auto")
    train(optimizer, [x], range(100))
    assert optimizer.report.one_bit, "the variance is frozen"
    optimizer.add_param_group({"params": [y]})
    largest = 0.0
    for step in range(100, 140):
        before = [parameter.detach().clone() for parameter in (x, y)]
        train(optimizer, [x, y], [step])
        moved = (y - before[1]).abs().max().item() / lr
        largest = max(largest, moved)
        if step >= 120:
            assert moved > 0, "it has had eight one-bit steps, and those without a variance"
    assert not torch.equal(x, before[0])
    assert 0.1 < largest < (3.3 if kind is signpost.OneBitAdam else 14)  # a factor, at most 4


def fields_of(optimizer, parameters):
    """Copies of what the optimizer has of each parameter."""
    state = optimizer.state
    return [{k: v.clone() for k, v in state[p].items() if k != "step"} for p in parameters]


def aggregator_errors_of(optimizer):
    """By parameter; zeros without one."""
    saved = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    errors = {}
    for parameter, key in zip(parameters, (i for g in saved["param_groups"] for i in g["params"])):
        error = saved["state"][key].get(
            "aggregator_error_of_rank_0", torch.zeros(parameter.numel())
        )
        errors[parameter] = error.view(parameter.shape)
    return errors


@pytest.mark.parametrize("kind", [signpost.OneBitAdam, signpost.OneBitLamb])
@pytest.mark.parametrize("change", CHANGED_GROUPS.values(), ids=CHANGED_GROUPS)
def test_what_was_known_of_other_parameters_stays(make, kind, change):
    parameters = x, y, new = tensors((70, 90), (30,), (40,))
    groups = [{"params": [x], "eps": 1e-6}, {"params": [y], "eps": 1e-4}]
    optimizer = make(kind, groups, freeze_step="auto")
    train(optimizer, [x, y], range(90))
    before, of_aggregators = fields_of(optimizer, [x, y]), aggregator_errors_of(optimizer)
    assert optimizer.report.one_bit and any(error.any() for error in of_aggregators.values())
    change(optimizer.param_groups, new)
    optimizer.parameters_crc32c()  # joins the new job, and takes no step
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, was in zip((x, y), before):
        if not any(parameter is other for other in trained):
            continue
        [now] = fields_of(optimizer, [parameter])
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(now[name], was[name], rtol=1e-4, atol=0)
        # One rank: its error has what the old aggregators had left out, unless the new ones have it.
        left_out = now["error"] + aggregator_errors_of(optimizer)[parameter]
        torch.testing.assert_close(left_out, was["error"] + of_aggregators[parameter])
    train(optimizer, parameters, range(90, 95))


def test_without_a_variance_that_follows_new_parameters_are_refused_behind_the_freeze(make):
    x, y = tensors((30, 20), (50,))
    optimizer = make(signpost.OneBitAdam, [("x", x)], variance_refresh_interval=0, **ONE_BIT)
    train(optimizer, [x], range(6))
    optimizer.add_param_group({"params": [("head.weight", y)]})
    before = x.detach().clone()
    why = (
        "head.weight was added or thawed at step 6, and cannot be trained: the variance was frozen"
    )
    with pytest.raises(RuntimeError, match=why):
        train(optimizer, [x, y], [6])
    assert torch.equal(x, before)
    y.requires_grad_(False)
    train(optimizer, [x, y], [6])  # goes on without it
    assert not torch.equal(x, before)


def test_zero_one_adam_refuses_new_parameters(make):
    x, y = tensors((30, 20), (50,))
    optimizer = make(signpost.ZeroOneAdam, [x], **LOCAL)
    optimizer.add_param_group({"params": [y]})
    with pytest.raises(
        RuntimeError, match="0/1 Adam updates the variances of all parameters in the"
    ):
        train(optimizer, [x, y], [0])


def test_parameters_of_zero_one_adam_are_frozen_behind_a_synchronisation(make):
    x, y = parameters = tensors((30, 20), (50,))
    optimizer = make(signpost.ZeroOneAdam, parameters, **LOCAL)
    train(optimizer, parameters, range(6))
    while optimizer.is_synchronised:
        train(optimizer, parameters, [optimizer.steps])
    y.requires_grad_(False)
    with pytest.raises(
        RuntimeError, match="between two synchronisations: do that after a step with"
    ):
        train(optimizer, parameters, [optimizer.steps])
    y.requires_grad_()
    while not optimizer.is_synchronised:
        train(optimizer, parameters, [optimizer.steps])
    y.requires_grad_(False)
    before = y.detach().clone()
    train(optimizer, parameters, range(optimizer.steps, 20))
    assert torch.equal(y, before)


@pytest.mark.parametrize(
    "group, error, why",
    [
        (
            {"params": [torch.zeros(3, dtype=torch.float64)]},
            TypeError,
            "wanted a dense one of float32",
        ),
        ({"params": [torch.zeros(3)], "lr": -1.0}, ValueError, "group 1 has lr -1.0"),
        ({"params": [torch.zeros(3)], "maximize": True}, ValueError, "nothing here reads"),
    ],
)
def test_a_group_that_cannot_be_trained_is_refused_and_changes_nothing(make, group, error, why):
    [x] = tensors((10,))
    optimizer = make(signpost.Adam, [x])
    group["params"][0].requires_grad_()
    with pytest.raises(error, match=why):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    train(optimizer, [x], range(3))


def test_with_overlap_the_bits_are_the_same(make):
    def parameters_of(**options):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8) for _ in range(3)]
        model = torch.nn.Sequential(*layers)
        layers[0].requires_grad_(False)
        before = layers[0].weight.clone()
        optimizer = make(signpost.OneBitAdam, model.parameters(), freeze_step=4, **options)
        for step in range(50):
            if step in (6, 46):
                layers[0].requires_grad_()
            if step == 40:
                assert not torch.equal(layers[0].weight, before), "it is trained"
                layers[0].requires_grad_(False)
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
        return list(model.parameters())

    ours, overlapped = parameters_of(), parameters_of(overlap=True)
    assert all(map(torch.equal, ours, overlapped))


def test_with_overlap_a_change_behind_the_backward_pass_is_refused(make):
    x, y = tensors((10,), (10,))
    optimizer = make(signpost.Adam, [x], overlap=True)
    (x * x).sum().backward()
    optimizer.add_param_group({"params": [y]})
    with pytest.raises(RuntimeError, match="with overlap=True do that before backward()"):
        optimizer.step()


@pytest.mark.parametrize("kind", [signpost.Adam, signpost.OneBitAdam])
@pytest.mark.parametrize("by_checkpoint", [False, True])
def test_a_job_with_added_parameters_resumes_with_the_same_bits(
    make, tmp_path, kind, by_checkpoint
):
    x, y = parameters = tensors((30, 20), (50,))
    optimizer = make(kind, [x])
    train(optimizer, [x], range(70))
    optimizer.add_param_group({"params": [y]})
    train(optimizer, parameters, range(70, 75))
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    groups = [{"params": [copy]} for copy in copies]
    if by_checkpoint:
        optimizer.checkpoint(tmp_path)
        again = make(kind, groups, resume=tmp_path)
    else:
        again = make(kind, groups)
        again.load_state_dict(optimizer.state_dict())
    train(optimizer, parameters, range(75, 90))
    train(again, copies, range(75, 90))
    assert again.steps == 90
    assert all(map(torch.equal, copies, parameters))


def test_a_state_from_before_a_parameter_was_thawed_is_loaded(make):
    def thawed_at(step, reloads):
        x, y = parameters = tensors((30, 20), (50,))
        y.requires_grad_(False)
        optimizer = make(signpost.Adam, parameters)
        train(optimizer, parameters, range(step))
        saved = optimizer.state_dict()
        y.requires_grad_()
        if reloads:
            optimizer = make(signpost.Adam, parameters)
            with pytest.warns(
                UserWarning, match="has nothing of parameter 1 of group 0 and 0 other"
            ):
                optimizer.load_state_dict(saved)
        train(optimizer, parameters, range(step, AFTER))
        return parameters

    assert all(map(torch.equal, thawed_at(BEFORE, reloads=True), thawed_at(BEFORE, reloads=False)))


def test_a_state_that_has_more_parameters_than_are_trained_is_loaded(make):
    x, y = parameters = tensors((30, 20), (50,))
    optimizer = make(signpost.Adam, parameters)
    train(optimizer, parameters, range(BEFORE))
    saved, before = optimizer.state_dict(), y.detach().clone()
    x.requires_grad_(False)
    optimizer = make(signpost.Adam, parameters)
    optimizer.load_state_dict(saved)
    momentum = saved["state"][1]["exp_avg"]
    assert torch.equal(optimizer.state[y]["exp_avg"], momentum)
    train(optimizer, parameters, [BEFORE])
    assert list(optimizer.state) == [y] and optimizer.steps == BEFORE + 1
    assert not torch.equal(y, before)


def test_a_parameter_that_is_thawed_between_loading_and_the_next_step_begins_as_it_was_saved(make):
    def trained(thaws):
        x, y = parameters = tensors((30, 20), (50,))
        optimizer = make(signpost.OneBitAdam, parameters, freeze_step="auto")
        train(optimizer, parameters, range(90))
        saved = optimizer.state_dict()
        if thaws:
            y.requires_grad_(False)
        again = make(signpost.OneBitAdam, parameters, freeze_step="auto")
        again.load_state_dict(saved)
        y.requires_grad_()
        train(again, parameters, range(90, 100))
        return parameters

    assert all(map(torch.equal, trained(thaws=True), trained(thaws=False)))


def test_a_state_that_is_saved_before_a_change_is_joined_is_that_of_the_change(make):
    def trained(reloads):
        x, y, z = tensors((30, 20), (50,), (40,))
        optimizer = make(signpost.OneBitAdam, [x, y], freeze_step="auto")
        train(optimizer, [x, y], range(90))
        optimizer.param_groups[0]["params"].insert(0, z)
        if reloads:
            saved = optimizer.state_dict()
            optimizer = make(signpost.OneBitAdam, [z, x, y], freeze_step="auto")
            optimizer.load_state_dict(saved)
        train(optimizer, [x, y, z], range(90, 130))
        return x, y, z

    assert all(map(torch.equal, trained(reloads=True), trained(reloads=False)))


def test_an_error_that_bf16_values_have_is_kept(make):
    x = torch.nn.Parameter(torch.randn(100, generator=torch.Generator().manual_seed(0)).bfloat16())
    [y] = tensors((50,))
    optimizer = make(signpost.Adam, [x], lr=1e-5)
    for step in range(3):
        set_gradients([x], step)
        optimizer.step()
    master = optimizer.state[x]["master"].clone()
    optimizer.add_param_group({"params": [y], "lr": 0.0})
    y.grad = torch.zeros(50)
    x.grad.zero_()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(optimizer.state[x]["master"], master)
