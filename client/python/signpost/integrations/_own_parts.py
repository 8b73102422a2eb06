"""The part of an optimizer's state that each rank has alone, beside a file that rank 0 saves for all.

Trainers save the optimizer of rank 0. The other ranks' errors are then lost, which changes the bits
of what follows, and little else. These functions keep them in a small file for each rank.
"""

from contextlib import contextmanager
from typing import Any, Dict, Iterator, Optional

import torch

from signpost.torch._job_optimizer import JobOptimizer


def original(optimizer: Any) -> JobOptimizer:
    """Returns the optimizer that wrappers of accelerate or Lightning have inside.

    Raises:
        TypeError: it is none of Signpost's.
    """
    inside = optimizer
    while not isinstance(inside, JobOptimizer) or "_optimizer" in vars(inside):
        following = vars(inside).get("optimizer") or vars(inside).get("_optimizer")
        if following is None:
            raise TypeError(
                f"the optimizer is a {type(optimizer).__name__}, wanted one of signpost.torch: "
                "OneBitAdam, OneBitLamb, ZeroOneAdam or Adam"
            )
        inside = following
    return inside


def own_part_of(optimizer: JobOptimizer) -> Dict[str, Any]:
    """Returns what this rank has alone. All ranks call it after the same step."""
    own = {
        key: {name: value for name, value in entry.items() if "_of_rank_" in name}
        for key, entry in optimizer.state_dict()["state"].items()
    }
    return {"steps": optimizer.steps, "state": own}


def load_own_part(path: str) -> Optional[Dict[str, Any]]:
    """Returns what torch.save() has saved of own_part_of(); None if there is no such file."""
    try:
        own: Dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    return own


@contextmanager
def with_own_part(optimizer: JobOptimizer, own: Optional[Dict[str, Any]]) -> Iterator[None]:
    """Adds this rank's own part to what load_state_dict() loads inside. With None, or a part of another
    step, load_state_dict() loads what it is given."""

    def add(_: object, state_dict: Dict[str, Any]) -> Dict[str, Any]:
        assert own is not None
        entries = dict(state_dict["state"])
        for key, entry in own["state"].items():
            if key in entries and int(entries[key]["step"]) == own["steps"]:
                entries[key] = {**entries[key], **entry}
        return {**state_dict, "state": entries}

    if own is None:
        yield
        return
    hook = optimizer.register_load_state_dict_pre_hook(add)
    try:
        yield
    finally:
        hook.remove()


def metrics_of(optimizer: JobOptimizer) -> Dict[str, float]:
    """Returns numbers for a trainer's log: bits and megabytes since the optimizer was made, seconds and
    norm of the last step."""
    report = optimizer.report
    if report is None:
        return {}
    numbers = {
        "signpost/bits_per_parameter": report.sent_bits,
        "signpost/sent_megabytes": report.sent_bytes / 1e6,
        "signpost/waiting_seconds": report.wait_s,
        "signpost/network_seconds": report.wire_s,
    }
    if optimizer.grad_norm is not None:
        numbers["signpost/grad_norm"] = optimizer.grad_norm
    return numbers
