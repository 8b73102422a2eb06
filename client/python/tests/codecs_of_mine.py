"""Codecs of codec_test.py, as a user would have them in a module."""

import numpy as np


class Signs:
    """One bit for each number and their mean magnitude: signSGD's, with error feedback."""

    def block_bytes(self, elements):
        return 4 + (elements + 7) // 8

    def compress(self, values):
        scale = np.abs(values).mean(dtype=np.float32)
        return scale.tobytes() + np.packbits(values < 0, bitorder="little").tobytes()

    def decompress(self, block, elements):
        scale = np.frombuffer(block[:4], np.float32)[0]
        if not 0 <= scale <= 2**60:
            raise ValueError(f"a scale of {scale}")
        bits = np.unpackbits(np.frombuffer(block[4:], np.uint8), bitorder="little")
        return np.where(bits[:elements], -scale, scale)
