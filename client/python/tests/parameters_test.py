"""Which parameters optimizers train, in which types and places, and what programs do to them."""

import warnings
from types import SimpleNamespace

import pytest
import signpost.torch as signpost
import torch
from optimizers import LOCAL, STEPS, set_gradients, tensors, train_like_adamw
from signpost import InvalidArgumentError
from signpost.torch import _device
from torch import nn


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
    assert optimizer.parameters_crc32c() != before
    assert torch.equal(x, torch.full_like(x, 6))
    x.data.fill_(7)
    optimizer.checkpoint(str(tmp_path))
    resumed = copied(0.0)
    make(signpost.Adam, [resumed], resume=str(tmp_path))
    assert torch.equal(resumed, torch.full_like(x, 7))


def test_what_a_step_would_refuse_is_not_saved(make, tmp_path):
    [x] = tensors((10,))
    optimizer = make(signpost.Adam, [x])
    x.data = x.data.double()
    for save in (
        optimizer.state_dict,
        optimizer.parameters_crc32c,
        lambda: optimizer.checkpoint(str(tmp_path)),
    ):
        with pytest.raises(RuntimeError, match="parameter 0 of group 0 is .* torch.float64"):
            save()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_of_another_shape_is_refused(make, dtype):
    x = nn.Parameter(torch.ones(10, dtype=dtype))
    optimizer = make(signpost.Adam, [x])
    x.data = x.data[:5].clone()
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 is \[5\], .* and was \[10\]"):
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


@pytest.mark.parametrize(
    "kind, own", [(signpost.Adam, {}), (signpost.OneBitAdam, dict(freeze_step=2))]
)
def test_a_parameter_is_followed_where_it_goes(make, kind, own):
    """As model.to() and averages of weights move it, away and back again."""
    here, there = tensors((10,)), tensors((10,))
    optimizers = make(kind, here, lr=0.1, **own), make(kind, there, lr=0.1, **own)
    first = there[0].data
    for step in range(6):
        if step == 1:
            there[0].data = there[0].data.clone()
        if step == 3:
            first.copy_(there[0].data)
            there[0].data = first
        if step == 4:
            here[0].data.add_(1)
            there[0].data = there[0].data + 1
        for optimizer, parameters in zip(optimizers, (here, there)):
            set_gradients(parameters, step)
            optimizer.step()
        assert torch.equal(here[0], there[0]), step
    assert optimizers[0].parameters_crc32c() == optimizers[1].parameters_crc32c()


def test_a_parameter_that_was_sent_to_another_process_is_told_from_one_that_has_moved(make):
    sent, shared = tensors((10,), (10,))
    shared.share_memory_()
    optimizers = [make(signpost.Adam, [x]) for x in (sent, shared)]
    for x in (sent, shared):
        torch.multiprocessing.SimpleQueue().put(x)
        set_gradients([x], 0)
    with pytest.raises(
        RuntimeError, match="is in shared memory now.* torch.multiprocessing moves what"
    ):
        optimizers[0].step()
    optimizers[1].step()


def test_a_parameter_that_has_been_transposed_where_it_is_is_refused(make):
    [x] = tensors((3, 3))
    optimizer = make(signpost.Adam, [x])
    x.data = x.data.t()
    set_gradients([x], 0)
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 is another view of the memory"):
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
    model[1].weight.data = model[1].weight.data.double()
    with pytest.raises(RuntimeError, match=r"1.weight is \[1, 3\], torch.float64, on cpu, and was"):
        optimizer.step()


@pytest.mark.parametrize(
    "parameter, name", [("weight", "weight, parameter 0 of group 1"), ("bias", "bias")]
)
def test_parameters_of_two_models_may_have_the_same_names(make, parameter, name):
    models = [nn.Linear(2, 1), nn.Linear(3, 1)]
    models[0].bias.requires_grad_(False)  # so that its name is free
    optimizer = make(signpost.Adam, [{"params": model.named_parameters()} for model in models])
    moved = getattr(models[1], parameter)
    moved.data = moved.data.double()
    with pytest.raises(RuntimeError, match=f"^{name} is .*torch.float64"):
        optimizer.step()


def test_a_gpu_that_cannot_be_used_is_told_of_before_joining(make, monkeypatch, world):
    monkeypatch.setattr(_device, "gpu_of", lambda tensor: 99)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(_device, "current_stream", lambda gpu: stream)
    monkeypatch.setattr(world, "aggregators", ["127.0.0.1:1"])  # where none is
    with pytest.raises(
        InvalidArgumentError, match="built without CUDA: build it with|GPU 99 cannot be used: "
    ):
        make(signpost.Adam, tensors((10,)))
