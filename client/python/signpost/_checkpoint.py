"""Whether there is a checkpoint to go on from, and of which step."""

import ctypes
import os
from typing import Optional, Union

from signpost import _abi
from signpost._errors import DataLossError, NotFoundError


def checkpoint_step(directory: Union[str, "os.PathLike[str]"]) -> Optional[int]:
    """The steps that are in the directory's newest committed checkpoint, None if there is none; what a
    job has left that ended during its first checkpoint is none.

        if (signpost.checkpoint_step(directory) or 0) >= STEPS:
            sys.exit()  # the others were done when this rank was lost

    Ranks that are started together get the same answer, if they see the same directory and ask
    before any of them saves. Whether the checkpoint is whole `resume=` finds out.

    Raises:
        DataLossError: all that are there are damaged.
        FailedPreconditionError: the directory may not be read, or is none.
        UnavailableError: it cannot be read for the moment.
        InvalidArgumentError: it is the empty string.
    """
    step = ctypes.c_uint64()
    try:
        _abi.call("checkpoint_step", os.fsencode(directory), ctypes.byref(step))
    except NotFoundError:
        return None
    return step.value


def has_checkpoint(directory: Union[str, "os.PathLike[str]"]) -> bool:
    """Whether there is one, so that `resume=directory` is no NotFoundError: also where all are damaged,
    which it tells.

        resume = directory if signpost.has_checkpoint(directory) else None

    Raises:
        FailedPreconditionError: the directory may not be read, or is none.
        UnavailableError: it cannot be read for the moment.
        InvalidArgumentError: it is the empty string.
    """
    try:
        return checkpoint_step(directory) is not None
    except DataLossError:
        return True
