"""Refuses what would train to wrong numbers, or save no bytes, without a word."""

import gc
import sys
from typing import Any, Dict, Optional, Sequence, Set, Tuple

import torch
import torch.distributed

from signpost import world
from signpost._world import at_shutdown
from signpost.torch._shards import is_dtensor
from signpost.torch._tensors import TrainedTensor


def check_parameters(params: Any) -> None:
    """Refuses collections without an order, and ZeroRedundancyOptimizer's.

    Raises:
        TypeError: says what to do instead.
    """
    if isinstance(params, (set, frozenset)):
        raise TypeError(
            "the parameters are a set, whose order is another one in each process: pass a list, such "
            "as model.parameters()"
        )
    if _is_made_by("torch.distributed.optim.zero_redundancy_optimizer"):
        raise TypeError(
            "ZeroRedundancyOptimizer gives each rank other parameters, which Signpost would average "
            "with each other: make the optimizer itself, of all parameters"
        )


def check_world() -> None:
    """Refuses a process group of torch.distributed that has other processes than the job.

    Raises:
        RuntimeError: says how many each has.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    size, ours = torch.distributed.get_world_size(), world().world_size
    if size != ours:
        raise RuntimeError(
            f"torch.distributed has {size} ranks and Signpost's job {ours}, so data would be shared out "
            "among others than those whose gradients are averaged. Start all processes by one launcher: "
            "`signpost run -n N -- python3 ...`, or torchrun with SIGNPOST_AGGREGATORS"
        )
    rank, our_rank = torch.distributed.get_rank(), world().rank
    if rank != our_rank:
        raise RuntimeError(
            f"this process is rank {rank} of torch.distributed and rank {our_rank} of Signpost's job: "
            "start all processes by one launcher"
        )


def check_values(tensors: Sequence[TrainedTensor]) -> None:
    """Refuses values that are not finite.

    Raises:
        ValueError: names the first parameter that has some.
    """
    for tensor in tensors:
        if not bool(torch.isfinite(tensor.values).all()):
            raise ValueError(
                f"{tensor.name} {list(tensor.values.shape)} has values that are not finite"
            )


def local_gradients(
    _: object,
    bucket: torch.distributed.GradBucket,  # DistributedDataParallel looks at the annotation
) -> torch.futures.Future[torch.Tensor]:
    """A hook with which DistributedDataParallel leaves each rank its own gradients, for Signpost's
    optimizer to average: `model.register_comm_hook(None, signpost.local_gradients)`."""
    future: "torch.futures.Future[torch.Tensor]" = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def check_wrappers(tensors: Sequence[TrainedTensor]) -> None:
    """Refuses a model whose gradients DistributedDataParallel averages, too, and tensors that are shards of
    DTensors. The function looks at all objects of the process: call it once.

    Raises:
        RuntimeError: says what to do instead.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    ours = {id(tensor.parameter): tensor.name for tensor in tensors}
    plain = {
        tensor.parameter.data_ptr(): tensor.name
        for tensor in tensors
        if tensor.parameter.numel() > 0 and not is_dtensor(tensor.parameter)
    }
    for wrapper in gc.get_objects():
        if type(wrapper).__name__ == "DTensor" and any(p.is_shard() for p in wrapper.placements):
            shard = wrapper._local_tensor
            is_plain = type(shard) in (torch.Tensor, torch.nn.Parameter)
            shard_name = plain.get(shard.data_ptr()) if is_plain else None
            if shard_name is not None:
                raise RuntimeError(
                    f"{shard_name} is this process's shard of a DTensor, and would be averaged with the "
                    "other processes' shards: pass the model's parameters themselves "
                    "(docs/sharding.md)"
                )
        if type(wrapper).__name__ != "DistributedDataParallel" or not isinstance(
            wrapper, torch.nn.parallel.DistributedDataParallel
        ):
            continue
        hooks = {getattr(hook, "__name__", "") for hook, _ in getattr(wrapper, "_comm_hooks", [])}
        if hooks & {local_gradients.__name__, "noop_hook"}:
            continue
        name = next((ours[id(p)] for p in wrapper.parameters() if id(p) in ours), None)
        if name is not None and torch.distributed.get_world_size(wrapper.process_group) > 1:
            raise RuntimeError(
                f"the model of {name} is wrapped in DistributedDataParallel, which has averaged its "
                "gradients already, in full precision: no bytes would be saved. Train the model without "
                "the wrapper, or call wrapper.register_comm_hook(None, signpost.local_gradients)"
            )


_Print = Tuple[Tuple[int, ...], Tuple[float, ...]]  # a tensor's shape and some of its values


class Fingerprints:
    """Finds out whether ranks have made their optimizers, or listed their parameters, in another order.

    All ranks begin with the values of rank 0. In another order, a parameter gets values that another one
    had before, and rank 0 gave that rank's own values to a third, if ranks make their models alike, as
    from one seed. Where each rank's model is another one, nothing is found.
    """

    _before: Dict[_Print, str] = {}  # of all optimizers of this process: names of parameters
    _of_rank_0: Set[_Print] = set()

    def __init__(self, tensors: Sequence[TrainedTensor]) -> None:
        self._tensors = tensors
        self._own = [_print_of(tensor) for tensor in tensors]

    def check(self) -> None:
        """Compares values. Call it when the tensors have the values of rank 0.

        Raises:
            ValueError: names two parameters that are exchanged.
        """
        names = [tensor.name for tensor in self._tensors]
        of_rank_0 = [_print_of(tensor) for tensor in self._tensors]
        self._before.update(zip(self._own, names))
        self._of_rank_0.update(of_rank_0)
        for name, own, theirs in zip(names, self._own, of_rank_0):
            if own == theirs or own not in self._of_rank_0 or theirs not in self._before:
                continue
            if _is_constant(own) or _is_constant(theirs):
                continue
            raise ValueError(
                f"where rank 0 has {name}, this rank has other values, and those of rank 0 in "
                f"{self._before[theirs]}: list parameters, and make optimizers, in the same order on "
                "all ranks. Sets have no such order"
            )


at_shutdown(Fingerprints._before.clear)
at_shutdown(Fingerprints._of_rank_0.clear)


def _print_of(tensor: TrainedTensor) -> _Print:
    values = tensor.values.detach().reshape(-1)
    sample = values[:: max(1, values.numel() // 256)].to("cpu", torch.float32)
    return tuple(tensor.values.shape), tuple(sample.tolist())


def _is_constant(fingerprint: _Print) -> bool:
    return len(set(fingerprint[1])) <= 1


def _is_made_by(module: str) -> bool:
    """Returns whether a function of that module is among those that have called this one."""
    frame: Optional[Any] = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False
