"""Gradients clipped by their norm: by one factor on all ranks, or by each rank's own."""

import math
from typing import Iterable, List, Protocol

import torch

from signpost import Options, Reduction

# Norms travel squared, and fp32 rounds take numbers up to 2^60: so norms up to 2^46, 7e13, fit.
_UNIT = 2.0**16


class Clipping(Protocol):
    """What is done to a rank's gradients before a step."""

    def clip(self, gradients: Iterable[torch.Tensor]) -> float:
        """Multiplies them in place by min(1, max_norm / (norm + 1e-6)).

        Returns:
            the norm before; NaN when it is not finite, and then nothing is clipped.
        """

    def leave(self) -> None:
        """Ends this rank's part in it."""


class GlobalClipping:
    """Bounds the norm of the mean gradient, over all parameters and ranks: `norm` is
    sqrt(mean over ranks of ||g||^2)."""

    def __init__(self, options: Options, max_norm: float, joins_late: bool = False) -> None:
        """Joins a reduction beside the job of `options`, now or late, with the first gradients.
        Errors as Reduction's; a rank with another max_norm is refused."""
        self._max_norm = max_norm
        self._squared = torch.zeros((), dtype=torch.float32, device="cpu")
        self._options = options
        self._reduction = None if joins_late else self._join()

    def clip(self, gradients: Iterable[torch.Tensor]) -> float:
        gradients = list(gradients)
        if self._reduction is None:
            self._reduction = self._join()
        self._squared.fill_((_norm(gradients) / _UNIT) ** 2)
        self._reduction.reduce([self._squared.data_ptr()])
        norm = math.sqrt(self._squared.item()) * _UNIT
        _scale(gradients, norm, self._max_norm)
        return norm

    def leave(self) -> None:
        if self._reduction is not None:
            self._reduction.leave()

    def _join(self) -> Reduction:
        on_host = Options.from_buffer_copy(self._options)
        on_host.gpu = -1  # whatever the optimizer's session has set
        return Reduction(on_host, "norm", [(f"norm, clipped to {self._max_norm}", ())])


class OwnClipping:
    """Bounds the norm of this rank's gradient, over all parameters, without a word to others."""

    def __init__(self, max_norm: float) -> None:
        self._max_norm = max_norm

    def clip(self, gradients: Iterable[torch.Tensor]) -> float:
        gradients = list(gradients)
        norm = _norm(gradients)
        if not math.isfinite(norm):
            return math.nan
        _scale(gradients, norm, self._max_norm)
        return norm

    def leave(self) -> None:
        pass


def _scale(gradients: List[torch.Tensor], norm: float, max_norm: float) -> None:
    factor = max_norm / (norm + 1e-6)
    if factor < 1:
        for gradient in gradients:
            gradient.mul_(factor)


def _norm(gradients: List[torch.Tensor]) -> float:
    """Of all of them as one vector. Each one's in fp32, their squares' sum in double precision."""
    if not gradients:
        return 0.0
    values = (g.coalesce().values() if g.is_sparse else g for g in gradients)
    norms = [torch.linalg.vector_norm(v, dtype=torch.float32) for v in values]
    # Together, as the host waits for a GPU each time that it asks for a number.
    return math.sqrt(sum(norm**2 for norm in torch.stack(norms).tolist()))
