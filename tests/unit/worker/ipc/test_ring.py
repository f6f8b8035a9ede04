"""Every reader sees every message once, in order, whole - whatever the sizes and however slow it is."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.compute.ranks import futex
from services.compute.ranks.futex import Counter, Patience
from services.compute.ranks.segment import Segment
from services.worker.ipc.ring import RingCorruptedError, RingReader, RingWriter, ring_bytes

CAPACITY = 512
NOW = Patience(spin_s=0.0)


def make_ring(readers: int, capacity: int = CAPACITY) -> tuple[Segment, RingWriter, list[RingReader]]:
    segment = Segment.create("test", 64 + ring_bytes(capacity, readers))
    writer = RingWriter(segment, 64, capacity, readers)
    return segment, writer, [RingReader(segment, 64, capacity, readers, i) for i in range(readers)]


@given(
    st.integers(1, 3),
    st.lists(st.one_of(st.binary(max_size=220), st.integers(0, 2)), max_size=60),
)
def test_messages_arrive_whole_and_in_order(n_readers: int, script: list[bytes | int]) -> None:
    """A script of writes (bytes) and reads (reader index) against a list as the model."""
    _, writer, readers = make_ring(n_readers)
    sent: list[bytes] = []
    seen = [0] * n_readers
    for action in script:
        if isinstance(action, bytes):
            if writer.try_write(action):
                sent.append(action)
            else:
                assert min(seen) < len(sent)  # an empty ring always has room
        else:
            index = action % n_readers
            message = readers[index].try_read()
            if message is None:
                assert seen[index] == len(sent)
            else:
                assert message == sent[seen[index]]
                seen[index] += 1
    for index, reader in enumerate(readers):
        assert [bytes(m) for m in iter(reader.try_read, None)] == sent[seen[index] :]


def test_largest_message_fits_at_every_position() -> None:
    _, writer, (reader,) = make_ring(1)
    for offset in range(0, CAPACITY, 8):
        assert writer.try_write(b"x" * (offset % 64))
        assert reader.try_read() is not None
        assert writer.try_write(b"y" * writer.largest_message)
        assert reader.try_read() == b"y" * writer.largest_message


def test_messages_arrive_where_stores_are_not_kept_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, "_STRONGLY_ORDERED", False)  # barriers stand around each cursor
    _, writer, (reader,) = make_ring(1)
    for number in range(100):
        assert writer.try_write(b"%d" % number)
        assert reader.wait(0, NOW)
        assert reader.try_read() == b"%d" % number
    assert not reader.wait(0, NOW)


def test_a_word_outside_of_memory_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad address"):
        futex.sleep_while(0, 0, 1.0)


def test_too_large_a_message_is_refused() -> None:
    _, writer, _ = make_ring(1)
    with pytest.raises(ValueError, match="exceeds the ring's limit"):
        writer.try_write(b"x" * (writer.largest_message + 1))


def test_corruption_is_noticed() -> None:
    segment, writer, (reader,) = make_ring(1)
    writer.try_write(b"hello")
    segment.view[64 + 2 * 64] ^= 1  # the sequence number of the first frame
    with pytest.raises(RingCorruptedError):
        reader.try_read()


def test_two_processes_wake_one_after_the_other() -> None:
    """Ping-pong between processes that find the segment through /proc, sleeping in the kernel in between."""
    rounds = 300
    segment = Segment.create("test", 128)
    owner = os.getpid()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            mine = Segment.attach(owner, segment.fd)
            ping, pong = Counter(mine, 0), Counter(mine, 64)
            for i in range(1, rounds + 1):
                assert ping.wait_reach(i, 10.0, NOW)
                pong.store(i)
            status = 0
        finally:
            os._exit(status)
    ping, pong = Counter(segment, 0), Counter(segment, 64)
    for i in range(1, rounds + 1):
        ping.store(i)
        assert pong.wait_reach(i, 10.0, NOW)
    assert os.waitpid(child, 0)[1] == 0


def test_waiting_ends_after_the_timeout_without_burning_the_core() -> None:
    _, _, (reader,) = make_ring(1)
    wall, cpu = time.perf_counter(), time.thread_time()
    assert not reader.wait(0.3, Patience(spin_s=0.001))
    assert time.perf_counter() - wall > 0.29
    assert time.thread_time() - cpu < 0.05


def test_a_sleeping_reader_is_woken() -> None:
    _, writer, (reader,) = make_ring(1)
    timer = threading.Timer(0.1, lambda: writer.try_write(b"late"))
    timer.start()
    assert reader.wait(100.0, NOW)
    assert reader.try_read() == b"late"
    timer.join()


def test_the_file_system_stays_empty() -> None:
    segment, _, _ = make_ring(2)
    name = str(Path(f"/proc/self/fd/{segment.fd}").readlink())
    assert name.startswith("/memfd:")
    assert name.endswith("(deleted)")
