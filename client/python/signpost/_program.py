"""The `signpost` program that comes with this package."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import List, Optional

PROGRAM = Path(__file__).with_name("signpost")


def main() -> None:
    """`signpost` and `python3 -m signpost`."""
    # For `signpost demo --torch`, and for codecs that are Python classes.
    os.environ.setdefault("SIGNPOST_PYTHON", sys.executable)
    os.execv(PROGRAM, [str(PROGRAM), *sys.argv[1:]])


def start_private_aggregator() -> str:
    """Starts an aggregator on loopback that ends with this process; returns its "host:port"."""
    starting = _AggregatorThread()
    starting.start()
    starting.has_started.wait()
    if starting.error is not None:
        raise starting.error
    _private.append(starting)
    return starting.address


def stop_private_aggregators() -> None:
    """Ends those that this process has started."""
    while _private:
        ending = _private.pop()
        assert ending.process is not None
        ending.process.terminate()
        ending.join()


class _AggregatorThread(threading.Thread):
    """It ends with the aggregator, which would otherwise end with the thread that started it."""

    def __init__(self) -> None:
        super().__init__(name="signpost aggregator", daemon=True)
        self.has_started = threading.Event()
        self.address = ""
        self.error: Optional[BaseException] = None
        self.process: "Optional[subprocess.Popen[str]]" = None

    def run(self) -> None:
        try:
            self.process = process = _aggregator_process()
            self.address = _address_of(process)
        except BaseException as error:
            self.error = error
            return
        finally:
            self.has_started.set()
        process.wait()


_private: "List[_AggregatorThread]" = []


def _aggregator_process() -> "subprocess.Popen[str]":
    for_others = ("SIGNPOST_TLS_DIR", "SIGNPOST_CONFIG")
    environment = {k: v for k, v in os.environ.items() if k not in for_others}
    environment.setdefault("SIGNPOST_PYTHON", sys.executable)  # for codecs that are Python classes
    return subprocess.Popen(
        # setpriv is of util-linux; however this process ends, the aggregator ends with it.
        ["setpriv", "--pdeathsig", "KILL", str(PROGRAM), "aggregator", "--drain-grace=0s"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process, which may still need the aggregator
        text=True,
    )


def _address_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("listening on "):
        raise RuntimeError(
            f"the private aggregator of a single process, {PROGRAM}, did not start: it ended with "
            f"exit code {process.wait()}"
        )
    return line[len("listening on ") :].strip()
