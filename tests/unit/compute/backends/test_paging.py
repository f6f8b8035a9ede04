"""A process that moves its memory to a disk goes on with the same contents, and so do its threads."""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile

import pytest

from services.compute.backends.cpu import paging
from services.compute.backends.cpu.backend import HostMemory

_IN_MEMORY = "/dev/shm"

# Threads compute, wait for a lock, wait in the kernel for bytes, and start and end, while memory moves three times.
_PROGRAM = """
import hashlib, os, queue, sys, threading
from pathlib import Path
from services.compute.backends.cpu.paging import page_out

def own():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) // 1024

values = {n: os.urandom(3000) for n in range(16_000)}
digest = lambda: hashlib.sha256(b"".join(values.values())).hexdigest()
ending, counted, lent, served = threading.Event(), [0, 0], queue.Queue(), queue.Queue()
readable, writable = os.pipe()

def count(place):
    while not ending.is_set():
        counted[place] += 1
        served.put(bytearray(counted[place] % 5000))
        served.get()

def begin():
    while not ending.is_set():
        thread = threading.Thread(target=lambda: bytearray(100_000))
        thread.start()
        thread.join()

def echo():
    while text := os.read(readable, 20_000):
        lent.put(text)

threads = [threading.Thread(target=count, args=(place,)) for place in range(2)]
threads += [threading.Thread(target=begin), threading.Thread(target=echo)]
for thread in threads:
    thread.start()
before, expected = own(), digest()
for turn in range(3):
    page_out()
    print(before, own())
    seen = list(counted)
    while min(now - then for now, then in zip(counted, seen)) < 2:
        threading.Event().wait(0.01)
    text = os.urandom(10_000)
    os.write(writable, text)
    assert lent.get() == text
    assert digest() == expected
    values[turn] = values[turn][::-1]  # a part of the pages is the process's own again
    expected = digest()
ending.set()
os.close(writable)
for thread in threads:
    thread.join()
"""


def test_memory_moves_to_a_disk_and_comes_back_unchanged_while_threads_run() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        before, after = map(int, line.split())
        assert before > 48
        assert after < before - 40, "MiB of its own"
    assert len(done.stdout.splitlines()) == 3


def test_process_keeps_its_memory_where_all_folders_are_in_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", _IN_MEMORY)
    monkeypatch.setattr(paging, "_ON_DISK", _IN_MEMORY)
    with pytest.raises(OSError, match="TMPDIR has to name a folder on a disk") as refused:
        paging.page_out()
    assert refused.value.errno == errno.EOPNOTSUPP
    HostMemory().rest()
    assert "keeps its memory while it sleeps" in caplog.text


_FULL = """
import errno, hashlib, os, resource
from services.compute.backends.cpu import paging

values = [os.urandom(3000) for n in range(16_000)]
expected = hashlib.sha256(b"".join(values)).digest()
paging._ROOM = 0
resource.setrlimit(resource.RLIMIT_FSIZE, (10 << 20, resource.RLIM_INFINITY))
try:
    paging.page_out()
except OSError as error:
    assert error.errno == errno.EFBIG, error
else:
    raise SystemExit("the file is larger than a file may be")
assert hashlib.sha256(b"".join(values)).digest() == expected
"""


def test_file_that_cannot_grow_is_an_error_and_changes_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", _FULL], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
