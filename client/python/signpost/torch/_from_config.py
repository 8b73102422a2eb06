"""Optimizers as configuration files have them."""

import math
import warnings
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Union

from signpost import InvalidArgumentError
from signpost._config import Source, deepspeed_settings, optimizer_section
from signpost.torch._job_optimizer import Parameters
from signpost.torch._optimizer import Adam, OneBitAdam, OneBitLamb, ZeroOneAdam

Optimizer = Union[Adam, OneBitAdam, OneBitLamb, ZeroOneAdam]

# Each with the param that it cannot do without, and how many of all steps that is about.
_TYPES: Dict[str, Tuple[Callable[..., Optimizer], Optional[str], Optional[str]]] = {
    "Adam": (Adam, None, None),
    "AdamW": (Adam, None, None),
    "OneBitAdam": (OneBitAdam, None, None),
    "OneBitLamb": (OneBitLamb, "freeze_step", "30%"),
    "ZeroOneAdam": (ZeroOneAdam, "var_freeze_step", "20%"),
}

# Sections of DeepSpeed's with which it trains to other numbers; and those that do so when they are
# enabled.
_SECTIONS = ("compression_training", "sparse_attention")
_ENABLED_SECTIONS = (
    "fp16",
    "bf16",
    "bfloat16",
    "amp",
    "curriculum_learning",
    "data_efficiency",
    "progressive_layer_drop",
    "quantize_training",
)


def optimizer(params: Parameters, config: Source = None, **arguments: Any) -> Optimizer:
    """Makes the optimizer of a configuration's section `optimizer`, which DeepSpeed's files have too.

        optimizer = signpost.optimizer(model.parameters(), "ds_config.json", lr=1e-3)

    A file of DeepSpeed's has `gradient_clipping` too, which is taken as max_grad_norm unless an
    argument or `params` has that. scheduler() makes its `scheduler`. A warning names what would change
    numbers besides, such as `gradient_accumulation_steps`: that is left to the program. Params that
    are "auto", for Hugging Face's Trainer to fill in, must be among the arguments.

    Args:
        params: as the optimizers'.
        config: a YAML or JSON file (docs/configuration.md), or a dictionary as it would be in one.
            None: the file that SIGNPOST_CONFIG names.
        arguments: of that type's class, before what the configuration says.

    Raises:
        InvalidArgumentError: names the line and key that are wrong, and the nearest key; or what
            is missing, or that gradient_clipping is no number.
        NotFoundError: there is no such file.
        Besides, as the optimizers do.
    """
    try:
        settings = deepspeed_settings(config)
    except (KeyError, OSError):  # the library says what is missing
        settings = {}
    config = _without_auto(settings, config, arguments)
    name, given = optimizer_section(config)
    kind, needed, share = _TYPES[name]
    merged = {**given, **arguments}
    if needed is not None and needed not in merged:
        raise InvalidArgumentError(
            f"{name} needs {needed}, in the configuration or as an argument: the steps before the "
            f"variance is frozen, about {share} of all, and more than the learning rate's warm-up. "
            "DeepSpeed's default is 100000",
            code=3,
            exit_code=64,
        )
    if "max_grad_norm" not in merged:
        merged["max_grad_norm"] = _gradient_clipping(settings, merged.get("overlap", False))
    schedule = settings.get("scheduler")
    if isinstance(schedule, Mapping):
        warnings.warn(
            f"the configuration has a scheduler, {schedule.get('type')}: signpost.scheduler(optimizer, ...) "
            "makes it, and the program calls its step() behind each optimizer.step()",
            stacklevel=2,
        )
    unused = _unused_sections(settings)
    if unused:
        warnings.warn(
            f"of the configuration nothing is done about {', '.join(unused)}, with which DeepSpeed "
            "would train to other numbers: what they say is for the program to do",
            stacklevel=2,
        )
    accumulated = settings.get("gradient_accumulation_steps")
    if isinstance(accumulated, int) and accumulated > 1:
        warnings.warn(
            f"of the configuration nothing is done about gradient_accumulation_steps {accumulated}: "
            f"divide the loss by {accumulated}, and call step() and zero_grad() behind every "
            f"{accumulated}th backward()",
            stacklevel=2,
        )
    return kind(params, **merged)


def _without_auto(
    settings: Mapping[str, Any], config: Source, arguments: Mapping[str, Any]
) -> Source:
    """Returns the configuration without the params of its optimizer that are "auto".

    Raises:
        InvalidArgumentError: names those that are not among the arguments.
    """
    section = settings.get("optimizer")
    params = section.get("params") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or not isinstance(params, Mapping):
        return config
    auto = [name for name, value in params.items() if isinstance(value, str) and value == "auto"]
    find_themselves = ("freeze_step", "variance_refresh_interval")
    auto = [name for name in auto if name not in find_themselves]
    missing = [name for name in auto if name not in arguments]
    if missing:
        raise InvalidArgumentError(
            f"the configuration has {', '.join(missing)} as 'auto', which is for Hugging Face's Trainer to "
            f"fill in: give an argument, such as {missing[0]}=...",
            code=3,
            exit_code=64,
        )
    if not auto:
        return config
    kept = {name: value for name, value in params.items() if name not in auto}
    return {**settings, "optimizer": {**section, "params": kept}}


def _gradient_clipping(settings: Mapping[str, Any], overlap: bool) -> Optional[float]:
    """As max_grad_norm has it."""
    given = settings.get("gradient_clipping")
    if given is None:
        return None
    try:
        norm = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError):
        norm = math.nan
    if not 0 <= norm < math.inf:
        wanted = ", wanted a positive number, or 0 for none"
        if given == "auto":
            wanted = ", which is for Hugging Face's Trainer to fill in: write what it should be"
        raise InvalidArgumentError(
            f"gradient_clipping is {given!r}{wanted}",
            code=3,
            exit_code=64,
        )
    if norm > 0 and overlap:
        raise ValueError(
            f"the configuration's gradient_clipping is {given}, and clipping needs all gradients "
            "before any is sent: use it with overlap=False, or give the argument max_grad_norm=None"
        )
    return norm or None


def _unused_sections(settings: Mapping[str, Any]) -> List[str]:
    unused = [name for name in _SECTIONS if settings.get(name)]
    for name in _ENABLED_SECTIONS:
        section = settings.get(name)
        if isinstance(section, Mapping) and section.get("enabled") is True:
            unused.append(name)
    return unused
