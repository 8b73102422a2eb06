"""How a process waits for the others to join."""

import threading
from typing import List

from signpost import _abi


def join_in_background(function: str, *arguments: object) -> None:
    """Calls signpost_<function> in a thread of its own, so that Ctrl-C ends the wait for the other
    ranks; raises its error."""
    error: List[BaseException] = []

    def join() -> None:
        try:
            _abi.call(function, *arguments)
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=join, name="signpost join", daemon=True)
    thread.start()
    thread.join()
    if error:
        raise error[0]
