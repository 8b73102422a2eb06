"""The other side of libpythoncodec.so: runs a codec that is a Python class, for one process.

    python3 -m signpost._codec_host "module:Class sha256"

with a socket as its standard input. The options come from a job, so from anybody: what is not in
SIGNPOST_PYTHON_CODECS, which whoever starts the process has set, is not imported. Questions are three numbers, of 64 bits each (what is asked,
elements, bytes), and then so many bytes; an answer is a number of bytes, 0 if there is none, and
then those.
"""

import hashlib
import importlib
import importlib.util
import os
import signal
import socket
import struct
import sys
import traceback
from typing import Any, BinaryIO, Callable, Dict

import numpy as np

STOPS = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}


def outlive_stops() -> None:
    """They come blocked, which whatever a codec's class starts would inherit, and nobody could end
    it then. From here on they do nothing in this process, and what they usually do in those that
    it starts."""
    usual = {stop: signal.getsignal(stop) for stop in STOPS}
    usual = {stop: handler for stop, handler in usual.items() if handler != signal.SIG_IGN}

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    def be_usual() -> None:
        for stop, handler in usual.items():
            signal.signal(stop, handler)
        unblock()

    for stop in usual:
        signal.signal(stop, lambda *_: None)
    # A process that is only forked keeps handlers; one that is stopped at once must not lose that.
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, STOPS),
        after_in_parent=unblock,
        after_in_child=be_usual,
    )
    unblock()


def digest_of(module: str) -> str:
    """Of the module's source file: ranks and aggregators must have the same.

    Raises:
        ValueError: it has none.
    """
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise ValueError(f"there is no module {module} here: {error}") from error
    if found is None or found.origin is None or not os.path.isfile(found.origin):
        raise ValueError(f"there is no module {module} here")
    with open(found.origin, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()[:16]


def load(options: str) -> Any:
    """An instance of the class that the options name.

    Raises:
        ValueError: it may not be used, there is none, or its source is another.
    """
    name, _, digest = options.partition(" ")
    allowed = os.environ.get("SIGNPOST_PYTHON_CODECS", "")
    if name not in allowed.split(","):
        raise ValueError(f"{name} is not in SIGNPOST_PYTHON_CODECS, which is {allowed!r}")
    module, _, class_name = name.partition(":")
    here = digest_of(module)
    if digest != here:
        raise ValueError(f"the source of {name} has the digest {here} here, {digest} in the job")
    codec_class = getattr(importlib.import_module(module), class_name, None)
    if not isinstance(codec_class, type):
        raise ValueError(f"{module} has no class {class_name}")
    return codec_class()


def answers_of(codec: Any) -> Dict[str, Callable[[int, bytes], bytes]]:
    def compress(elements: int, numbers: bytes) -> bytes:
        block = bytes(codec.compress(np.frombuffer(numbers, np.float32)))
        if len(block) != codec.block_bytes(elements):
            raise ValueError(f"compress gave {len(block)} bytes, not block_bytes({elements})")
        return block

    def decompress(elements: int, block: bytes) -> bytes:
        numbers = np.ascontiguousarray(codec.decompress(block, elements), np.float32)
        if numbers.shape != (elements,):
            raise ValueError(f"decompress gave the shape {numbers.shape}, wanted ({elements},)")
        return bytes(numbers.tobytes())

    def block_bytes(elements: int, _: bytes) -> bytes:
        return struct.pack("=Q", codec.block_bytes(elements))

    return {"b": block_bytes, "c": compress, "d": decompress}


def serve(codec: Any, questions: BinaryIO, end: socket.socket) -> None:
    answers = answers_of(codec)
    while True:
        question = questions.read(24)
        if len(question) < 24:
            return
        what, elements, size = struct.unpack("=QQQ", question)
        content = questions.read(size)
        try:
            answer = answers[chr(what)](elements, content)
        except Exception:  # whatever a class that is being tried may raise
            if chr(what) != "d":  # bytes that nobody has packed may be no block
                traceback.print_exc()
            answer = b""
        end.sendall(struct.pack("=Q", len(answer)) + answer)


def main() -> None:
    end = socket.socket(fileno=0)
    outlive_stops()
    try:
        codec = load(sys.argv[1])
    except ValueError as error:
        message = str(error).encode()
        end.sendall(struct.pack("=I", len(message)) + message)
        return
    end.sendall(struct.pack("=I", 0))
    serve(codec, end.makefile("rb"), end)


if __name__ == "__main__":
    main()
