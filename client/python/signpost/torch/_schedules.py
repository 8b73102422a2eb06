"""Learning rates as the section `scheduler` of DeepSpeed's files has them.

The formulas are those of DeepSpeed's deepspeed/runtime/lr_schedules.py. There the first step is taken
before the schedule counts, so that step n has the rate of n - 1.
"""

import math
from typing import Any, Callable, Dict, List, Mapping, NoReturn

import torch

from signpost import InvalidArgumentError
from signpost._config import Source, deepspeed_settings

_REQUIRED = object()
# Each with its params, and their defaults.
_WARM_UP = {
    "warmup_min_lr": 0.0,
    "warmup_max_lr": 0.001,
    "warmup_num_steps": 1000,
    "warmup_type": "log",
}
_PARAMS: Dict[str, Dict[str, Any]] = {
    "WarmupLR": {**_WARM_UP, "warmup_max_lr": None},
    "WarmupDecayLR": {**_WARM_UP, "total_num_steps": _REQUIRED},
    "WarmupCosineLR": {
        "total_num_steps": _REQUIRED,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
}


class Schedule(torch.optim.lr_scheduler.LRScheduler):  # type: ignore[misc]
    """A schedule whose rate is a function of the step alone. All of PyTorch's calls work."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, rate_of: Callable[[int, float], float]
    ) -> None:
        """`rate_of` returns the learning rate of a step, from 0 on, of a group with that first rate."""
        self._rate_of = rate_of
        super().__init__(optimizer)

    def get_lr(self) -> List[float]:
        return [self._rate_of(self.last_epoch, base) for base in self.base_lrs]


def scheduler(
    optimizer: torch.optim.Optimizer, config: Source = None, **arguments: Any
) -> Schedule:
    """Makes the learning-rate schedule of a DeepSpeed file's section `scheduler`.

        optimizer = signpost.optimizer(model.parameters(), "ds_config.json")
        scheduler = signpost.scheduler(optimizer, "ds_config.json", total_num_steps=10_000)

    Call its step() behind each optimizer.step(), on all ranks.

    Args:
        config: as optimizer()'s.
        arguments: params of that type, before what the configuration says; those that it has as "auto".

    Raises:
        InvalidArgumentError: there is no such section, or names the type or param that is unknown, missing
            or no number.
    """
    section = deepspeed_settings(config).get("scheduler")
    if not isinstance(section, Mapping):
        _refuse("the configuration has no section 'scheduler'")
    kind = section.get("type")
    if kind not in _PARAMS:
        _refuse(
            f"the scheduler's type is {kind!r}, wanted {', '.join(_PARAMS)}; torch.optim.lr_scheduler has others"
        )
    given = {**section.get("params", {}), **arguments}
    params = {**_PARAMS[kind], **given}
    for name, value in params.items():
        if name not in _PARAMS[kind]:
            _refuse(f"{kind} has no param {name!r}, but {', '.join(_PARAMS[kind])}")
        if value is _REQUIRED or value == "auto":
            _refuse(f"{kind} needs {name}: give it as an argument, such as {name}=...")
        if name == "warmup_type":
            if value not in ("log", "linear"):
                _refuse(f"warmup_type is {value!r}, wanted 'log' or 'linear'")
        elif value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0
        ):
            _refuse(f"{name} of {kind} is {value!r}, wanted a number, 0 or more")
    return Schedule(optimizer, _rates_of(kind, params))


def _rates_of(kind: str, params: Dict[str, Any]) -> Callable[[int, float], float]:
    warm_up = max(2, params["warmup_num_steps"])

    def rise(step: int) -> float:
        if params["warmup_type"] == "linear":
            return float(step / warm_up)
        return float(math.log(step + 1) / math.log(warm_up))

    def cosine(step: int, base: float) -> float:
        if step < 0:
            return 0.0
        if step < warm_up:
            least = params["warmup_min_ratio"]
            return float(base * (least + (1 - least) * rise(step)))
        share = (step - warm_up + 1) / max(1, params["total_num_steps"] - warm_up)
        least = params["cos_min_ratio"]
        return float(base * max(0.0, least + (1 - least) * (1 + math.cos(math.pi * share)) / 2))

    def linear(step: int, base: float) -> float:
        least, most = params["warmup_min_lr"], params["warmup_max_lr"]
        factor = 1.0
        if step < 0:
            factor = 0.0
        elif step < warm_up:
            factor = rise(step)
        elif kind == "WarmupDecayLR":
            total = params["total_num_steps"]
            factor = max(0.0, (total - step) / max(1.0, total - warm_up))
        return float(least + ((base if most is None else most) - least) * factor)

    rate = cosine if kind == "WarmupCosineLR" else linear
    return lambda step, base: rate(step - 1, base)


def _refuse(message: str) -> NoReturn:
    raise InvalidArgumentError(message, code=3, exit_code=64)
