#!/usr/bin/env python3
"""Whether objects of nvcc's have kernels for the GPUs that we promise.

    architectures.py FILE.cu.o...

Each of their fatbins must have machine code for compute 8.0 (A100) and 9.0 (H100, H200), and PTX of
which the driver makes later GPUs'. Reads what cuobjdump --list-elf --list-ptx would say, which is not
everywhere where nvcc is: a fatbin is a header of 16 bytes (magic, version, its own size, the size of
what follows) and parts, each with a header (what it is, its own size at 4, the part's size at 8, its
architecture at 28).
"""

import struct
import sys
from pathlib import Path

WANTED = {("machine code", 80), ("machine code", 90), ("PTX", 90)}
KINDS = {1: "PTX", 2: "machine code"}
MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)


def fatbins_of(content):
    """The (kind, architecture) of each part, for each fatbin."""
    begin = content.find(MAGIC)
    while begin >= 0:
        parts = set()
        at = begin + 16
        end = at + struct.unpack_from("<Q", content, begin + 8)[0]
        while at < end:
            kind, header_bytes, bytes_ = struct.unpack_from("<HxxIQ", content, at)
            architecture = struct.unpack_from("<I", content, at + 28)[0]
            parts.add((KINDS.get(kind, f"kind {kind}"), architecture))
            at += header_bytes + bytes_
        yield parts
        begin = content.find(MAGIC, end)


def main(paths):
    wrong = 0
    for path in paths:
        fatbins = list(fatbins_of(Path(path).read_bytes()))
        for parts in fatbins or [set()]:
            if WANTED <= parts:
                continue
            wrong += 1
            said = ", ".join(f"{kind} for {arch}" for kind, arch in sorted(parts)) or "nothing"
            print(f"{path} has {said}, wanted {sorted(WANTED)}", file=sys.stderr)
    return int(wrong > 0 or not paths)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
