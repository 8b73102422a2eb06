"""The package and the benchmarks' peers pass mypy, strictly, with PyTorch's own types."""

import subprocess
import sys


def test_mypy_finds_nothing(tmp_path):
    mypy = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--config-file=client/python/tests/mypy.ini",
            f"--cache-dir={tmp_path}",
            "client/python/signpost",
            "client/python/benchmarks/peers.py",
            "client/python/benchmarks/transport.py",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert mypy.returncode == 0, mypy.stdout
