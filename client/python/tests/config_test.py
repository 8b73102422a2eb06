"""Optimizers, and ranks, as a configuration file has them."""

import inspect
import json
import math
import pickle
import warnings
from types import MappingProxyType

import pytest
import signpost.torch as signpost
import torch
from signpost import InvalidArgumentError, NotFoundError
from torch import nn

CLASSES = {
    "Adam": signpost.Adam,
    "OneBitAdam": signpost.OneBitAdam,
    "OneBitLamb": signpost.OneBitLamb,
    "ZeroOneAdam": signpost.ZeroOneAdam,
}
NEEDED = {
    "Adam": {},
    "OneBitAdam": {"freeze_step": 3},
    "OneBitLamb": {"freeze_step": 3},
    "ZeroOneAdam": {"var_freeze_step": 3},
}
# A program's affair.
NOT_IN_FILES = {
    "self",
    "params",
    "resume",
    "resume_with_other_world_size",
    "overlap",
    "replicate_mesh",
    "shard_mesh",
    "name",
    "foreach",
    "capturable",
    "fused",
}


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory):
    """Of a single process, whose file says nothing of sessions: it has an aggregator of its own, for
    which the file's are not meant."""
    file = tmp_path_factory.mktemp("world") / "job.yaml"
    file.write_text("aggregator: {listen: nowhere}\noptimizer: {type: Adam}\n")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("SIGNPOST_CONFIG", str(file))
        return signpost.init()


def tensor():
    return nn.Parameter(torch.linspace(-1, 1, 300))


def section(kind, **params):
    return {"optimizer": {"type": kind, "params": params}}


def train(optimizer, parameter, steps=6):
    for step in range(steps):
        parameter.grad = torch.sin(torch.arange(300.0) + step)
        optimizer.step()
    return parameter.detach().clone()


@pytest.mark.parametrize("kind", CLASSES)
def test_trains_with_the_bits_of_the_class(make, kind):
    params = {**NEEDED[kind], "lr": 0.02, "betas": [0.8, 0.99], "weight_decay": 0.01, "eps": 1e-6}
    ours, theirs = tensor(), tensor()
    optimizer = make(signpost.optimizer, [ours], section(kind, **params))
    assert type(optimizer) is CLASSES[kind]
    assert torch.equal(
        train(optimizer, ours), train(make(CLASSES[kind], [theirs], **params), theirs)
    )


@pytest.mark.parametrize("kind", CLASSES)
def test_files_know_every_param_of_the_class_and_its_default(make, kind):
    signature = inspect.signature(CLASSES[kind].__init__).parameters
    defaults = {n: p.default for n, p in signature.items() if n not in NOT_IN_FILES}
    given = {n: d for n, d in defaults.items() if d not in (None, inspect.Parameter.empty)}
    assert {"lr", "betas", "bias_correction"} <= set(given)
    ours, theirs = tensor(), tensor()
    optimizer = make(signpost.optimizer, [ours], section(kind, **{**given, **NEEDED[kind]}))
    plain = make(signpost.optimizer, [theirs], section(kind, **NEEDED[kind]))
    assert torch.equal(train(optimizer, ours), train(plain, theirs))
    for name in set(defaults) - set(given):
        with pytest.raises(InvalidArgumentError, match=f"{name} is 'x', wanted"):
            signpost.optimizer([tensor()], section(kind, **{name: "x"}))


def test_arguments_come_before_the_file(make):
    config = section("OneBitAdam", lr=0.5, freeze_step=3)
    optimizer = make(signpost.optimizer, [tensor()], config, lr=0.25, weight_decay=0.125)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["weight_decay"] == 0.125
    assert optimizer._options["freeze_step"] == 3


def test_takes_a_whole_file_of_deepspeeds(make, tmp_path):
    file = tmp_path / "ds_config.json"
    params = {
        "lr": 1e-3,
        "weight_decay": 0.01,
        "bias_correction": False,
        "var_freeze_step": 1000,
        "var_update_scaler": 8,
        "local_step_scaler": 500,
        "local_step_clipper": 4,
        "cuda_aware": False,
        "comm_backend_name": "nccl",
    }
    whole = {**section("ZeroOneAdam", **params), "train_batch_size": 8, "fp16": {"enabled": False}}
    file.write_text(json.dumps(whole))
    optimizer = make(signpost.optimizer, [tensor()], file)
    assert isinstance(optimizer, signpost.ZeroOneAdam)
    assert optimizer._options["bias_correction"] is False
    assert optimizer._options["var_update_scaler"] == 8
    assert optimizer._options["local_step_clipper"] == 4


DEEPSPEEDS = {**section("Adam", lr=0.125), "train_batch_size": 8}


@pytest.fixture(params=["dictionary", "file", "environment"])
def given(request, monkeypatch, tmp_path):
    """Turns a dictionary into what optimizer() is given."""

    def give(config):
        file = tmp_path / "ds_config.json"
        file.write_text(json.dumps(config))
        monkeypatch.setenv("SIGNPOST_CONFIG", str(file) if request.param == "environment" else "")
        return {"dictionary": config, "file": file, "environment": None}[request.param]

    return give


def test_gradients_are_clipped_as_deepspeeds_file_says(make, given):
    config = given({**DEEPSPEEDS, "gradient_clipping": 0.5})
    ours, theirs = tensor(), tensor()
    optimizer = make(signpost.optimizer, [ours], config)
    wanted = make(signpost.Adam, [theirs], lr=0.125, max_grad_norm=0.5)
    assert torch.equal(train(optimizer, ours), train(wanted, theirs))
    assert optimizer.grad_norm == wanted.grad_norm > 0.5


@pytest.mark.parametrize(
    "clipping, params, arguments, wanted",
    [
        (0, {}, {}, None),
        (None, {}, {"overlap": True}, None),
        (0, {}, {"overlap": True}, None),
        (1, {}, {"max_grad_norm": 2.0}, 2.0),
        (1, {}, {"max_grad_norm": None, "overlap": True}, None),
        (1, {"max_grad_norm": 3.0}, {}, 3.0),
        (1, {"max_grad_norm": 0}, {}, 1.0),  # as in DeepSpeed
    ],
)
def test_max_grad_norm_comes_before_gradient_clipping(make, clipping, params, arguments, wanted):
    config = {**section("OneBitAdam", freeze_step=3, **params), "train_batch_size": 8}
    config["gradient_clipping"] = clipping
    assert make(signpost.optimizer, [tensor()], config, **arguments)._max_grad_norm == wanted


def test_gradient_clipping_that_cannot_be_done_is_named():
    for wrong in (-1, "much", True, [1], float("inf"), float("nan")):
        with pytest.raises(InvalidArgumentError, match="gradient_clipping is .*, wanted a posit"):
            signpost.optimizer([tensor()], {**DEEPSPEEDS, "gradient_clipping": wrong})
    with pytest.raises(InvalidArgumentError, match="gradient_clipping is 'auto', .* Hugging Face"):
        signpost.optimizer([tensor()], {**DEEPSPEEDS, "gradient_clipping": "auto"})
    with pytest.raises(ValueError, match="gradient_clipping is 1, .* argument max_grad_norm=None"):
        signpost.optimizer([tensor()], {**DEEPSPEEDS, "gradient_clipping": 1}, overlap=True)


def test_a_warning_names_what_deepspeed_would_do_besides(make, given):
    config = {
        **DEEPSPEEDS,
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR"},
        "fp16": {"enabled": True},
        "bf16": {"enabled": False},
        "amp": {},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10,
        "wall_clock_breakdown": True,
        "flops_profiler": {"enabled": True},
    }
    with pytest.warns(UserWarning) as warned:
        make(signpost.optimizer, [tensor()], given(config))
    of_schedule, of_sections = (str(warning.message) for warning in warned)
    assert "has a scheduler, WarmupLR: signpost.scheduler(optimizer, ...) makes it" in of_schedule
    assert "nothing is done about fp16, with" in of_sections


def test_params_that_are_auto_are_arguments(make, given):
    config = given(section("OneBitAdam", lr="auto", weight_decay="auto", freeze_step=3))
    optimizer = make(signpost.optimizer, [tensor()], config, lr=0.25, weight_decay=0.5)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (
        0.25,
        0.5,
    )
    with pytest.raises(InvalidArgumentError, match="has weight_decay as 'auto', .* weight_decay="):
        signpost.optimizer([tensor()], config, lr=0.25)


def rates_of(make, kind, steps, **params):
    optimizer = make(signpost.Adam, [tensor()], lr=0.5)
    config = {"scheduler": {"type": kind, "params": params}}
    schedule, rates = signpost.scheduler(optimizer, config), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        train(optimizer, optimizer.param_groups[0]["params"][0], steps=1)
        schedule.step()
    return rates


# By hand from DeepSpeed's formulas: the first two steps have the least rate.
@pytest.mark.parametrize(
    "kind, params, wanted",
    [
        (
            "WarmupLR",
            dict(warmup_num_steps=4, warmup_type="linear"),
            [0, 0, 0.125, 0.25, 0.375, 0.5, 0.5],
        ),
        (
            "WarmupLR",
            dict(warmup_min_lr=0.1, warmup_max_lr=0.3, warmup_num_steps=4),
            [0.1, 0.1, 0.2, 0.1 + 0.2 * math.log(3) / math.log(4), 0.3, 0.3],
        ),
        (
            "WarmupDecayLR",
            dict(warmup_max_lr=1.0, warmup_num_steps=2, total_num_steps=6, warmup_type="linear"),
            [0, 0, 0.5, 1.0, 0.75, 0.5, 0.25, 0, 0],
        ),
        (
            "WarmupCosineLR",
            dict(warmup_num_steps=2, total_num_steps=4, cos_min_ratio=0.2, warmup_type="linear"),
            [0, 0, 0.25, 0.5 * 0.6, 0.5 * 0.2],
        ),
    ],
)
def test_schedules_are_deepspeeds(make, kind, params, wanted):
    assert rates_of(make, kind, len(wanted), **params) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(
    "scheduler, why",
    [
        (None, "has no section 'scheduler'"),
        (
            {"type": "OneCycle"},
            "type is 'OneCycle', wanted WarmupLR, WarmupDecayLR, WarmupCosineLR",
        ),
        ({"type": "WarmupDecayLR"}, "WarmupDecayLR needs total_num_steps"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}, "WarmupLR needs warmup_max_lr"),
        (
            {"type": "WarmupLR", "params": {"warmup_steps": 3}},
            "has no param 'warmup_steps', but warmup_min",
        ),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": "3"}}, "is '3', wanted a number"),
        (
            {"type": "WarmupLR", "params": {"warmup_type": "cubic"}},
            "is 'cubic', wanted 'log' or 'lin",
        ),
    ],
)
def test_wrong_schedules_are_named(make, scheduler, why):
    optimizer = make(signpost.Adam, [tensor()])
    with pytest.raises(InvalidArgumentError, match=why):
        signpost.scheduler(optimizer, {"scheduler": scheduler} if scheduler else {})


def test_a_warning_says_what_the_program_does_to_accumulate_gradients(make, given):
    config = given({**DEEPSPEEDS, "gradient_accumulation_steps": 4})
    with pytest.warns(UserWarning, match="divide the loss by 4, .* behind every 4th backward"):
        make(signpost.optimizer, [tensor()], config)


def test_nothing_is_warned_of_where_all_is_used(make, given):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(signpost.optimizer, [tensor()], given({**DEEPSPEEDS, "gradient_clipping": 1.0}))
        once = {**DEEPSPEEDS, "gradient_accumulation_steps": 1}
        make(signpost.optimizer, [tensor()], given(once))
        make(signpost.optimizer, [tensor()], given(section("Adam", lr=0.5)))


def test_without_a_file_it_is_the_environments(make, monkeypatch, tmp_path):
    with pytest.raises(InvalidArgumentError, match="set SIGNPOST_CONFIG"):
        signpost.optimizer([tensor()])
    file = tmp_path / "job.yaml"
    file.write_text("optimizer: {type: AdamW, params: {lr: 0.125, max_grad_norm: 2}}\n")
    monkeypatch.setenv("SIGNPOST_CONFIG", str(file))
    optimizer = make(signpost.optimizer, [tensor()])
    assert optimizer.param_groups[0]["lr"] == 0.125
    train(optimizer, optimizer.param_groups[0]["params"][0], steps=1)
    assert optimizer.grad_norm > 2


def test_an_error_has_its_exit_code_on_other_processes_too(monkeypatch):
    monkeypatch.delenv("SIGNPOST_CONFIG", raising=False)
    for config in (None, section("OneBitLamb"), section("OneBitAdm")):
        with pytest.raises(InvalidArgumentError) as caught:
            signpost.optimizer([tensor()], config)
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (copy.code, copy.exit_code, str(copy)) == (3, 64, str(caught.value))


def test_takes_any_mapping_and_any_character(make):
    params = MappingProxyType({"lr": 0.25, "local_step_scaler": 0, "var_freeze_step": 3})
    config = {"job": "\U0001f6a6", **section("ZeroOneAdam")}
    config["optimizer"]["params"] = params
    optimizer = make(signpost.optimizer, [tensor()], MappingProxyType(config))
    assert optimizer.param_groups[0]["lr"] == 0.25
    with pytest.raises(TypeError, match="object"):
        signpost.optimizer([tensor()], section("Adam", lr=object()))


def test_errors_name_the_line_and_the_nearest_key(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("optimizer:\n  type: OneBitAdam\n  params:\n    freze_step: 3\n")
    with pytest.raises(InvalidArgumentError, match="job.yaml:4: .*did you mean 'freeze_step'?"):
        signpost.optimizer([tensor()], file)
    with pytest.raises(InvalidArgumentError, match="config:.*did you mean 'OneBitAdam'?"):
        signpost.optimizer([tensor()], section("OneBitAdm"))
    with pytest.raises(NotFoundError, match="not/there"):
        signpost.optimizer([tensor()], "/not/there")
    for kind, needed, share in (
        ("OneBitLamb", "freeze_step", "30%"),
        ("ZeroOneAdam", "var_freeze_step", "20%"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"{kind} needs {needed}.* about {share}"):
            signpost.optimizer([tensor()], section(kind))
    with pytest.raises(TypeError, match="lerning_rate"):
        signpost.optimizer([tensor()], section("Adam"), lerning_rate=1)
