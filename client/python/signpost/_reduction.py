"""Means and sums of tensors over all ranks, for memory of any framework."""

import ctypes
from typing import Sequence, Tuple, Union

from signpost import _abi
from signpost._codec import Codec, codec_options
from signpost._joining import join_in_background
from signpost._leaving import Membership
from signpost._session import StepReport, report_of


class Reduction(Membership):
    """One worker's part in a reduction: a job of its own, with errors of its own. Not thread-safe;
    several may be used by a thread each.

    With `options.gpu`, CUDA's number of one, tensors are in its memory, and errors too: packed
    numbers alone cross to the host. Work is put on a stream, set_stream()'s: tensors are read and
    written in its order, perhaps written after reduce() has returned. The bits are those of the
    host.
    """

    _kind = "reduction"

    def __init__(
        self,
        options: _abi.Options,
        name: str,
        tensors: Sequence[Tuple[str, Tuple[int, ...]]],
        *,
        codec: Union[str, Codec] = "fp32",
        op: str = "mean",
    ) -> None:
        """Joins; blocks until all ranks have, with the same arguments.

        Args:
            options: World.options(), of the job beside which it is, perhaps with a gpu.
            name: tells that job's reductions apart.
            tensors: names and shapes, in elements; () is a scalar. A block of one-bit compression
                never holds elements of two of them.
            codec: "fp32", or with error feedback "bf16", "fp16", "int8", "int4" or "onebit", or
                a signpost.Codec.
            op: "mean" or "sum".

        Raises:
            ValueError: for another codec or op.
            FailedPreconditionError: names the tensor or option in which this rank differs.
            DeadlineExceededError: names the ranks that did not come.
            InvalidArgumentError: says why the GPU cannot be used.
            UnavailableError, ResourceExhaustedError: the GPU has failed, or has too little memory
                free: 4 bytes for each element, unless the codec is "fp32", and what five chunks
                travel in, which it takes of the host's memory too.
        """
        check_reduction(codec, op)
        super().__init__()
        own = _abi.Options.from_buffer_copy(options)
        for field, value in codec_options(codec=codec).items():
            setattr(own, field, value)
        self._handle = join_in_background(
            "reduction_",
            own,
            name.encode(),
            own.codec,
            op == "sum",
            (_abi.Parameter * len(tensors))(*(_tensor(*tensor) for tensor in tensors)),
            len(tensors),
            has_begun=True,  # in a step, perhaps, which the others are to get to its end too
        )

    def set_stream(self, stream: int) -> None:
        """As Session's."""
        with self._calls.enter("set_stream"):
            _abi.call("reduction_set_stream", self._joined(), stream)

    def reduce(self, addresses: Sequence[int]) -> StepReport:
        """Each tensor becomes its mean or sum over all ranks, in place. All ranks call it equally
        often.

        Args:
            addresses: for each tensor that of its fp32 values, of its size and row-major.

        Raises:
            InvalidArgumentError: nothing was sent.
            SignpostError: the tensors may be partly reduced, and the reduction can only be left.
        """
        report = _abi.Report()
        with self._calls.enter("reduce"):
            _abi.call(
                "reduce",
                self._joined(),
                (ctypes.c_void_p * len(addresses))(*addresses),
                len(addresses),
                ctypes.byref(report),
            )
        return report_of(report)

    def leave(self) -> None:
        """Ends this rank's part in it, and with those of all ranks the errors. It is done anyway
        when the process ends, as Session.leave() is. Does nothing the second time."""
        with self._calls.enter("leave"):
            if self._handle is None:
                return
            self._check_process()
            handle, self._handle = self._handle, None
            try:
                _abi.call("reduction_leave", handle)
            finally:
                _abi.library.signpost_reduction_close(handle)

    def _joined(self) -> ctypes.c_void_p:
        self._check_process()
        if self._handle is None:
            raise RuntimeError("this rank has left the reduction")
        return self._handle


def check_reduction(codec: Union[str, Codec], op: str) -> None:
    codec_options(codec=codec)
    if op not in ("mean", "sum"):
        raise ValueError(f"op is {op!r}, wanted mean or sum")


def _tensor(name: str, shape: Tuple[int, ...]) -> _abi.Parameter:
    sizes = (ctypes.c_uint64 * len(shape))(*shape)
    return _abi.Parameter(name.encode(), sizes, len(shape), None, 0, 0, 0)
