"""Signpost's Python SDK: data-parallel training that sends one bit per parameter each way.

`signpost.torch` is for PyTorch. This package is what is below it, for memory of any framework.
"""

from signpost._abi import Options
from signpost._checkpoint import checkpoint_step, has_checkpoint
from signpost._codec import INCLUDE, PYTHON_CODEC, Codec, python_codec
from signpost._errors import (
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    SignpostError,
    UnavailableError,
)
from signpost._reduction import Reduction
from signpost._session import Parameter, Rates, Session, StepReport
from signpost._stopping import StopRequest
from signpost._version import __version__
from signpost._world import World, init, is_initialized, rank, shutdown, world, world_size

__all__ = [
    "Codec",
    "DataLossError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "INCLUDE",
    "InvalidArgumentError",
    "NotFoundError",
    "Options",
    "PYTHON_CODEC",
    "Parameter",
    "Rates",
    "Reduction",
    "ResourceExhaustedError",
    "Session",
    "SignpostError",
    "StepReport",
    "StopRequest",
    "UnavailableError",
    "World",
    "__version__",
    "checkpoint_step",
    "has_checkpoint",
    "init",
    "is_initialized",
    "python_codec",
    "rank",
    "shutdown",
    "world",
    "world_size",
]
