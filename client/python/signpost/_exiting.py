"""How a process ends because of an error that nobody has caught.

The exit code says what to do next: 75 is "try again", 64 is "wrong configuration". Python's own is always 1.
"""

import atexit
import sys
import threading
from typing import Any, Optional

from signpost import _abi
from signpost._errors import SignpostError, ours

_error_of_thread: Optional[SignpostError] = (
    None  # the first that ended a thread, without its traceback
)
_is_set_up = False


def end_with_exit_codes() -> None:
    """Makes a SignpostError that nobody catches end the process with its exit_code.

    The traceback is printed by whatever prints it without Signpost: Python, torch.distributed or rich.
    An error that ends a thread other than the main one counts where the main one ends well. Other
    errors, and errors at a Python prompt, have the effect that they have without Signpost. Calls
    after the first do nothing.
    """
    global _is_set_up
    if _is_set_up:
        return
    _is_set_up = True
    show = threading.excepthook

    def show_and_remember(args: Any) -> None:
        global _error_of_thread
        show(args)
        failure = ours(args.exc_value)
        if failure is not None and _error_of_thread is None:
            _error_of_thread = type(failure)(str(failure), failure.code, failure.exit_code)

    threading.excepthook = show_and_remember
    atexit.register(_set_exit_code)


def uncaught_error() -> Optional[BaseException]:
    """Returns the error that ends this process, or None; for use in functions of atexit.

    It is what the main thread did not catch, or else a SignpostError that another thread did not.
    """
    return _error_of_main_thread() or _error_of_thread


def _error_of_main_thread() -> Optional[BaseException]:
    error: Optional[BaseException] = getattr(sys, "last_value", None)
    # pytest and others set sys.last_value for debuggers. Only the traceback of an uncaught error
    # begins with a frame that nobody has called.
    if error is None or error.__traceback__ is None:
        return None
    return error if error.__traceback__.tb_frame.f_back is None else None


def _set_exit_code() -> None:
    error = _error_of_main_thread()
    status = 1
    if error is None and _error_of_thread is not None:
        error, status = _error_of_thread, 0
    failure = ours(error)
    if failure is not None and not _has_prompt():
        # An excepthook that raises SystemExit would do, but hooks around it lose what they have
        # collected, and hooks that replace it do not call it.
        _abi.library.signpost_replace_exit_status(status, failure.exit_code)


def _has_prompt() -> bool:
    """Returns whether somebody types, also at a prompt that a program opens, as code.interact() does."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
