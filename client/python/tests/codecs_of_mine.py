"""Codecs of codec_test.py, as a user would have them in a module."""

import threading
import time

import numpy as np


class Signs:
    """A bit for each number, and one magnitude for all: what one-bit rounds send."""

    def block_bytes(self, elements):
        return 4 + (elements + 7) // 8

    def compress(self, values):
        scale = 1.35 * np.sqrt(np.mean(values.astype(np.float64) ** 2))
        bits = np.packbits(np.signbit(values), bitorder="little")
        return np.float32(min(scale, 2**60)).tobytes() + bits.tobytes()

    def decompress(self, block, elements):
        scale = float(np.frombuffer(block[:4], np.float32)[0])
        if not 0 <= scale <= 2**60:
            raise ValueError(f"a scale of {scale}")
        bits = np.unpackbits(np.frombuffer(block[4:], np.uint8), bitorder="little")
        return np.where(bits[:elements], -scale, scale)


class Fails(Signs):
    """One that does not take every number."""

    def compress(self, values):
        if np.abs(values).max() > 1.5:
            raise ValueError("numbers above 1.5")
        return super().compress(values)


class Hangs(Signs):
    """One whose process does not end by itself."""

    def compress(self, values):
        threading.Thread(target=time.sleep, args=[10_000]).start()
        raise ValueError("not today")
