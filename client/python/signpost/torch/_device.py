"""Tensors that are on a GPU, and sessions that train them there."""

from typing import Optional, Sequence

import torch

from signpost import Options, Parameter, Session


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


class GpuSession(Session):
    """A session on a GPU whose calls put their work on PyTorch's current stream, as PyTorch's own
    functions do, and behind what is on the stream before."""

    def __init__(self, gpu: int, options: Options, parameters: Sequence[Parameter]) -> None:
        options.gpu = gpu
        self._gpu = gpu
        current_stream(gpu).synchronize()  # parameters are made there, and joining has no stream
        super().__init__(options, parameters)

    def parameters_crc32c(self) -> int:
        self._follow_pytorch()
        return super().parameters_crc32c()

    def _call(self, function: str, *arguments: object) -> None:
        self._follow_pytorch()
        super()._call(function, *arguments)

    def _follow_pytorch(self) -> None:
        self.set_stream(current_stream(self._gpu).cuda_stream)
