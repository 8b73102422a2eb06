"""Leaving jobs when nobody has done so explicitly."""

import atexit
import os
import sys
import weakref
from typing import Any

_PROCESS = os.getpid()


class Membership:
    """What ends with leave(): at the latest with the process, unless by an exception, and when it
    is garbage-collected."""

    def __init__(self) -> None:
        # From the first one on: what is registered later ends earlier, and a process alone has
        # started its aggregator by now.
        if not _memberships:
            atexit.unregister(_leave_all)
            atexit.register(_leave_all)
        _memberships.add(self)

    def leave(self) -> None:
        raise NotImplementedError

    def __del__(self) -> None:
        try:
            if _may_leave():
                self.leave()
        except Exception:  # nobody is there to hear of it
            pass


_memberships: "weakref.WeakSet[Membership]" = weakref.WeakSet()


def _may_leave() -> bool:
    # After an exception the launcher ends the others. They should not hear of it from a leave
    # first: its report begins with the rank that ends first. And a forked child has no part in what
    # its parent has joined.
    return not hasattr(sys, "last_type") and os.getpid() == _PROCESS


def _leave_all() -> None:
    if _may_leave():
        for membership in list(_memberships):
            membership.leave()
