"""Leaving jobs when nobody has done so explicitly."""

import atexit
import os
import sys
import weakref

from signpost._errors import SignpostError

_PROCESS = os.getpid()


class Membership:
    """What ends with leave(): at the latest with the process, and when it is garbage-collected.

    After an exception only where nobody else ends the others. A launcher does, `signpost run` or
    torchrun, and they should not hear of it from a leave first: its report begins with the rank that
    ends first. The worker of a node keeps the process's place until it is started again. And what
    failed in here may keep a leave waiting for as long as it has failed.
    """

    def __init__(self, is_attached: bool = False) -> None:
        self._is_attached = is_attached
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
            if self._may_leave():
                self.leave()
        except Exception:  # nobody is there to hear of it
            pass

    def _may_leave(self) -> bool:
        if os.getpid() != _PROCESS:  # a forked child has no part in what its parent has joined
            return False
        if not hasattr(sys, "last_type"):
            return True
        if sys.last_type is None:  # the interpreter clears away; it was decided at exit
            return False
        if self._is_attached or _has_launcher():
            return False
        return not issubclass(sys.last_type, SignpostError)


_memberships: "weakref.WeakSet[Membership]" = weakref.WeakSet()


def _has_launcher() -> bool:
    return "SIGNPOST_LAUNCHER" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def _leave_all() -> None:
    for membership in list(_memberships):
        if membership._may_leave():
            membership.leave()
