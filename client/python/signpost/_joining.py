"""How a process waits for the others to join."""

import ctypes
import threading
from typing import Optional, Tuple

from signpost import _abi
from signpost._errors import SignpostError
from signpost._stopping import signals_end_it


def join_in_background(
    prefix: str, *arguments: object, borrowed: object = None, has_begun: bool = False
) -> ctypes.c_void_p:
    """Calls signpost_<prefix>join in a thread of its own, so that Ctrl-C, and what
    signals_end_it() takes, ends the wait for other ranks; returns the handle, or raises its error.

    Neither ends the call itself. The thread goes on, keeps what is `borrowed` for as long, and when
    the others are there it leaves, without having written into parameters if the signal came before
    they were: the others hear at once that nobody is there.
    """
    join = _Join(prefix, arguments, borrowed)
    try:
        with signals_end_it(has_begun):
            join.start()
            join.has_returned.wait()  # Python 3.11 takes it for ended after Ctrl-C in its join()
    except BaseException:
        join.abandon()
        raise
    if join.error is None:
        return join.handle
    try:
        raise join.error
    finally:
        join.error = None  # whose traceback leads to the thread, and to what it keeps


class _Join(threading.Thread):
    def __init__(self, prefix: str, arguments: Tuple[object, ...], borrowed: object) -> None:
        super().__init__(name="signpost join", daemon=True)
        self.handle = ctypes.c_void_p()
        self.error: Optional[BaseException] = None
        self.has_returned = threading.Event()
        self._prefix = prefix
        self._arguments = arguments
        self._borrowed = borrowed
        self._lock = threading.Lock()
        self._is_abandoned = False

    def run(self) -> None:
        # Not of the main thread, so that no Ctrl-C comes into it.
        is_abandoned = _abi.Interrupt(lambda: self._is_abandoned)
        _abi.library.signpost_set_thread_interrupt(is_abandoned)
        try:
            _abi.call(f"{self._prefix}join", *self._arguments, ctypes.byref(self.handle))
        except BaseException as error:
            self.error = error
        with self._lock:
            self.has_returned.set()
            leaves = self._is_abandoned
        if leaves:
            self._leave()

    def abandon(self) -> None:
        """Nobody will take the handle."""
        with self._lock:
            self._is_abandoned = True
            leaves = self.has_returned.is_set()
        if leaves:
            self._leave()

    def _leave(self) -> None:
        if self.error is not None:
            return
        try:
            _abi.call(f"{self._prefix}leave", self.handle)
        except SignpostError:  # nobody is there to hear of it
            pass
        finally:
            getattr(_abi.library, f"signpost_{self._prefix}close")(self.handle)
