"""Gradients clipped by one factor on all ranks."""

import math
from typing import Iterable, List

import torch

from signpost import Options, Reduction

# Norms travel squared, and fp32 rounds take numbers up to 2^60: so norms up to 2^46, 7e13, fit.
_UNIT = 2.0**16


class GlobalClipping:
    """Bounds the norm of the mean gradient, over all parameters and ranks."""

    def __init__(self, options: Options, max_norm: float) -> None:
        """Joins a reduction beside the job of `options`. Errors as Reduction's; a rank with another
        max_norm is refused."""
        self._max_norm = max_norm
        self._squared = torch.zeros(())
        self._reduction = Reduction(options, "norm", [(f"norm, clipped to {max_norm}", ())])

    def clip(self, gradients: Iterable[torch.Tensor]) -> float:
        """Multiplies this rank's gradients in place by what all ranks agree on.

        Returns:
            sqrt(mean over ranks of ||g||^2), before; NaN when it is not finite on some rank, and
            then nothing is clipped.
        """
        gradients = list(gradients)
        self._squared.fill_((_norm(gradients) / _UNIT) ** 2)
        self._reduction.reduce([self._squared.data_ptr()])
        norm = math.sqrt(self._squared.item()) * _UNIT
        factor = self._max_norm / (norm + 1e-6)
        if factor < 1:
            for gradient in gradients:
                gradient.mul_(factor)
        return norm

    def leave(self) -> None:
        self._reduction.leave()


def _norm(gradients: List[torch.Tensor]) -> float:
    """Of all of them as one vector. Each one's in fp32, their squares' sum in double precision."""
    if not gradients:
        return 0.0
    values = (g.coalesce().values() if g.is_sparse else g for g in gradients)
    norms = [torch.linalg.vector_norm(v, dtype=torch.float32) for v in values]
    # Together, as the host waits for a GPU each time that it asks for a number.
    return math.sqrt(sum(norm**2 for norm in torch.stack(norms).tolist()))
