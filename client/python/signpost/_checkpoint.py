"""Whether there is a checkpoint to go on from. The library has them: worker/checkpoint_dir.h."""

import os
import re
from typing import Union

_CHECKPOINT = re.compile(r"step-\d{12,}-[0-9a-f]{16}")
_MANIFEST = "manifest"  # with it a checkpoint is committed
_PARAMETERS = "parameters"  # come when there is a sum...
_SUM = ".sum"  # ...which goes when there is a manifest


def has_checkpoint(directory: Union[str, "os.PathLike[str]"]) -> bool:
    """Whether there is a committed checkpoint in the directory, so that `resume=directory` is no
    NotFoundError. What a job has left that ended during its first checkpoint is none; nor is there
    one in a directory that does not exist. One that has lost its manifest is there, and damaged.

        resume = directory if signpost.has_checkpoint(directory) else None

    Ranks that are started together get the same answer, if they see the same directory and ask
    before any of them saves. Whether the checkpoint is whole `resume=` finds out.

    Raises:
        OSError: the directory cannot be read.
    """
    path = os.fspath(directory)
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return False
    checkpoints = filter(_CHECKPOINT.fullmatch, names)
    return any(_is_or_was_committed(os.path.join(path, name)) for name in checkpoints)


def _is_or_was_committed(path: str) -> bool:
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    if _MANIFEST in names:
        return True
    return _PARAMETERS in names and not any(name.endswith(_SUM) for name in names)
