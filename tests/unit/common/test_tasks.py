"""Loops of services: no end of one goes unnoticed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from services.common import tasks
from services.common.lifecycle import GaveUpError
from services.common.tasks import retried, running_loops

SERVICE = """
import asyncio
from services.common.lifecycle import run_service
from services.common.settings import ServiceSettings
from services.common.tasks import running_loops

async def follow_routes():
    raise ValueError("a value that cannot be read")

async def serve(settings, stop):
    async with running_loops(stop, follow_routes()):
        await stop.wait()

run_service("test", ServiceSettings, serve)
"""


async def endless() -> None:
    await asyncio.Event().wait()


async def raising() -> None:
    raise ValueError("a value that cannot be read")


async def returning() -> None:
    pass


async def losing_a_call() -> None:
    """A call of gRPC that is cancelled by its channel raises this."""
    raise asyncio.CancelledError


@pytest.mark.parametrize("ending", [raising, returning, losing_a_call])
async def test_service_stops_when_a_loop_ends(
    ending: Callable[[], Coroutine[Any, Any, None]], caplog: pytest.LogCaptureFixture
) -> None:
    stop, name = asyncio.Event(), getattr(ending, "__name__", "")
    with pytest.raises(GaveUpError, match=f"the loop {name} has ended"):  # noqa: PT012
        async with asyncio.timeout(60), running_loops(stop, endless(), ending()):
            await stop.wait()
            (record,) = caplog.records
            assert name in record.message
            assert bool(record.exc_info) == (ending is not returning)


async def test_loops_may_return_once_the_service_stops(caplog: pytest.LogCaptureFixture) -> None:
    stop = asyncio.Event()

    async def until_stop() -> None:
        await stop.wait()

    async with running_loops(stop, until_stop(), endless()) as (first, second):
        stop.set()
        await first
        assert not second.done()
    assert second.cancelled()
    assert not caplog.records


def test_process_ends_with_status_1_and_a_reason_when_a_loop_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", SERVICE], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    last = (ended.stdout + ended.stderr).splitlines()[-1]
    assert "giving up: the loop follow_routes has ended: ValueError('a value that cannot be read')" in last


async def test_retried_loop_runs_again_after_a_logged_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "RETRY_S", 0.0)
    stop, runs = asyncio.Event(), 0

    async def once_wrong() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            await raising()
        stop.set()
        await endless()

    async with asyncio.timeout(60), running_loops(stop, retried(once_wrong)):
        await stop.wait()
    (record,) = caplog.records
    assert record.exc_info
