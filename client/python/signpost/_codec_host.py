"""The other side of libpythoncodec.so: runs a codec that is a Python class, for one process.

    python3 -m signpost._codec_host "module:Class sha256"

with a socket as its standard input. Questions are three numbers, of 64 bits each (what is asked,
elements, bytes), and then so many bytes; an answer is a number of bytes, 0 if there is none, and
then those.
"""

import hashlib
import importlib
import inspect
import socket
import struct
import sys
import traceback
from typing import Any, BinaryIO, Callable, Dict

import numpy as np


def digest_of(codec_class: type) -> str:
    """Of the class's source file: ranks and aggregators must have the same."""
    source = inspect.getsourcefile(codec_class)
    assert source is not None
    with open(source, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()[:16]


def load(options: str) -> Any:
    """An instance of the class that the options name.

    Raises:
        ValueError: there is none, or its source is another.
    """
    name, _, digest = options.partition(" ")
    module_name, _, class_name = name.partition(":")
    try:
        codec_class = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"there is no {name} here: {error}") from error
    here = digest_of(codec_class)
    if digest != here:
        raise ValueError(f"the source of {name} has the digest {here} here, {digest} in the job")
    return codec_class()


def answers_of(codec: Any) -> Dict[str, Callable[[int, bytes], bytes]]:
    def compress(elements: int, numbers: bytes) -> bytes:
        return bytes(codec.compress(np.frombuffer(numbers, np.float32)))

    def decompress(elements: int, block: bytes) -> bytes:
        return np.ascontiguousarray(codec.decompress(block, elements), np.float32).tobytes()

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
