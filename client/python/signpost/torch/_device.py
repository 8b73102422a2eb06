"""Tensors that are on a GPU, and sessions and reductions of them, there."""

import contextlib
from typing import Any, Dict, Iterator, NamedTuple, Optional, Sequence, Tuple

import torch

from signpost import (
    Options,
    Parameter,
    Reduction,
    ResourceExhaustedError,
    Session,
    StepReport,
    _abi,
    world,
)


def gpu_of(tensor: torch.Tensor) -> Optional[int]:
    """CUDA's number of the GPU that has the tensor; None if none has."""
    return tensor.get_device() if tensor.is_cuda else None


def current_stream(gpu: int) -> torch.cuda.Stream:
    """On which PyTorch puts what this thread does: in a hook of a backward pass, that on which the
    gradient is accumulated."""
    return torch.cuda.current_stream(gpu)


def session_of(gpu: Optional[int], options: Options, parameters: Sequence[Parameter]) -> Session:
    """Joins with parameters on that GPU; None: on the CPU. Errors as Session's."""
    return Session(options, parameters) if gpu is None else GpuSession(gpu, options, parameters)


class PlacedReduction(NamedTuple):
    """A reduction, and the device that has its tensors."""

    reduction: Reduction
    device: torch.device


def reduction_for(
    tensor: torch.Tensor,
    name: str,
    tensors: Sequence[Tuple[str, Tuple[int, ...]]],
    options: Optional[Options] = None,
    **how: Any,
) -> PlacedReduction:
    """Joins the world's reduction of that name, where `tensor` is; or on the CPU, where the library is
    built without CUDA. With `options` it is that of their job. Other arguments and errors as
    Reduction's."""
    gpu = gpu_of(tensor)
    options = world().options() if options is None else options
    if gpu is None or not _abi.library.signpost_has_cuda():
        return PlacedReduction(Reduction(options, name, tensors, **how), torch.device("cpu"))
    options.gpu = gpu
    try:
        return PlacedReduction(GpuReduction(options, name, tensors, **how), tensor.device)
    except ResourceExhaustedError:  # the GPU's: it has not joined. Or an aggregator's, again
        torch.cuda.empty_cache()  # of what PyTorch has freed, and keeps
        return PlacedReduction(GpuReduction(options, name, tensors, **how), tensor.device)


def future_on(gpu: Optional[int]) -> "torch.futures.Future[Any]":
    """One whose callbacks have streams of that GPU, for which whoever waits for it waits."""
    return torch.futures.Future(devices=None if gpu is None else [gpu])


_own_streams: Dict[int, torch.cuda.Stream] = {}


@contextlib.contextmanager
def on_own_stream(gpu: Optional[int], event: Optional[torch.cuda.Event]) -> Iterator[None]:
    """What is put on the current stream inside is done behind the event, and before what is put on
    the one that is current now. The stream is always the same: PyTorch keeps memory that it has
    freed for the stream that had it, and futures' callbacks have streams in turns."""
    if gpu is None or event is None:
        yield
        return
    outer, own = current_stream(gpu), _own_streams.get(gpu)
    if own is None:
        own = _own_streams.setdefault(gpu, torch.cuda.Stream(gpu))
    own.wait_event(event)
    with torch.cuda.stream(own):
        yield
    outer.wait_stream(own)


class GpuSession(Session):
    """A session on a GPU whose calls put their work on PyTorch's current stream, as PyTorch's own
    functions do, and behind what is on the stream before."""

    def __init__(self, gpu: int, options: Options, parameters: Sequence[Parameter]) -> None:
        options.gpu = gpu
        self._gpu = gpu
        current_stream(gpu).synchronize()  # parameters are made there, and joining has no stream
        super().__init__(options, parameters)

    def parameters_crc32c(self) -> int:
        with self._calls.enter("parameters_crc32c"):
            self._follow_pytorch()
            return super().parameters_crc32c()

    def _call(self, function: str, *arguments: object) -> None:
        with self._calls.enter(function):
            self._follow_pytorch()
            super()._call(function, *arguments)

    def _follow_pytorch(self) -> None:
        self.set_stream(current_stream(self._gpu).cuda_stream)


class GpuReduction(Reduction):
    """A reduction on a GPU whose calls put their work on PyTorch's current stream, as a GpuSession's
    do."""

    def __init__(
        self,
        options: Options,
        name: str,
        tensors: Sequence[Tuple[str, Tuple[int, ...]]],
        **how: Any,
    ) -> None:
        self._gpu = int(options.gpu)
        super().__init__(options, name, tensors, **how)

    def reduce(self, addresses: Sequence[int]) -> StepReport:
        with self._calls.enter("reduce"):
            self.set_stream(current_stream(self._gpu).cuda_stream)
            return super().reduce(addresses)
