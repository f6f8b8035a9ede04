"""Followers run their ranks for as long as their leader does, and the leader notices when one is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest

from services.common.lifecycle import StartupError
from services.common.ports import free_port
from services.common.tasks import end_tasks
from services.worker.engine.process_info import ProcessInfo
from services.worker.settings import WorkerSettings
from services.worker.vllm import follower as of_follower
from services.worker.vllm.follower import Follower
from services.worker.vllm.nodes import Node, NodeRendezvous, node_of


def settings(worker_id: str, **chosen: object) -> WorkerSettings:
    return WorkerSettings(**{"model": "m", "worker_id": worker_id, "engine": "vllm", "nodes": 2, **chosen})


def test_the_pods_of_a_stateful_set_form_workers() -> None:
    actual = [node_of(settings(f"rz-workers-huge-{ordinal}", node_service="rz.svc")) for ordinal in range(4)]
    leaders = ("rz-workers-huge-0.rz.svc", "rz-workers-huge-2.rz.svc")
    assert actual == [Node(2, rank, leader) for leader in leaders for rank in (0, 1)]
    assert node_of(settings("rz-1", nodes=1)) is None
    native = settings("w-0", engine="native")
    for wrong, named in ((settings("worker"), "RYZANSTEIN_WORKER_ID worker"), (native, "RYZANSTEIN_NODES 2")):
        with pytest.raises(StartupError, match=named):
            node_of(wrong)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110  # nothing tells when
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    actual = ProcessInfo.read(pid)
    return actual is not None and actual.state != "Z"


@asynccontextmanager
async def following(rank: int, port: int, tmp_path) -> AsyncGenerator[Callable[[], list[int]], None]:
    """A follower whose ranks write down their process id and sleep; yields the ids so far."""
    file = tmp_path / f"ranks-{rank}"
    file.touch()
    command = ["sh", "-c", f"echo $$ >> {file}; exec sleep 600"]
    follower = Follower(Node(3, rank, "127.0.0.1"), command, {}, port)
    task = asyncio.create_task(follower.run())
    try:
        yield lambda: [int(line) for line in file.read_text().split()]
    finally:
        await end_tasks([task])


async def test_ranks_end_with_their_leader_and_a_lost_follower_is_noticed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(of_follower, "_PAUSE_S", 0.02)
    port, reported = free_port(), list[str]()
    rendezvous = NodeRendezvous(3, port)
    async with asyncio.timeout(120), following(1, port, tmp_path) as first:
        gathering = asyncio.create_task(rendezvous.gather(reported.append))
        await until(lambda: reported[-1:] == ["waiting for nodes 2"])
        assert first() == []  # no node begins before all are there
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"7\n")  # no follower of this worker
        async with following(2, port, tmp_path) as second:
            await gathering
            await until(lambda: len(first()) == len(second()) == 1)
            # The leader starts anew: all ranks end, and come again.
            before = first() + second()
            rendezvous.dismiss()
            await rendezvous.gather(reported.append)
            await until(lambda: len(first()) == len(second()) == 2)
            assert not any(map(alive, before))
            # Ranks die: the leader hears of it, though the follower comes again.
            os.kill(second()[-1], signal.SIGKILL)
            assert await rendezvous.wait_lost() == "node 2 is lost"
            rendezvous.dismiss()
            await rendezvous.gather(reported.append)
            await until(lambda: (len(first()), len(second())) == (3, 3))
            lost = asyncio.create_task(rendezvous.wait_lost())
        assert await lost == "node 2 is lost"
        assert not alive(second()[-1])
    rendezvous.dismiss()
    writer.close()
