"""SIGTERM as a training loop wants it: asked between two steps, instead of in the middle of one."""

import signal
import sys
import threading
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Dict, Iterator, List, Optional, Type

from signpost._errors import ours

_TRY_AGAIN = 75  # what `signpost run` and batch systems tell from a failure
_KINDS = (signal.SIGTERM, signal.SIGINT)
_entered: List["StopRequest"] = []


class StopRequest:
    """While it is entered, the first SIGTERM or SIGINT to this process is noted and does nothing
    else; a second one of its kind ends the process as ever. Python notices either when a step that
    is under way is over, for which ranks wait until `exchange_timeout_s` at most.

        with signpost.StopRequest() as stop:
            for batch in batches:
                ...
                optimizer.step()
                stop.check()

    In the main thread only, as Python has it. An optimizer that waits for other ranks to join has
    no step to finish: it raises what check() raises, and so it does at SIGTERM without a
    StopRequest, where nobody else has a handler.
    """

    def __init__(self) -> None:
        self.made = False  # whether the process was asked
        self._before: Dict[int, Any] = {}

    def check(self) -> None:
        """Ends the program with exit code 75, "try again", by SystemExit, if it was asked. It leaves
        its job on the way, and the others end likewise when they wait for it."""
        if self.made:
            raise SystemExit(_TRY_AGAIN)

    def __enter__(self) -> "StopRequest":
        for kind in _KINDS:
            # None: it was not Python that had set it.
            self._before[kind] = signal.signal(kind, self._note) or signal.SIG_DFL
        _entered.append(self)
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        _entered.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        failure = ours(error)
        if self.made and failure is not None:
            # Who was asked has probably lost ranks that were asked too, and left a step earlier.
            print(f"asked to stop; {failure}", file=sys.stderr)
            raise SystemExit(_TRY_AGAIN) from error

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        self.made = True
        signal.signal(number, self._before[number])


@contextmanager
def signals_end_it(has_begun: bool) -> Iterator[None]:
    """A wait for other ranks, in which SIGTERM ends the program with exit code 75 where nothing
    handles it, as a container's first process would not end otherwise; and, unless training
    `has_begun`, what a StopRequest has noted or would note, as that is asked in the training's loop
    only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    requests = [] if has_begun else _entered
    taken: Dict[signal.Signals, List[Any]] = {kind: [r._note for r in requests] for kind in _KINDS}
    taken[signal.SIGTERM].append(signal.SIG_DFL)
    before: Dict[signal.Signals, Any] = {}
    try:
        for kind, handlers in taken.items():
            if signal.getsignal(kind) in handlers:
                before[kind] = signal.getsignal(kind)
                signal.signal(kind, _end)
        for request in requests:
            request.check()
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _end(number: int, frame: Optional[FrameType]) -> None:
    raise SystemExit(_TRY_AGAIN)
