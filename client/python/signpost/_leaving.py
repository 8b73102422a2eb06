"""Leaving jobs when nobody has done so explicitly."""

import atexit
import ctypes
import itertools
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import sys
import threading
import weakref
from types import FrameType
from typing import Callable, List, Optional

from signpost._errors import ours
from signpost._exiting import uncaught_error
from signpost._one_call import OneCall


class Membership:
    """What ends with leave(): at the latest with the process, and when it is garbage-collected.

    After an exception only where nobody else ends the others. A launcher does, `signpost run` or
    torchrun, and they should not hear of it from a leave first: its report begins with the rank that
    ends first. And what failed in here may keep a leave waiting for as long as it has failed.
    """

    _handle: Optional[ctypes.c_void_p] = None  # from when it has joined until it leaves
    _kind = "session"  # for errors

    def __init__(self) -> None:
        """To be called before joining.

        Raises:
            RuntimeError: this process is a fork of one that is in a job.
        """
        for other in _all():
            if other._handle is not None:
                other._check_process()
        self._calls = OneCall(self._kind)
        self._process = os.getpid()
        # From the process's first one on: what is registered later ends earlier, and a process alone
        # has started its aggregator by now.
        if not any(other._is_of_this_process() for other in _all()):
            atexit.unregister(_leave_all_at_exit)
            if multiprocessing.parent_process() is None:
                atexit.register(_leave_all_at_exit)
            else:  # multiprocessing's children run atexit's functions only since Python 3.13
                multiprocessing.util.Finalize(None, _leave_all_of_child, exitpriority=0)
        _memberships[next(_count)] = self

    def leave(self) -> None:
        raise NotImplementedError

    def __del__(self) -> None:
        try:
            if _has_ended or sys.is_finalizing():
                return
            if self._may_leave(_error_told_by(_bootstrap)):
                self.leave()
        except Exception:  # nobody is there to hear of it
            pass

    def _check_process(self) -> None:
        """Here, as a fork does not have the threads that answer its calls.

        Raises:
            RuntimeError: this is not the process that has joined.
        """
        if not self._is_of_this_process():
            raise RuntimeError(
                f"process {self._process} is in a job, and this is process {os.getpid()}, a fork "
                "of it, which has no part in that and cannot join another: make the call there, or "
                "start this process by multiprocessing's 'spawn'"
            )

    def _is_of_this_process(self) -> bool:
        """And not of a parent that has forked it, in whose jobs it has no part."""
        return os.getpid() == self._process

    def _may_leave(self, error: Optional[BaseException]) -> bool:
        """At the end of the process, which is because of that error."""
        if not self._is_of_this_process():
            return False
        if error is None or isinstance(error, SystemExit):
            return True
        if _has_launcher():
            return False
        return ours(error) is None


_memberships: "weakref.WeakValueDictionary[int, Membership]" = weakref.WeakValueDictionary()
_count = itertools.count()
_has_ended = False  # the process, as far as memberships are concerned


def _all() -> List[Membership]:
    """In the order in which they have begun to join."""
    alive = (reference() for reference in _memberships.valuerefs())
    return [membership for membership in alive if membership is not None]


def _has_launcher() -> bool:
    return "SIGNPOST_LAUNCHER" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def _leave_all_at_exit() -> None:
    _leave_all(uncaught_error())


_error_of_child: Optional[BaseException] = None  # what multiprocessing's run() has raised


def _remember_error_of_child(_: object) -> None:
    """Makes this child of multiprocessing remember the error that its run() raises.

    Since Python 3.13 a child's finalizers run when multiprocessing has already dropped the error.
    """
    process = multiprocessing.current_process()
    run = process.run

    def run_and_remember() -> None:
        global _error_of_child
        try:
            run()
        except BaseException as error:
            _error_of_child = error
            raise

    process.run = run_and_remember  # type: ignore[method-assign]


# multiprocessing calls it in each child, before run(), also in those that are not forked.
multiprocessing.util.register_after_fork(_remember_error_of_child, _remember_error_of_child)


def _leave_all_of_child() -> None:
    # It comes before what waits for threads, which may still train.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    # Before Python 3.13 finalizers run while the error is still being handled, so sys.exc_info() has it.
    _leave_all(_error_of_child or sys.exc_info()[1] or _error_told_by(_bootstrap))


def _frame_of_bootstrap() -> Optional[FrameType]:
    """Returns the frame of multiprocessing's _bootstrap() if that imports this module by its run()."""
    frame: Optional[FrameType] = sys._getframe()
    code = multiprocessing.process.BaseProcess._bootstrap.__code__  # type: ignore[attr-defined]
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def _error_told_by(frame: Optional[FrameType]) -> Optional[BaseException]:
    """Returns an error in the place of that which _bootstrap() has turned into exit code 1."""
    if frame is None or frame.f_locals.get("exitcode") != 1:
        return None
    return RuntimeError("multiprocessing has shown it")


# Where run() imports signpost, it is too late to remember what run() raises.
_bootstrap = _frame_of_bootstrap()


def _leave_all(error: Optional[BaseException]) -> None:
    """Leaves what may be left when the process ends."""
    global _has_ended
    if _has_ended:
        return
    _has_ended = True
    leave_all(lambda membership: membership._may_leave(error))


def leave_all(is_left: Callable[[Membership], bool] = Membership._is_of_this_process) -> None:
    """Leaves all of them; raises the first error behind the last, as others wait for each."""
    failed: Optional[Exception] = None
    for membership in _all():
        if not is_left(membership):
            continue
        try:
            membership.leave()
        except Exception as why:
            failed = failed or why
    if failed is not None:
        raise failed
