"""A worker's server can give free memory back, whichever thread used it."""

from __future__ import annotations

import subprocess
import sys

from tests.commands import ROOT

SERVER = r"""
import re
import threading
from pathlib import Path

from services.common.heap import trim
from services.worker import main as worker


def held():
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) >> 10


def read():
    bytearray(30 << 20)  # once it is freed, glibc keeps free ends of heaps that are as large
    [b"x" * 50_000 for _ in range(500)]


def serve(*_):
    before = held()
    reader = threading.Thread(target=read)
    reader.start()
    reader.join()
    trim()
    print(held() - before)


worker.run_service = serve
worker.main()
"""


def test_free_memory_of_threads_is_given_back() -> None:
    """Of 24 MiB that a thread has freed."""
    served = subprocess.run(
        [sys.executable, "-c", SERVER], cwd=ROOT, check=True, capture_output=True, text=True, timeout=120
    )
    assert int(served.stdout) < 8
