"""The `signpost` program that comes with this package."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("signpost")


def main() -> None:
    """`signpost` and `python3 -m signpost`."""
    # For `signpost demo --torch`, and for codecs that are Python classes.
    os.environ.setdefault("SIGNPOST_PYTHON", sys.executable)
    os.execv(PROGRAM, [str(PROGRAM), *sys.argv[1:]])


def start_private_aggregator() -> str:
    """Starts an aggregator on loopback that ends with this process; returns its "host:port".

    To be called from a thread that lives as long as the process, as the main thread does.
    """
    for_others = ("SIGNPOST_TLS_DIR", "SIGNPOST_CONFIG")
    environment = {k: v for k, v in os.environ.items() if k not in for_others}
    environment.setdefault("SIGNPOST_PYTHON", sys.executable)  # for codecs that are Python classes
    process = subprocess.Popen(
        # setpriv is of util-linux; however this process ends, the aggregator ends with it.
        ["setpriv", "--pdeathsig", "KILL", str(PROGRAM), "aggregator", "--drain-grace=0s"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process, which may still need the aggregator
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("listening on "):
        raise RuntimeError(
            f"the private aggregator of a single process, {PROGRAM}, did not start: it ended with "
            f"exit code {process.wait()}"
        )
    return line[len("listening on ") :].strip()
