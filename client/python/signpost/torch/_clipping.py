"""Gradients clipped by their norm: by one factor on all ranks, or by each rank's own."""

import math
from typing import List, Optional, Protocol, Sequence

import torch

from signpost import Options, Reduction, StepReport
from signpost.torch._shards import Shards

# Norms travel squared, and fp32 rounds take numbers up to 2^60: so norms up to 2^46, 7e13, fit.
_UNIT = 2.0**16


class Clipping(Protocol):
    """By which norm gradients are clipped: multiplied by min(1, max_norm / (norm + 1e-6))."""

    max_norm: float
    report: Optional[StepReport]  # of the exchange for the last norm, if there was one

    def norm(self, own: float) -> float:
        """From that of this rank's own gradients; NaN when it is not finite, and then nothing is
        clipped."""

    def leave(self) -> None:
        """Ends this rank's part in it."""


class Preparation:
    """What is done to a rank's gradients for one step, in place: the loss's scale is divided out,
    and they are clipped.

    A step that was refused can be tried again, with the same gradients or with new ones, while
    other ranks wait in it: so its norm is exchanged once, and each gradient is multiplied once.
    """

    def __init__(self) -> None:
        self.norm: Optional[float] = None  # with clipping, once it is known
        self.report: Optional[StepReport] = None  # of its exchange
        self._factor = 1.0
        self._prepared: List[Optional[int]] = []  # digests, when the step was refused

    def prepare(
        self,
        gradients: Sequence[Optional[torch.Tensor]],
        scale: Optional[torch.Tensor],
        clipping: Optional[Clipping],
    ) -> None:
        """Those that are prepared stay as they are. Nothing is written before the norm is known."""
        if clipping is not None and self.norm is None:
            own = _norm([gradient for gradient in gradients if gradient is not None])
            if scale is not None:
                own /= scale.item()
            self.norm = clipping.norm(own)
            self.report = clipping.report
            if math.isfinite(self.norm):
                self._factor = min(1.0, clipping.max_norm / (self.norm + 1e-6))
        for index, gradient in enumerate(gradients):
            if gradient is None or self._is_prepared(index, gradient):
                continue
            if scale is not None:
                gradient.div_(scale)
            if self._factor < 1:
                gradient.mul_(self._factor)

    def step_was_refused(self, gradients: Sequence[Optional[torch.Tensor]]) -> None:
        """Remembers them as they are."""
        self._prepared = [None if g is None else _digest(g) for g in gradients]

    def _is_prepared(self, index: int, gradient: torch.Tensor) -> bool:
        return bool(self._prepared) and self._prepared[index] == _digest(gradient)


class GlobalClipping:
    """Bounds the norm of the mean gradient, over all parameters and ranks: `norm` is
    sqrt(mean over ranks of ||g||^2)."""

    def __init__(self, options: Options, max_norm: float, shards: Optional[Shards]) -> None:
        """Joins a reduction beside the job of `options`. Errors as Reduction's; a rank with another max_norm
        is refused."""
        self.max_norm = max_norm
        self._shards = shards
        self.report: Optional[StepReport] = None
        self._squared = torch.zeros((), dtype=torch.float32, device="cpu")
        on_host = Options.from_buffer_copy(options)
        on_host.gpu = -1  # whatever the optimizer's session has set
        name = f"norm, clipped to {max_norm}"
        self._reduction = Reduction(on_host, "norm", [(name, ())])

    def norm(self, own: float) -> float:
        self._squared.fill_((own / _UNIT) ** 2)
        self.report = self._reduction.reduce([self._squared.data_ptr()])
        return math.sqrt(_whole(self._squared.item(), self._shards)) * _UNIT

    def leave(self) -> None:
        self._reduction.leave()


class OwnClipping:
    """Bounds the norm of this rank's gradient, over all parameters, without a word to other ranks."""

    def __init__(self, max_norm: float, shards: Optional[Shards]) -> None:
        self.max_norm = max_norm
        self.report: Optional[StepReport] = None
        self._shards = shards

    def norm(self, own: float) -> float:
        if self._shards is not None:
            own = math.sqrt(_whole(own**2, self._shards))
        return own if math.isfinite(own) else math.nan

    def leave(self) -> None:
        pass


def _whole(squared: float, shards: Optional[Shards]) -> float:
    """Returns the square of a whole gradient's norm, from that of this process's shard."""
    return squared if shards is None else shards.sum([squared])[0]


def _digest(gradient: torch.Tensor) -> int:
    """The sum of its numbers' bits. Versions and addresses would tell less: a GradScaler writes
    what is there again, and new gradients come into the memory of those before."""
    values = gradient._values() if gradient.is_sparse else gradient
    bits = values.view(torch.int32 if values.element_size() == 4 else torch.int16)
    return int(bits.sum(dtype=torch.int64).item())


def _norm(gradients: List[torch.Tensor]) -> float:
    """Of all of them as one vector. Each one's in fp32, their squares' sum in double precision."""
    if not gradients:
        return 0.0
    values = (g.coalesce().values() if g.is_sparse else g for g in gradients)
    norms = [torch.linalg.vector_norm(v, dtype=torch.float32) for v in values]
    # Together, as the host waits for a GPU each time that it asks for a number.
    return math.sqrt(sum(norm**2 for norm in torch.stack(norms).tolist()))
