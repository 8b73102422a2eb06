"""Leaving jobs when nobody has done so explicitly."""

import atexit
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import weakref
from typing import Optional, Type

from signpost._errors import SignpostError


class Membership:
    """What ends with leave(): at the latest with the process, and when it is garbage-collected.

    After an exception only where nobody else ends the others. A launcher does, `signpost run` or
    torchrun, and they should not hear of it from a leave first: its report begins with the rank that
    ends first. The worker of a node keeps the process's place until it is started again. And what
    failed in here may keep a leave waiting for as long as it has failed.
    """

    def __init__(self, is_attached: bool = False) -> None:
        self._is_attached = is_attached
        self._process = os.getpid()
        # From the process's first one on: what is registered later ends earlier, and a process alone
        # has started its aggregator by now.
        if not any(other._is_of_this_process() for other in _memberships):
            atexit.unregister(_leave_all_at_exit)
            atexit.register(_leave_all_at_exit)
            # Its children end without what atexit has.
            if multiprocessing.parent_process() is not None:
                multiprocessing.util.Finalize(None, _leave_all_of_child, exitpriority=0)
        _memberships.add(self)

    def leave(self) -> None:
        raise NotImplementedError

    def __del__(self) -> None:
        try:
            if self._is_of_this_process() and not (_has_ended or sys.is_finalizing()):
                self.leave()
        except Exception:  # nobody is there to hear of it
            pass

    def _is_of_this_process(self) -> bool:
        """And not of a parent that has forked it, in whose jobs it has no part."""
        return os.getpid() == self._process

    def _may_leave(self, error: Optional[Type[BaseException]]) -> bool:
        """At the end of the process, which is because of that error."""
        if not self._is_of_this_process():
            return False
        if error is None or issubclass(error, SystemExit):
            return True
        if self._is_attached or _has_launcher():
            return False
        return not issubclass(error, SignpostError)


_memberships: "weakref.WeakSet[Membership]" = weakref.WeakSet()
_has_ended = False  # the process, as far as memberships are concerned


def _has_launcher() -> bool:
    return "SIGNPOST_LAUNCHER" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def _leave_all_at_exit() -> None:
    _leave_all(getattr(sys, "last_type", None))


def _leave_all_of_child() -> None:
    # It comes before what waits for threads, which may still train.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    _leave_all(sys.exc_info()[0])  # multiprocessing catches it behind this


def _leave_all(error: Optional[Type[BaseException]]) -> None:
    global _has_ended
    if _has_ended:
        return
    _has_ended = True
    for membership in list(_memberships):
        if membership._may_leave(error):
            membership.leave()
