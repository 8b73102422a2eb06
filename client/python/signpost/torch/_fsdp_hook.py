"""Gradients of a model that FSDP2 shards, averaged over machines with any optimizer."""

from typing import Any, Optional, Union

import torch

from signpost import Codec, world
from signpost._reduction import check_reduction
from signpost.torch import _device
from signpost.torch._all_reduce import REDUCIBLE, warn_of_skipped
from signpost.torch._shards import Shards, shards_of


def fsdp_hook(
    model: torch.nn.Module, codec: Union[str, Codec] = "int8", *, name: str = "fsdp"
) -> None:
    """Has each backward pass average gradients over the machines, in this codec, for any optimizer.

        for layer in model.layers:
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        signpost.fsdp_hook(model, "int8")
        optimizer = torch.optim.AdamW(model.parameters())

    All processes call it once, after the model is sharded within each machine (docs/sharding.md). FSDP2
    then adds up a module's gradients within the machine, and its processes exchange their shards of
    the sum with the other machines' during the backward pass, which waits for that. What the codec
    loses is added to the module's next gradients; it is in no checkpoint. Signpost's own optimizers
    send one bit and do not go together with the hook.

    Args:
        model: of which every module that fully_shard() was called on has parameters of its own.
        codec: "fp32", "bf16", "fp16", "int8", "int4" or "onebit", or a signpost.Codec. One bit suits
            the momentum, not gradients.
        name: tells models apart; the same on all processes.

    Raises:
        TypeError, ValueError: as from an optimizer of these parameters; or the model is not sharded.
    """
    check_reduction(codec, "mean")
    shards = shards_of(model.parameters(), None, None, overlap=False)
    if shards is None:
        raise TypeError("no parameter of the model is a DTensor: call fully_shard() on it before")
    # fully_shard() has made these modules FSDPModules. All processes have them in the same order.
    modules = (module for module in model.modules() if hasattr(module, "set_all_reduce_hook"))
    for index, module in enumerate(modules):
        set_hook: Any = module.set_all_reduce_hook
        set_hook(_Exchange(f"{name}/{index}", codec, shards))


class _Exchange:
    """Averages what FSDP2 has added up of one module's gradients."""

    def __init__(self, name: str, codec: Union[str, Codec], shards: Shards) -> None:
        self._name = name
        self._codec = codec
        self._shards = shards
        self._placed: Optional[_device.PlacedReduction] = None  # from the first gradients on

    @torch.no_grad()
    def __call__(self, gradients: torch.Tensor) -> None:
        if gradients.dtype not in REDUCIBLE:
            raise TypeError(
                f"fsdp_hook got gradients of {gradients.dtype}; wanted float32, bfloat16 or float16"
            )
        if self._placed is None:
            options = world().options()
            self._shards.set_options(options)
            self._placed = _device.reduction_for(
                gradients,
                self._name,
                [("gradients", (gradients.numel(),))],
                options,
                codec=self._codec,
            )
        values = gradients.to(self._placed.device, torch.float32).contiguous()
        report = self._placed.reduction.reduce([values.data_ptr()])
        warn_of_skipped(report, f"the gradients of {self._name!r}")
        if values.data_ptr() != gradients.data_ptr():
            gradients.copy_(values)
