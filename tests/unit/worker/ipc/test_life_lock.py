"""A waiter for a lock's holder learns of its death, and of no other event."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from services.compute.ranks.segment import Segment
from services.worker.ipc.life_lock import LOCK_BYTES, LifeLock

PATIENCE_S = 30.0
_HOLDER = """
import sys, threading, time
from services.worker.ipc.life_lock import LifeLock
from services.compute.ranks.segment import Segment
from tests.unit.worker.ipc.dying import end_main_thread
LifeLock(Segment.attach(int(sys.argv[1]), int(sys.argv[2])), 64).hold()
print("held", flush=True)
if sys.stdin.readline() == "end\\n":
    end_main_thread()
"""


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create("test", 2 * LOCK_BYTES)
    LifeLock(segment, LOCK_BYTES).prepare()
    yield segment
    segment.close()


@pytest.fixture
def holder(segment: Segment) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _HOLDER, str(os.getpid()), str(segment.fd)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_killed_holder_gives_the_lock_up(segment: Segment, holder: subprocess.Popen[str]) -> None:
    lock = LifeLock(segment, LOCK_BYTES)
    assert not lock.wait_dead(0.05)
    os.kill(holder.pid, signal.SIGKILL)
    assert lock.wait_dead(PATIENCE_S)


def test_a_stopped_holder_keeps_the_lock(segment: Segment, holder: subprocess.Popen[str]) -> None:
    os.kill(holder.pid, signal.SIGSTOP)
    assert not LifeLock(segment, LOCK_BYTES).wait_dead(0.05)


def test_death_is_known_while_the_process_is_still_there(segment: Segment, holder: subprocess.Popen[str]) -> None:
    pidfd = os.pidfd_open(holder.pid)
    print("end", file=holder.stdin, flush=True)
    assert LifeLock(segment, LOCK_BYTES).wait_dead(PATIENCE_S)
    assert select.select([pidfd], [], [], 0) == ([], [], [])
    os.close(pidfd)


def test_a_lock_without_a_holder_is_an_error(segment: Segment) -> None:
    lock = LifeLock(segment, LOCK_BYTES)
    for _ in range(2):
        with pytest.raises(OSError, match="the lock was free"):
            lock.wait_dead(0.05)
