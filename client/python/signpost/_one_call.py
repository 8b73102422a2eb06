"""How an object that is not thread-safe refuses a second thread instead of crashing."""

import contextlib
import threading
from typing import Iterator


class AnotherCall(RuntimeError):
    """Another thread is in a call."""


class OneCall:
    """Lets one thread at a time into an object."""

    def __init__(self, of: str) -> None:
        """`of` says in the error what the object is: "optimizer"."""
        self._of = of
        # A signal's handler runs in the thread that is in a call, between two of Python's instructions.
        self._lock = threading.RLock()
        self._running = "a call"

    @contextlib.contextmanager
    def enter(self, name: str) -> Iterator[None]:
        """Runs what is inside as the call of that name.

        Raises:
            AnotherCall: another thread is in one; nothing was done.
        """
        if not self._lock.acquire(blocking=False):
            raise AnotherCall(
                f"{name}() was called while another thread is in {self._running}() of this {self._of}; "
                "call it when that has returned"
            )
        before, self._running = self._running, name
        try:
            yield
        finally:
            self._running = before
            self._lock.release()
