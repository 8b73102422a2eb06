"""Gradients that travel in one bit under DistributedDataParallel, with any optimizer."""

import os
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Dict, List, Optional, Set, Tuple, Union

import torch
from torch.distributed import GradBucket

from signpost import Codec, SignpostError, world
from signpost._errors import will_be_told_by_another
from signpost._reduction import check_reduction
from signpost.torch import _device
from signpost.torch._all_reduce import REDUCIBLE, warn_of_skipped


@dataclass
class _Bucket:
    """A bucket's reduction, and of which parameters it is."""

    parameters: List[torch.Tensor]
    placed: _device.PlacedReduction


_states: "weakref.WeakValueDictionary[str, DdpHookState]" = weakref.WeakValueDictionary()


class DdpHookState:
    """What ddp_hook keeps between steps: each parameter's error, by way of its bucket's."""

    def __init__(
        self, codec: Union[str, Codec] = "onebit", *, start_step: int = 10, name: str = "ddp"
    ) -> None:
        """
        Args:
            codec: "onebit", "int4", "int8", "fp16", "bf16" or "fp32": how gradients travel,
                both ways.
            start_step: so many steps travel in fp32 before, at least 2: DDP arranges its buckets
                anew after the first.
            name: tells the states of several models apart; the same on all ranks.

        Raises:
            ValueError: for another codec, a start_step below 2, or a name that another model's state
                has.
        """
        check_reduction(codec, "mean")
        if start_step < 2:
            raise ValueError(
                f"start_step is {start_step}, wanted at least 2: DDP arranges its buckets anew "
                "after the first step, and errors belong to a bucket's parameters"
            )
        if _states.setdefault(name, self) is not self:
            raise ValueError(
                f"there is a DdpHookState of the name {name!r} already: give each model's a name of "
                "its own, the same on all ranks"
            )
        self.codec = codec
        self.start_step = start_step
        self.name = name
        self.steps = 0  # whose gradients were all handed in
        self._buckets: Dict[int, _Bucket] = {}  # by index
        self._dense: Dict[int, _device.PlacedReduction] = {}  # by number of elements
        self._dense_in_step: Set[int] = set()  # of those that this step has had so far
        self._failure: Optional[SignpostError] = None  # the first
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="signpost ddp")

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hands a bucket's gradients to the state's thread. The result is their mean over all
        ranks, in the bucket's own memory, or the error that ended the exchange.

        Raises:
            TypeError: gradients are of another type.
            RuntimeError: ranks are not those of torch.distributed, or this is a fork of the process
                that made the state.
        """
        self._check_world()
        is_dense = self.codec == "fp32" or self.steps < self.start_step
        index: int = bucket.index()
        buffer: torch.Tensor = bucket.buffer()
        parameters = [p for p in bucket.parameters() if p.numel() > 0]
        if buffer.dtype not in REDUCIBLE:
            raise TypeError(
                f"ddp_hook got gradients of {buffer.dtype}; wanted float32, bfloat16 or float16"
            )
        is_last, gpu = bucket.is_last(), _device.gpu_of(buffer)
        is_filled = None if gpu is None else _device.current_stream(gpu).record_event()

        def take_turn() -> torch.Tensor:
            with _device.on_own_stream(gpu, is_filled):
                if not is_dense:
                    self._leave_dense(kept=set())
                    return self._reduce(index, buffer, parameters) if parameters else buffer
                mean = self._reduce_densely(buffer) if parameters else buffer
                if is_last:
                    self._dense_in_step.clear()
                return mean

        def reduce(_: torch.futures.Future[None]) -> torch.Tensor:
            if self._failure is not None:  # each would wait in vain for as long as the first
                raise self._failure
            try:
                return take_turn()
            except SignpostError as error:
                self._failure = error
                will_be_told_by_another(error)
                raise

        # What a callback raises becomes the error of its future, and so of DDP's backward().
        turn: torch.futures.Future[None] = _device.future_on(gpu)
        mean = turn.then(reduce)
        self._thread.submit(turn.set_result, None)
        if is_last:
            self.steps += 1
        return mean

    def _reduce_densely(self, buffer: torch.Tensor) -> torch.Tensor:
        elements = buffer.numel()
        if elements not in self._dense:
            # DDP has arranged its buckets anew, if there are others from the step before.
            self._leave_dense(kept=self._dense_in_step)
            name, tensors = f"{self.name}/fp32 {elements}", [("bucket", (elements,))]
            self._dense[elements] = _device.reduction_for(buffer, name, tensors)
        self._dense_in_step.add(elements)
        return self._mean(buffer, [elements], self._dense[elements])

    def _reduce(
        self, index: int, buffer: torch.Tensor, parameters: List[torch.Tensor]
    ) -> torch.Tensor:
        sizes = [parameter.numel() for parameter in parameters]
        return self._mean(buffer, sizes, self._reduction_of(index, buffer, parameters))

    def _leave_dense(self, kept: Set[int]) -> None:
        """Those of other sizes are not needed any more, and take memory here and places at the
        aggregators, which those that come next need. All ranks have had all of their rounds, but
        where some may be late."""
        unused = sorted(self._dense.keys() - kept)
        if not unused:  # as in nearly every call
            return
        options = world().options()
        if options.round_deadline_s > 0:
            return
        for elements in unused:
            try:
                self._dense.pop(elements).reduction.leave()
            except SignpostError as error:
                warnings.warn(f"{self.name!r} could not leave a reduction: {error}")

    def _mean(
        self, buffer: torch.Tensor, sizes: List[int], placed: _device.PlacedReduction
    ) -> torch.Tensor:
        """In place, of the tensors of these sizes that lie in the buffer one after the other."""
        values = buffer.to(placed.device, torch.float32)
        addresses, first = [], values.data_ptr()
        for size in sizes:
            addresses.append(first)
            first += size * values.element_size()
        warn_of_skipped(placed.reduction.reduce(addresses), f"a bucket of {self.name!r}")
        return buffer if values is buffer else buffer.copy_(values)

    def _reduction_of(
        self, index: int, buffer: torch.Tensor, parameters: List[torch.Tensor]
    ) -> _device.PlacedReduction:
        bucket = self._buckets.get(index)
        if bucket is None:
            tensors: List[Tuple[str, Tuple[int, ...]]] = [
                (f"parameter {i} of bucket {index}", tuple(parameter.shape))
                for i, parameter in enumerate(parameters)
            ]
            name = f"{self.name}/{index}"
            placed = _device.reduction_for(buffer, name, tensors, codec=self.codec)
            bucket = self._buckets[index] = _Bucket(parameters, placed)
        same = len(bucket.parameters) == len(parameters) and all(
            a is b for a, b in zip(bucket.parameters, parameters)
        )
        if not same:
            raise RuntimeError(
                f"DDP has put other parameters into bucket {index} than in the steps before, and "
                f"errors of {self.codec} belong to a bucket's parameters; give DdpHookState a "
                "start_step behind the last change"
            )
        return bucket.placed

    def _check_world(self) -> None:
        if os.getpid() != self._process:  # which has the thread
            raise RuntimeError(
                f"the DdpHookState {self.name!r} is process {self._process}'s, and this is process "
                f"{os.getpid()}, a fork of it: make one here"
            )
        ranks = torch.distributed.get_world_size()
        if ranks != world().world_size:
            raise RuntimeError(
                f"torch.distributed has {ranks} ranks and signpost {world().world_size}: DDP's "
                "gradients are averaged over all ranks of the job"
            )


def ddp_hook(state: DdpHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DDP: gradients' means come by way of Signpost's aggregators.

        model = DistributedDataParallel(model)
        model.register_comm_hook(signpost.DdpHookState("int8"), signpost.ddp_hook)

    DDP stays what it is, and so does the optimizer: this is for models that have both. Gradients on
    a CUDA GPU are compressed there, and packed numbers alone cross to the host, if the library is
    built with CUDA. What compression loses of a gradient, unless with "fp32", is added to the same
    parameter's next one; it is in no checkpoint, and lost where DDP ignores that one: of parameters
    that no rank has used in a step (find_unused_parameters). signpost.OneBitAdam compresses the
    momentum instead, which one bit suits better than a gradient. Where a gradient is
    not finite the mean is NaN on all ranks, as a GradScaler wants it. Gradients are of float32,
    bfloat16 or float16; others are a TypeError.

    What else goes wrong comes out of backward() as PyTorch's RuntimeError, with the text of the
    SignpostError in it. If nobody catches it, the process ends with that one's `exit_code`.
    """
    return state.exchange(bucket)
