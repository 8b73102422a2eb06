"""How a process ends because of an error that nobody has caught: with the exit code that says what to
do next, instead of Python's 1."""

import io
import sys
from types import TracebackType
from typing import Optional, Type

from signpost._errors import ours


def end_with_exit_codes() -> None:
    """Makes a SignpostError that nobody catches end the process with its exit_code, once the traceback
    is printed. Other errors, and errors at a Python prompt, have the effect that they had before.
    """
    show = sys.excepthook

    def show_and_exit(
        kind: Type[BaseException], error: BaseException, traceback: Optional[TracebackType]
    ) -> None:
        show(kind, error, traceback)
        failure = ours(error)
        if failure is not None and not _has_prompt():
            _print_collected_text()
            sys.exit(failure.exit_code)  # Python takes that from a hook

    sys.excepthook = show_and_exit


def _print_collected_text() -> None:
    """Prints the traceback if a hook around ours has collected it instead of printing it.

    torch.distributed.init_process_group() installs such a hook, which puts the rank before each line.
    It replaces sys.stderr by a StringIO, calls our hook, and prints the text when our hook returns.
    Our hook does not return, because it ends the process.
    """
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
        sys.__stderr__.write(sys.stderr.getvalue())
        sys.__stderr__.flush()


def _has_prompt() -> bool:
    """A program may get one after init(), as by code.interact()."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
