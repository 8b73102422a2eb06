"""How numbers travel: names, and codecs from outside."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Union

from signpost import _abi


@dataclass(frozen=True)
class Codec:
    """A codec from outside: a shared object as signpost_codec.h has it. Aggregators need it too:
    `signpost aggregator --codec-library`, or SIGNPOST_CODEC_LIBRARIES in their environment, which
    `signpost run`'s aggregators, and that of a process alone, have from their parent.

    Attributes:
        library: path of the shared object.
        options: the codec's own, the same on all ranks.
    """

    library: str
    options: str = ""


# Where the compiler finds proto/signpost_codec.h, what a shared object of one's own is written to,
# and client/signpost.h, of libsignpost.so, which is in the directory above:
#     cc -shared -fPIC -O2 -I $(python3 -c "import signpost; print(signpost.INCLUDE)") codec.c
# examples/topk.c and two_tensors.c beside it are examples.
INCLUDE = str(Path(__file__).with_name("include"))

# The shared object of codecs that are Python classes.
PYTHON_CODEC = str(Path(__file__).with_name("libpythoncodec.so"))


def python_codec(codec_class: type) -> Codec:
    """A codec that is a class of a module, for experiments: each block takes a way to another process
    and back. It is made without arguments, by every rank, aggregator and `signpost worker`, which
    need the same module in their PYTHONPATH, and has three methods that they call:

        block_bytes(elements) -> int: that a block of so many numbers takes, never more for fewer
        compress(values) -> bytes: of a float32 array, at most 65536 of them; so many
        decompress(block, elements) -> the float32 array that the bytes stand for; it raises
            whatever it likes for bytes that compress cannot have made

    The same numbers must give the same bytes on all machines. SIGHUP, SIGINT and SIGTERM do
    nothing in its process, and what they usually do in those that it starts: Ctrl-C reaches them
    too, unless they have a session of their own. Aggregators need in their environment

        SIGNPOST_CODEC_LIBRARIES=signpost.PYTHON_CODEC
        SIGNPOST_PYTHON_CODECS=module:Class     which jobs may ask for; with commas in between
        SIGNPOST_PYTHON                         if their python3 has not Signpost and NumPy

    and so does whoever runs `signpost codec check`. A `signpost worker` that is started by itself
    needs the latter two: it loads the shared object that its ranks name.

    Raises:
        ValueError: the class is not a module's, or that of a script.
    """
    from signpost._codec_host import digest_of  # NumPy is for those who need this

    if codec_class.__module__ == "__main__" or "." in codec_class.__qualname__:
        raise ValueError(f"{codec_class.__qualname__} must be in a module of its own")
    name = f"{codec_class.__module__}:{codec_class.__qualname__}"
    # This process's own may be used by it.
    allowed = [*os.environ.get("SIGNPOST_PYTHON_CODECS", "").split(","), name]
    os.environ["SIGNPOST_PYTHON_CODECS"] = ",".join(filter(None, dict.fromkeys(allowed)))
    os.environ.setdefault("SIGNPOST_PYTHON", sys.executable)
    return Codec(PYTHON_CODEC, f"{name} {digest_of(codec_class.__module__)}")


def codec_options(**codecs: Union[str, Codec]) -> Dict[str, Any]:
    """What fields of _abi.Options say of the codecs, by the name of their argument.

    Raises:
        ValueError: there is no such codec, or two of them are from outside and differ.
    """
    fields: Dict[str, Any] = {}
    custom = {codec for codec in codecs.values() if isinstance(codec, Codec)}
    if len(custom) > 1:
        raise ValueError(f"{' and '.join(codecs)} are different codecs from outside: a job has one")
    for outside in custom:
        fields.update(
            codec_library=outside.library.encode(), codec_options=outside.options.encode()
        )
    for name, codec in codecs.items():
        if isinstance(codec, Codec):
            fields[name] = _abi.CUSTOM
        elif isinstance(codec, str) and codec in _abi.CODECS:
            fields[name] = _abi.CODECS[codec]
        else:
            wanted = ", ".join(_abi.CODECS)
            raise ValueError(f"{name} is {codec!r}, wanted one of {wanted}, or a signpost.Codec")
    return fields
