"""Codecs of codec_test.py, as a user would have them in a module."""

import multiprocessing
import signal
import subprocess
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


class StopsOthers(Signs):
    """One that starts processes, and stops them: programs, and one that is only forked."""

    def block_bytes(self, elements):
        stops = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM]
        stops = [stop for stop in stops if signal.getsignal(stop) != signal.SIG_IGN]  # by nohup
        programs = [subprocess.Popen(["sleep", "20"]) for _ in stops]
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=[20])
        forked.start()
        forked.terminate()
        for stop, program in zip(stops, programs):
            program.send_signal(stop)
        forked.join()
        ended_by = [-process.wait() for process in programs] + [-forked.exitcode]
        if ended_by != [*stops, signal.SIGTERM]:
            raise ValueError(f"ended by {ended_by}")
        return super().block_bytes(elements)
