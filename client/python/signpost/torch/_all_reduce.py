"""Tensors' means and sums over all ranks."""

import contextlib
import threading
import warnings
from typing import Dict, Iterator, Optional, Tuple, Union

import torch

from signpost import Codec, StepReport
from signpost._reduction import check_reduction
from signpost._world import at_shutdown
from signpost.torch import _device

# What float32 holds, rounded for bf16 and fp16.
REDUCIBLE = (torch.float32, torch.bfloat16, torch.float16)

_Arguments = Tuple[Tuple[int, ...], Union[str, Codec], str]  # shape, codec and op


class _Named:
    """The reduction of a name, and what its calls must agree with."""

    def __init__(self, name: str, arguments: _Arguments) -> None:
        self.calls = 0  # that are under way
        self._name = name
        self._arguments = arguments
        self._lock = threading.Lock()
        self._placed: Optional[_device.PlacedReduction] = None  # from the first call on

    @property
    def has_joined(self) -> bool:
        return self._placed is not None

    def check(self, arguments: _Arguments) -> None:
        if self._arguments == arguments:
            return
        had_shape, had_codec, had_op = self._arguments
        shape, codec, op = arguments
        raise ValueError(
            f"all_reduce {self._name!r} had a tensor {list(had_shape)}, codec={had_codec!r} and "
            f"op={had_op!r} before, and now has {list(shape)}, {codec!r} and {op!r}: give it "
            "another name"
        )

    def reduce(self, tensor: torch.Tensor) -> Tuple[torch.Tensor, StepReport]:
        """The result, which has the tensor's memory or is a copy."""
        with self._lock:
            if self._placed is None:
                shape, codec, op = self._arguments
                name, tensors = f"all_reduce/{self._name}", [("tensor", shape)]
                self._placed = _device.reduction_for(tensor, name, tensors, codec=codec, op=op)
            values = tensor.to(self._placed.device, torch.float32).contiguous()
            return values, self._placed.reduction.reduce([values.data_ptr()])


_named: Dict[str, _Named] = {}
at_shutdown(_named.clear)
_naming = threading.Lock()


def all_reduce(
    tensor: torch.Tensor,
    codec: Union[str, Codec] = "fp32",
    *,
    name: Optional[str] = None,
    op: str = "mean",
) -> torch.Tensor:
    """Turns the tensor into its mean, or sum, over all ranks, in place; blocks until it is.

    The two-phase exchange that the optimizers are made of, by itself. All ranks call it equally
    often for each name, with the same shape, codec and op, and get the same bytes; threads that
    share a name must come in the same order everywhere. What a codec
    loses in a call is kept under the name, by ranks and aggregators, and added to the next one's
    tensors: over many calls nothing is lost. "fp32" loses nothing.

    Where a rank's values are not finite, or too large to be packed (above 1e18, in "int8" 1e17, in
    "int4" 7e15, in "onebit" 1e15), that chunk of the result is NaN on all ranks, a warning names the
    rank, and what the others had there is kept for the next call; with "fp32" it is dropped.

    In a job with a round deadline a call that comes too late for its round gets the newest round's
    result, and stands for all of those until then; its tensor goes into the next round, or with
    "fp32" nowhere. Who joins in the place of a rank that is gone does so in all its reductions.

    Args:
        tensor: on the CPU or a CUDA GPU, of float32, bfloat16 or float16. If it is not a contiguous
            float32 one, a copy is made, in float32, reduced, and copied back; and so it is if it is
            elsewhere than the first tensor of the name, or on a GPU while the library is built
            without CUDA. On a GPU what compression loses is there too, and packed numbers alone
            cross to the host; all is in the order of PyTorch's current stream, which may have to
            write the result still.
        codec: "fp32", "bf16", "fp16", "int8", "int4" or "onebit": how it travels, both ways.
        name: tells reductions apart; needed for codecs with errors. With "fp32" calls of the same
            shape and op share one by default. A first call with a name waits for the other ranks',
            and an aggregator takes 256 jobs, names among them (`--max-jobs`): pad tensors to a few
            shapes if theirs vary.
        op: "mean" or "sum".

    Returns:
        the tensor.

    Raises:
        ValueError: codec or op is another, the name is missing or has another shape, codec or op,
            or the tensor has no elements.
        TypeError: it is no tensor, neither on the CPU nor on a CUDA GPU, or of another type or
            layout.
        FailedPreconditionError: names the option or shape in which this rank differs from the
            others.
        DeadlineExceededError: names the ranks that did not come.
        InvalidArgumentError, ResourceExhaustedError, UnavailableError: the GPU cannot be used, has
            too little memory free, or has failed.

    After an error of an exchange the name is of no more use in this process: start the ranks again.
    """
    _check(tensor)
    check_reduction(codec, op)
    shape = tuple(tensor.shape)
    if name is None:
        if codec != "fp32":
            raise ValueError(
                f"all_reduce with codec={codec!r} needs a name: what compression loses is kept "
                "under it for the next call"
            )
        name = f"fp32 {op} {list(shape)}"
    with torch.no_grad():
        with _named_reduction(name, (shape, codec, op)) as named:
            values, report = named.reduce(tensor.detach())
        if values.data_ptr() == tensor.data_ptr():
            # It shares the tensor's version counter: autograd sees the change in place.
            values.view(-1)[:0].zero_()
        else:
            tensor.detach().copy_(values)
    warn_of_skipped(report, f"all_reduce {name!r}")
    return tensor


def warn_of_skipped(report: StepReport, what: str) -> None:
    """Names the rank whose values were not finite, if one's were not."""
    if report.skipped_rounds > 0:
        warnings.warn(
            f"{what}: the values of rank {report.skipped_by_rank} are not finite; "
            f"{report.skipped_rounds} chunks of the result are NaN, on all ranks"
        )


@contextlib.contextmanager
def _named_reduction(name: str, arguments: _Arguments) -> Iterator[_Named]:
    """That of the name, for a call. If none of the calls that are under way together could join,
    the name is free for another try."""
    with _naming:
        named = _named.setdefault(name, _Named(name, arguments))
        named.check(arguments)
        named.calls += 1
    try:
        yield named
    finally:
        with _naming:
            named.calls -= 1
            if named.calls == 0 and not named.has_joined:
                del _named[name]


def _check(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"all_reduce got a {type(tensor).__name__}, wanted a tensor: torch.tensor(...) makes "
            "one of numbers"
        )
    if _device.gpu_of(tensor) is None and tensor.device.type != "cpu":
        raise TypeError(
            f"all_reduce got a tensor on {tensor.device}; Signpost reduces tensors on the CPU or on "
            "a CUDA GPU"
        )
    if tensor.dtype not in REDUCIBLE or tensor.layout != torch.strided:
        raise TypeError(
            f"all_reduce got a tensor of {tensor.dtype}, {tensor.layout}; wanted a dense one of "
            "float32, bfloat16 or float16"
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            "all_reduce got a tensor of torch.inference_mode(), which can only be changed inside it"
        )
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape)):
        raise ValueError(
            f"all_reduce got a tensor {list(tensor.shape)} whose elements share memory, as those of "
            "expand() do; clone() it"
        )
    if tensor.numel() == 0:
        raise ValueError(f"all_reduce got a tensor without elements, {list(tensor.shape)}")
