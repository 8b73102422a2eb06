"""Optimizers that send gradients during the backward pass, in a job of one worker."""

import contextlib
import gc
import threading
import weakref

import pytest
import signpost.torch as signpost
import torch
from job import use_small_chunks
from torch import nn


@pytest.fixture(scope="module", autouse=True)
def world():
    return signpost.init()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    use_small_chunks(monkeypatch.setattr)


@pytest.fixture
def make():
    """Makes optimizers, with overlap, that leave their jobs when the test is over."""
    made = []

    def make(parameters, overlap=True, kind=signpost.OneBitAdam, **options):
        if kind is signpost.OneBitAdam:
            options = {"freeze_step": 4, **options}
        made.append(kind(parameters, overlap=overlap, **{"lr": 0.01, **options}))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.leave()


class Odd(nn.Module):
    """Parameters of every kind that can be trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 20)
        self.sparse = nn.Embedding(50, 20, sparse=True)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.transposed = nn.Parameter(torch.randn(30, 20).t())
        self.low = nn.Linear(30, 20).to(torch.bfloat16)
        self.unused = nn.Parameter(torch.ones(700))
        self.frozen = nn.Parameter(torch.ones(20), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.output = nn.Linear(20, 50)
        self.output.weight = self.embedding.weight

    def forward(self, x):
        x = self.scale * self.embedding(x) + self.sparse(x) + self.frozen
        return self.output(self.low((x @ self.transposed).bfloat16()).float())


def loss_of(model, step):
    x = (torch.arange(16) * 7 + step) % 50
    return nn.functional.cross_entropy(model(x), x)


def train(optimizer, model, steps=10):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return optimizer.parameters_crc32c()


# Steps 6 and 7 are an interval, and 8 and 9 are in one.
LOCAL = {
    "kind": signpost.ZeroOneAdam,
    "var_freeze_step": 4,
    "var_update_scaler": 1,
    "local_step_scaler": 2,
    "local_step_clipper": 4,
}


@pytest.mark.parametrize("options", [{}, LOCAL])
def test_it_has_the_bits_of_one_without(make, options):
    plain, overlapped = Odd(), Odd()
    wanted = train(make(plain.parameters(), overlap=False, **options), plain)
    optimizer = make(overlapped.parameters(), **options)
    assert train(optimizer, overlapped) == wanted
    assert (optimizer.report.codec == "none") == bool(options)
    for a, b in zip(plain.parameters(), overlapped.parameters()):
        assert torch.equal(a, b)


def test_gradients_are_sent_during_the_backward_pass_and_parameters_change_in_the_step(make):
    model = Odd()
    optimizer = make(model.parameters())
    sent = []
    gradient_ready = optimizer._progress.member.session.gradient_ready
    optimizer._progress.member.session.gradient_ready = lambda *args: (
        sent.append(args[0]),
        gradient_ready(*args),
    )
    before = optimizer.parameters_crc32c()
    loss_of(model, 0).backward()
    tensors = len(optimizer._progress.member.tensors)
    assert len(sent) == tensors - 1  # all but the one without a gradient
    assert sent[0] > sent[-1]
    assert optimizer.parameters_crc32c() == before
    optimizer.step()
    assert len(sent) == tensors
    assert optimizer.parameters_crc32c() != before


def test_a_closure_computes_gradients_that_are_sent(make):
    plain, overlapped = Odd(), Odd()
    digests = []
    for model, overlap in ((plain, False), (overlapped, True)):
        optimizer = make(model.parameters(), overlap=overlap)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(6)]
        assert losses[-1] < losses[0]
        digests.append(optimizer.parameters_crc32c())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_no_sync_accumulates_gradients(make, overlap):
    plain, model = Odd(), Odd()
    reference, optimizer = make(plain.parameters(), False), make(model.parameters(), overlap)
    for step in range(6):
        for trained, of in ((reference, plain), (optimizer, model)):
            trained.zero_grad()
            for part in range(3):
                with trained.no_sync() if part < 2 else contextlib.nullcontext():
                    loss_of(of, 3 * step + part).backward()
            trained.step()
    assert optimizer.parameters_crc32c() == reference.parameters_crc32c()


def test_gradients_that_only_an_earlier_backward_pass_gave_are_sent_too(make):
    digests = []
    for overlap in (False, True):
        x, y = nn.Parameter(torch.ones(500)), nn.Parameter(torch.ones(500))
        optimizer = make([x, y], overlap)
        with optimizer.no_sync():
            (x * y).sum().backward()
        y.square().sum().backward()
        optimizer.step()
        digests.append(optimizer.parameters_crc32c())
    assert digests[0] == digests[1]


def test_gradients_that_no_backward_pass_gave_are_stepped_with(make):
    digests = []
    for overlap in (False, True):
        x = nn.Parameter(torch.ones(500))
        optimizer = make([x], overlap)
        for step in range(6):
            x.grad = torch.full((500,), step - 2.5)
            optimizer.step()
        digests.append(optimizer.parameters_crc32c())
    assert digests[0] == digests[1]


def test_a_second_backward_pass_is_refused_where_it_happens(make):
    model = Odd()
    make(model.parameters())
    loss_of(model, 0).backward()
    with pytest.raises(
        RuntimeError,
        match=r"got a gradient again .*: to accumulate .* `with optimizer.no_sync\(\):`",
    ):
        loss_of(model, 1).backward()


def test_accumulating_onto_gradients_that_were_sent_is_refused(make):
    model = Odd()
    optimizer = make(model.parameters())
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="got a gradient again"):
        with optimizer.no_sync():
            loss_of(model, 1).backward()


CHANGES = {
    "clipped": lambda model, _: nn.utils.clip_grad_norm_(model.low.parameters(), 1e-3),
    "scaled": lambda model, _: model.output.bias.grad.mul_(2),
    "cleared": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "gone": lambda _, optimizer: optimizer.zero_grad(set_to_none=True),
    "another": lambda model, _: setattr(model.scale, "grad", torch.ones(())),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_gradients_that_have_changed_since_are_refused(make, change):
    model = Odd()
    optimizer = make(model.parameters())
    loss_of(model, 0).backward()
    change(model, optimizer)
    with pytest.raises(RuntimeError, match="has changed since it was sent .*: to clip, .*=False"):
        optimizer.step()
    assert optimizer.steps == 0


def test_learning_rates_are_those_of_the_backward_pass(make):
    model = Odd()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    train(optimizer, model, 3)
    scheduler.step()
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    scheduler.step()
    with pytest.raises(
        RuntimeError, match=r"learning_rate of group 0 was .* set rates before backward\(\)"
    ):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.01 * 0.9
    optimizer.step()
    assert optimizer.steps == 4


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise ArithmeticError("no gradient")


def test_a_backward_pass_that_failed_cannot_be_repeated(make):
    x, y = nn.Parameter(torch.ones(500)), nn.Parameter(torch.ones(500))
    optimizer = make([x, y])
    with pytest.raises(ArithmeticError):
        (Fails.apply(x.exp()) * y).sum().backward()
    assert x.grad is None and y.grad is not None
    with pytest.raises(RuntimeError, match="If a backward pass was interrupted"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="has changed since it was sent"):
        optimizer.step()


def test_after_a_backward_pass_that_was_interrupted_the_step_has_what_is_there(make):
    x, y = nn.Parameter(torch.ones(500)), nn.Parameter(torch.ones(500))
    optimizer = make([x, y])
    with pytest.raises(ArithmeticError):
        (Fails.apply(x.exp()) * y).sum().backward()
    optimizer.step()
    assert torch.equal(x, torch.ones(500)) and not torch.equal(y, torch.ones(500))


def test_checkpoints_are_of_whole_steps(make, tmp_path):
    model = Odd()
    optimizer = make(model.parameters())
    loss_of(model, 0).backward()
    with pytest.raises(signpost.SignpostError, match="step 0 has begun and is not finished"):
        optimizer.checkpoint(str(tmp_path))
    optimizer.step()
    optimizer.checkpoint(str(tmp_path))
    wanted = train(optimizer, model, 3)
    resumed = Odd()
    optimizer.leave()
    assert train(make(resumed.parameters(), resume=str(tmp_path)), resumed, 3) == wanted


def test_after_leaving_backward_passes_are_left_alone(make):
    model = Odd()
    optimizer = make(model.parameters())
    optimizer.leave()
    for step in range(2):
        loss_of(model, step).backward()


def test_hooks_do_not_keep_an_optimizer_alive():
    model = Odd()
    optimizer = signpost.OneBitAdam(model.parameters(), freeze_step=4, overlap=True)
    backward = weakref.ref(optimizer._progress.member.backward)
    optimizer._progress.member.session.leave()
    del optimizer
    gc.collect()
    assert backward() is None
    loss_of(model, 0).backward()


def test_an_optimizer_that_is_dropped_leaves_the_model_to_the_next():
    """At once, without a garbage collection."""
    model = Odd()
    gc.disable()
    try:
        optimizer = signpost.Adam(model.parameters(), overlap=True)
        train(optimizer, model, 2)
        dropped, session = weakref.ref(optimizer), weakref.ref(optimizer._progress.member.session)
        del optimizer
        assert dropped() is None and session() is None
        optimizer = signpost.OneBitAdam(model.parameters(), freeze_step=4, overlap=True)
        train(optimizer, model, 2)
        assert optimizer.steps == 2
        optimizer.leave()
    finally:
        gc.enable()


def test_backward_passes_in_several_threads_change_no_bit(make):
    # The passes have no matrix products, which may add in another order when several threads compute.
    def parameters_after(overlap):
        generator = torch.Generator().manual_seed(1)
        parts = [[nn.Parameter(torch.ones(400)) for _ in range(16)] for _ in range(4)]
        optimizer = make([p for part in parts for p in part], overlap=overlap)
        for _ in range(12):
            optimizer.zero_grad()
            factors = torch.randn(400, generator=generator)
            passes = [
                threading.Thread(target=lambda part=part: sum(part).mul(factors).sum().backward())
                for part in parts
            ]
            for thread in passes:
                thread.start()
            for thread in passes:
                thread.join()
            optimizer.step()
        return optimizer.parameters_crc32c()

    wanted = parameters_after(overlap=False)
    for _ in range(5):
        assert parameters_after(overlap=True) == wanted
