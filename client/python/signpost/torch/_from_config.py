"""Optimizers as configuration files have them."""

from typing import Any, Callable, Dict, Optional, Tuple, Union

from signpost import InvalidArgumentError
from signpost._config import Source, optimizer_section
from signpost.torch._optimizer import Adam, OneBitAdam, OneBitLamb, Parameters, ZeroOneAdam

Optimizer = Union[Adam, OneBitAdam, OneBitLamb, ZeroOneAdam]

# Each with the param that it cannot do without, and how many of all steps that is about.
_TYPES: Dict[str, Tuple[Callable[..., Optimizer], Optional[str], Optional[str]]] = {
    "Adam": (Adam, None, None),
    "AdamW": (Adam, None, None),
    "OneBitAdam": (OneBitAdam, "freeze_step", "15%"),
    "OneBitLamb": (OneBitLamb, "freeze_step", "30%"),
    "ZeroOneAdam": (ZeroOneAdam, "var_freeze_step", "20%"),
}


def optimizer(params: Parameters, config: Source = None, **arguments: Any) -> Optimizer:
    """Makes the optimizer of a configuration's section `optimizer`, which DeepSpeed's files have too.

        optimizer = signpost.optimizer(model.parameters(), "ds_config.json", overlap=True)

    Args:
        params: as the optimizers'.
        config: a YAML or JSON file (docs/configuration.md), or a dictionary as it would be in one.
            None: the file that SIGNPOST_CONFIG names.
        arguments: of that type's class, before what the configuration says.

    Raises:
        InvalidArgumentError: names the line and key that are wrong, and the nearest key; or what
            is missing.
        NotFoundError: there is no such file.
        Besides, as the optimizers do.
    """
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
    return kind(params, **merged)
