"""Optimizers of parameters on a GPU: one that is simulated, and CPU tensors on it."""

import io
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import signpost.torch as signpost
import simulated_gpu
import torch
from gpu_job import LOCAL, STEPS, OfAllTypes, crc_of, train
from job import use_small_chunks
from signpost import (
    PYTHON_CODEC,
    InvalidArgumentError,
    Parameter,
    Rates,
    Reduction,
    ResourceExhaustedError,
    Session,
    _abi,
)
from signpost.torch import _device
from signpost.torch._tensors import TrainedTensor
from torch import nn

JOB = str(Path(__file__).with_name("gpu_job.py"))


@pytest.fixture(scope="module", autouse=True)
def world():
    return signpost.init()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    use_small_chunks(monkeypatch.setattr)


@pytest.fixture
def on_gpu(monkeypatch):
    simulated_gpu.put_tensors_on(0, monkeypatch.setattr)


@pytest.fixture
def make():
    """Makes optimizers that leave their jobs when the test is over."""
    made = []

    def make(parameters, optimizer=signpost.OneBitAdam, **options):
        if optimizer is signpost.OneBitAdam:
            options = {"freeze_step": 4, "variance_refresh_interval": 5, **options}
        made.append(optimizer(parameters, lr=0.01, **options))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.leave()


def run_job(placements, *options, task=(), **environment):
    """Runs two ranks, which do the task once for each placement. A placement names the ranks that are
    on GPUs. Returns for each placement what each rank says that it ends with."""
    launch = [sys.executable, "-m", "signpost", "run", "-n", "2", "--aggregators", "2", *options]
    ended = subprocess.run(
        [*launch, "--", sys.executable, JOB, ",".join(placements), *task],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    print(ended.stdout)
    assert ended.returncode == 0
    said = {placement: ([], []) for placement in placements}
    placement_of = {}  # for each rank, where it is
    for rank, text in re.findall(r"\[rank ([01])\] (.*)\n", ended.stdout):
        if text.startswith("placement "):
            placement_of[rank] = text.removeprefix("placement ")
        elif re.search(r" \w+$", text):
            said[placement_of[rank]][int(rank)].append(text)
    return list(said.values())


def assert_all_are_the_same(said):
    """Each rank says the same in each placement. Returns that."""
    wanted = said[0][0]
    for of_ranks in said:
        assert list(of_ranks) == [wanted, wanted]
    return wanted


def test_ranks_on_gpus_have_the_bits_of_ranks_on_the_cpu():
    wanted = assert_all_are_the_same(run_job(["", "0", "1"]))
    assert len(wanted) == 30 and len(set(wanted)) == 22  # those with overlap have those without


def test_so_they_do_in_a_codec_of_ones_own():
    aggregators = {
        "PYTHONPATH": os.pathsep.join([str(Path(JOB).parent), os.environ["PYTHONPATH"]]),
        "SIGNPOST_CODEC_LIBRARIES": PYTHON_CODEC,
        "SIGNPOST_PYTHON": sys.executable,
        "SIGNPOST_PYTHON_CODECS": "codecs_of_mine:Signs",
    }
    wanted = assert_all_are_the_same(run_job(["", "0"], task=["codec"], **aggregators))
    assert len(wanted) == 12


def test_reductions_on_gpus_have_the_bits_of_reductions_on_the_cpu(tmp_path):
    task = ["reductions", str(tmp_path / "rendezvous")]
    wanted = assert_all_are_the_same(run_job(["", "0", "01"], task=task, GLOO_SOCKET_IFNAME="lo"))
    assert len(wanted) == 3 * 6 * 4 + 1


def test_a_library_without_cuda_reduces_tensors_of_gpus_on_the_cpu(on_gpu, monkeypatch):
    tensor = torch.arange(3.0)
    on_gpu = _device.reduction_for(tensor, "on the GPU", [("x", (3,))])
    assert type(on_gpu.reduction) is _device.GpuReduction
    monkeypatch.setattr(_abi.library, "signpost_has_cuda", lambda: 0)
    on_cpu = _device.reduction_for(tensor, "on the CPU", [("x", (3,))])
    assert type(on_cpu.reduction) is Reduction and on_cpu.device == torch.device("cpu")
    assert signpost.all_reduce(tensor).tolist() == [0, 1, 2]
    for placed in (on_gpu, on_cpu):
        placed.reduction.leave()


def test_a_reduction_without_room_empties_pytorchs_cache_and_tries_again(on_gpu, monkeypatch):
    happened = []

    class Full(_device.GpuReduction):
        def __init__(self, *arguments, **how):
            happened.append("join")
            if len(happened) == 1:
                raise ResourceExhaustedError("no room")
            super().__init__(*arguments, **how)

    monkeypatch.setattr(_device, "GpuReduction", Full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("empty"))
    assert signpost.all_reduce(torch.ones(3), name="without room").tolist() == [1, 1, 1]
    assert happened == ["join", "empty", "join"]


def test_a_reduction_puts_its_work_on_the_stream_that_is_current_then(calls, use):
    for number in (4, 5):
        use(number)
        calls.clear()
        signpost.all_reduce(torch.ones(5), name="on streams")
        assert calls[-2:] == [("reduction_set_stream", number), "reduce"]


@pytest.fixture
def go_on(make, monkeypatch):
    """Makes optimizers that train until step `steps`, on that GPU, or None."""

    def go_on(model, steps, gpu, **options):
        simulated_gpu.put_tensors_on(gpu, monkeypatch.setattr)
        optimizer = make(model.parameters(), **options)
        train(optimizer, model, steps)
        return optimizer

    return go_on


PLACES = pytest.mark.parametrize("before, after", [(0, 1), (0, None), (None, 0)])
ZERO_ONE = {"optimizer": signpost.ZeroOneAdam, **LOCAL}
AS_DEEPSPEED = {"compat": "deepspeed"}
EACH = pytest.mark.parametrize(
    "saved_at, options",
    [
        (2, {}),
        (7, {}),
        (2, ZERO_ONE),
        (7, ZERO_ONE),
        (7, AS_DEEPSPEED),
        (7, {"optimizer": signpost.OneBitLamb, "freeze_step": 4, **AS_DEEPSPEED}),
        (7, {**ZERO_ONE, **AS_DEEPSPEED}),
    ],
)


@PLACES
@EACH
def test_checkpoints_lead_to_and_from_gpus(go_on, tmp_path, before, after, saved_at, options):
    whole, model = OfAllTypes(), OfAllTypes()
    wanted = go_on(whole, STEPS, gpu=None, **options).parameters_crc32c()
    saved = go_on(model, saved_at, before, **options)
    saved.checkpoint(str(tmp_path))
    saved.leave()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    resumed = go_on(model, STEPS, after, resume=str(tmp_path), **options)
    assert resumed.parameters_crc32c() == wanted
    assert crc_of(model.parameters()) == crc_of(whole.parameters())


@PLACES
@EACH
def test_state_dicts_lead_to_and_from_gpus(go_on, before, after, saved_at, options):
    whole, model, other = OfAllTypes(), OfAllTypes(), OfAllTypes()
    wanted = go_on(whole, STEPS, gpu=None, **options).parameters_crc32c()
    file = io.BytesIO()
    torch.save(go_on(model, saved_at, before, **options).state_dict(), file)
    file.seek(0)
    optimizer = go_on(other, 1, after, **options)
    optimizer.load_state_dict(torch.load(file))
    with torch.no_grad():
        for parameter, value in zip(other.parameters(), model.parameters()):
            parameter.copy_(value)
    assert optimizer.steps == saved_at
    assert train(optimizer, other) == wanted
    assert crc_of(other.parameters()) == crc_of(whole.parameters())


def test_an_optimizer_follows_its_model_to_a_gpu_when_its_state_is_loaded(go_on, monkeypatch):
    """accelerate's prepare() moves the model, and then saves and loads its optimizer."""
    whole, model = OfAllTypes(), OfAllTypes()
    wanted = go_on(whole, STEPS, gpu=None).parameters_crc32c()
    optimizer = go_on(model, 7, gpu=None)
    simulated_gpu.put_tensors_on(0, monkeypatch.setattr)
    optimizer.load_state_dict(optimizer.state_dict())
    assert train(optimizer, model) == wanted
    assert optimizer._progress.member.tensors[0].gpu == 0


@pytest.fixture
def calls(monkeypatch, on_gpu):
    """Calls of the library, and of streams, in their order."""
    calls, call = [], _abi.call

    def record(function, *arguments):
        if function.endswith("set_stream"):
            calls.append((function, arguments[1]))  # and the simulated GPU has no such stream
        else:
            calls.append(function)
            call(function, *arguments)

    monkeypatch.setattr(_abi, "call", record)
    return calls


class RecordedStream:
    def __init__(self, number, calls):
        self.cuda_stream, self._calls = number, calls

    def synchronize(self):
        self._calls.append(("synchronize", self.cuda_stream))


@pytest.fixture
def use(monkeypatch, calls):
    """Makes a stream the current one of this thread; others have the one of their name."""
    now, main = [0], threading.get_ident()

    def current_stream(gpu):
        assert gpu == 0
        is_main = threading.get_ident() == main
        number = now[0] if is_main else int(threading.current_thread().name)
        return RecordedStream(number, calls)

    monkeypatch.setattr(_device, "current_stream", current_stream)
    return lambda number: now.__setitem__(0, number)


def vector():
    return nn.Parameter(torch.ones(500))


def test_what_makes_the_parameters_is_done_before_joining(make, calls, use):
    use(3)
    make([vector()])
    assert calls == [("synchronize", 3), "join"]


def test_each_call_puts_its_work_on_the_stream_that_is_current_then(make, calls, use, tmp_path):
    x = vector()
    optimizer = make([x])
    x.grad = torch.ones(500)
    for number, function, call in (
        (4, "step", optimizer.step),
        (5, "step", optimizer.step),
        (6, "checkpoint", lambda: optimizer.checkpoint(str(tmp_path))),
        (7, "save_state", optimizer.state_dict),
    ):
        use(number)
        calls.clear()
        call()
        assert calls[:2] == [("set_stream", number), function]
    use(8)
    calls.clear()
    optimizer.parameters_crc32c()
    assert calls == [("set_stream", 8)]


def backward(loss, stream):
    """As of autograd's threads, of which each has the stream of what it computes."""
    thread = threading.Thread(target=loss.backward, name=str(stream))
    thread.start()
    thread.join()


def test_gradients_are_sent_on_the_stream_that_makes_them(make, calls, use):
    x, y, unused = vector(), vector(), vector()
    optimizer = make([x, y, unused], overlap=True)
    use(1)
    for _ in range(2):
        calls.clear()
        backward(x.sum(), stream=2)
        assert calls == [("set_stream", 2), "begin_step", ("set_stream", 2), "gradient_ready"]
        calls.clear()
        backward(y.sum(), stream=3)
        # A chunk may have a part of x too: the library puts a stream behind the one before.
        assert calls == [("set_stream", 3), "gradient_ready"]
        calls.clear()
        optimizer.step()
        assert calls[:3] == [("set_stream", 1), "gradient_ready", ("set_stream", 1)]
        assert calls[3] == "finish_step"
        optimizer.zero_grad(set_to_none=True)


def test_gradients_are_read_where_and_as_they_are(make, on_gpu, monkeypatch):
    read = {}
    step, gradient_ready = Session.step, Session.gradient_ready

    def recorded_step(session, gradients, rates):
        read.update(enumerate(gradients))
        return step(session, gradients, rates)

    def recorded_gradient_ready(session, index, gradient):
        read[index] = gradient
        gradient_ready(session, index, gradient)

    monkeypatch.setattr(Session, "gradient_ready", recorded_gradient_ready)
    monkeypatch.setattr(_device.GpuSession, "step", recorded_step)
    dtypes = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    for overlap in (False, True):
        parameters = [nn.Parameter(torch.ones(300, dtype=dtype)) for dtype in dtypes]
        optimizer = make(parameters, overlap=overlap)
        sum(p.float().sum() for p in parameters).backward()
        optimizer.step()
        assert read == {i: p.grad.data_ptr() for i, p in enumerate(parameters)}
        joined = [tensor.as_session_parameter() for tensor in optimizer._progress.member.tensors]
        assert [p.gradient_type for p in joined] == list(dtypes.values())
        read.clear()


def test_a_gradient_of_another_type_gets_the_parameters(on_gpu):
    tensor = TrainedTensor(nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), "x", 0)
    tensor.parameter = SimpleNamespace(grad=torch.full((3,), 1.5))
    assert torch.equal(tensor.gradient(), torch.full((3,), 1.5, dtype=torch.bfloat16))


def test_a_gradient_that_is_elsewhere_is_refused(on_gpu):
    tensor = TrainedTensor(vector(), "x", 0)
    tensor.parameter = SimpleNamespace(grad=torch.ones(500, device="meta"))
    with pytest.raises(RuntimeError, match="gradient of x is on meta, .* was on cpu when"):
        tensor.gradient()


@pytest.mark.parametrize(
    "gpus, message",
    [
        ((0, None), "parameter 0 of group 0 is on cuda:0 and parameter 1 of group 0 on the CPU"),
        ((None, 1), "parameter 0 of group 0 is on the CPU and parameter 1 of group 0 on cuda:1"),
        ((0, 1), "parameter 0 of group 0 is on cuda:0 and parameter 1 of group 0 on cuda:1"),
    ],
)
def test_parameters_that_are_not_in_one_place_are_refused(make, monkeypatch, gpus, message):
    x, y = vector(), vector()
    monkeypatch.setattr(_device, "gpu_of", lambda tensor: gpus[0] if tensor is x else gpus[1])
    with pytest.raises(TypeError, match=message + r"; .* model.cuda\(\), before"):
        make([x, y])


def test_a_frozen_parameter_may_be_elsewhere(make, on_gpu):
    frozen = nn.Parameter(torch.ones(3, device="meta"), requires_grad=False)
    make([vector(), frozen])


def test_all_reduce_takes_tensors_on_a_gpu(on_gpu):
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.arange(6, dtype=dtype)
        assert signpost.all_reduce(tensor) is tensor
        assert torch.equal(tensor, torch.arange(6, dtype=dtype))


def test_sessions_name_their_gpu_and_stream(world):
    options = world.next_job()
    options.gpu = 0
    values, gradient = torch.ones(8), torch.ones(8, dtype=torch.float16)
    parameter = Parameter("x", (8,), values.data_ptr(), values, gradient_type="fp16")
    session = Session(options, [parameter])
    session.set_stream(0)
    session.step([gradient.data_ptr()], [Rates(learning_rate=0.5)])
    session.parameters_crc32c()
    assert torch.equal(values, torch.full((8,), 0.5))
    session.leave()


def test_sessions_on_the_host_have_fp32_gradients(world):
    values = torch.ones(8)
    for wrong, error, message in (
        ("fp16", InvalidArgumentError, "parameter x: on the host gradients are fp32"),
        ("int8", ValueError, "parameter x is 'int8', wanted one of fp32, bf16, fp16"),
    ):
        with pytest.raises(error, match=message):
            Session(
                world.next_job(),
                [Parameter("x", (8,), values.data_ptr(), values, gradient_type=wrong)],
            )
