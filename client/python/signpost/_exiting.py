"""How a process ends because of an error that nobody has caught: with the exit code that says what to
do next, instead of Python's 1."""

import sys
from types import TracebackType
from typing import Optional, Type

from signpost._errors import ours


def end_with_exit_codes() -> None:
    """From now on, behind the traceback; other errors than ours end as before. Not where somebody
    types, who wants to go on."""
    show = sys.excepthook

    def show_and_exit(
        kind: Type[BaseException], error: BaseException, traceback: Optional[TracebackType]
    ) -> None:
        show(kind, error, traceback)
        failure = ours(error)
        if failure is not None and not _has_prompt():
            sys.exit(failure.exit_code)  # Python takes that from a hook

    sys.excepthook = show_and_exit


def _has_prompt() -> bool:
    """A program may get one after init(), as by code.interact()."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
