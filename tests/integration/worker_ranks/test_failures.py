"""A rank that dies, stops, hangs or errs is named, its group is gone at once, and a fresh one can be started."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from services.worker.process import rank_group_run
from services.worker.process.failure import FailureKind
from services.worker.process.rank_group import RankFailure, RankGroup, RanksFailedError
from services.worker.protocol.order_codec import AdapterOrder
from services.worker.protocol.plan import Chunk, StepPlan
from tests.integration.worker_ranks.conftest import MakeGroup, RankConversation, alive, pids_of, wait_gone
from tests.unit.common.containers import groups_v1
from tests.unit.worker.rank import standin

PROMPTS = [[1, 2, 3], [4]]
NOTICED_S = 60.0  # promised is about one second; the machine may be busy with other things


async def failure_of(group: RankGroup) -> RankFailure:
    async with asyncio.timeout(NOTICED_S):
        return await group.wait_failed()


async def test_a_group_starts_again_after_a_stop_and_after_deaths(make_group: MakeGroup) -> None:
    """Of an idle rank, which is named, and of the launcher. In one: each start imports torch in three processes."""
    group = make_group()
    pids = pids_of(await group.start())
    expected = await RankConversation(group, PROMPTS).run(3)
    await group.stop()
    await wait_gone(pids)
    with pytest.raises(RanksFailedError):
        group.submit(StepPlan(0))

    pids = pids_of(await group.start())
    assert await RankConversation(group, PROMPTS).run(3) == expected
    os.kill(pids[1], signal.SIGSTOP)
    loading = asyncio.create_task(group.load_adapter(AdapterOrder(0, "/adapter")))
    await asyncio.sleep(0)
    os.kill(pids[1], signal.SIGKILL)
    failure = await failure_of(group)
    assert (failure.rank, failure.kind, failure.signal) == (1, FailureKind.EXITED, signal.SIGKILL)
    assert "rank 1" in await group.wait_lost()
    with pytest.raises(RanksFailedError, match="rank 1"):
        await loading
    with pytest.raises(RanksFailedError, match="rank 1"):
        await group.load_adapter(AdapterOrder(0, "/adapter"))
    with pytest.raises(RanksFailedError, match="rank 1"):
        group.submit(StepPlan(9))
    await wait_gone(pids)

    pids = pids_of(await group.start())
    talk = RankConversation(group, PROMPTS)
    assert await talk.run(3) == expected
    talk.submit()
    os.kill(pids[-1], signal.SIGKILL)
    failure = await failure_of(group)
    # The launcher's parent, or the first process of a container, may reap a rank before its status is read.
    assert re.search(f"SIGKILL|status {-signal.SIGKILL}|exit status unknown", failure.detail), failure.detail
    await wait_gone(pids)


async def test_a_rank_without_its_main_thread_is_noticed_and_ended(make_group: MakeGroup) -> None:
    group = make_group(1, model="misbehave", stall_timeout_s=60.0)
    (pid,) = pids_of(await group.start())[:1]
    RankConversation(group, [[1, standin.DIE_SLOWLY]]).submit()
    async with asyncio.timeout(NOTICED_S):
        assert await group.wait_lost() == f"rank 0: process {pid} is dying"
    failure = await failure_of(group)
    assert (failure.rank, failure.kind, failure.signal) == (0, FailureKind.EXITED, signal.SIGKILL)
    await wait_gone([pid])


@pytest.mark.parametrize("pending", [True, False])
async def test_a_stopped_rank_is_named_with_and_without_work(make_forked_group: MakeGroup, pending: bool) -> None:
    group = make_forked_group(1)
    pids = pids_of(await group.start())[:1]
    talk = RankConversation(group, PROMPTS)
    await talk.run(2)
    os.kill(pids[0], signal.SIGSTOP)
    if pending:
        talk.submit()
    failure = await failure_of(group)
    assert (failure.rank, failure.kind) == (0, FailureKind.STALLED)
    assert "stopped by a signal" in failure.detail
    assert ("without work" in failure.detail) is not pending
    await wait_gone(pids)


@pytest.mark.parametrize(
    ("ranks", "token", "detail"),
    [
        (2, standin.HANG, "sleeps without a heartbeat"),  # and the other one waits for it
        (1, standin.SPIN, "busy without a heartbeat"),
    ],
)
async def test_rank_without_a_heartbeat_is_named(
    make_forked_group: MakeGroup, ranks: int, token: int, detail: str
) -> None:
    group = make_forked_group(ranks, model="misbehave", busy_timeout_s=1.0)
    pids = pids_of(await group.start())[:ranks]
    RankConversation(group, [[1, token]]).submit()
    failure = await failure_of(group)
    assert (failure.rank, failure.kind) == (ranks - 1, FailureKind.STALLED)
    assert detail in failure.detail
    await wait_gone(pids)


async def test_killed_rank_is_named(make_group: MakeGroup) -> None:
    group = make_group(1, model="misbehave")
    pids = pids_of(await group.start())[:1]
    RankConversation(group, [[1, standin.KILL_SELF]]).submit()
    failure = await failure_of(group)
    assert (failure.rank, failure.kind) == (0, FailureKind.EXITED)
    assert "killed by SIGKILL" in failure.detail
    await wait_gone(pids)


def test_a_rank_that_meets_the_memory_limit_says_so() -> None:
    with groups_v1() as groups:
        (groups["memory"] / "memory.limit_in_bytes").write_text(str(900 << 20))
        command = [sys.executable, "-m", "tests.integration.worker_ranks.hungry", str(groups["memory"])]
        reported = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True).stdout
    assert "rank 0 exited: process " in reported
    assert "was killed by SIGKILL: the container's memory limit of 900 MiB was reached; lower RYZANSTEIN_KV" in reported


async def test_rank_reports_the_original_error_message_and_freezes_its_startup_objects(make_group: MakeGroup) -> None:
    """Without it, a full collection is a pause of 0.1 s in the middle of every stream. None walked what it imports."""
    group = make_group(1, model="misbehave")
    await group.start()
    RankConversation(group, [[1, standin.RAISE]]).submit()
    failure = await failure_of(group)
    assert failure.kind is FailureKind.ERROR
    words, _, reported = failure.detail.partition(standin.HEAP_TOLD)
    assert "RuntimeError: the stand-in was told to raise" in words
    frozen, collections = map(int, reported.split()[:2])
    assert frozen > 10_000
    assert collections < 100, "imports alone are followed by four hundred"


async def test_ranks_that_disagree_about_a_collective_are_stopped(make_forked_group: MakeGroup) -> None:
    group = make_forked_group(model="misbehave")
    pids = pids_of(await group.start())[:2]
    RankConversation(group, [[1, standin.SKIP_COLLECTIVE]]).submit()
    failure = await failure_of(group)
    assert "at step 0, collective 1 rank" in failure.detail
    await wait_gone(pids)


async def test_unjoined_collective_blames_the_missing_rank(make_forked_group: MakeGroup) -> None:
    group = make_forked_group(model="misbehave", collective_timeout_s=3.0, stall_timeout_s=30.0)
    await group.start()
    RankConversation(group, [[1, standin.HANG]]).submit()
    failure = await failure_of(group)
    assert (failure.rank, failure.kind) == (1, FailureKind.ERROR)
    assert "rank 0 waited 3 s at step 0, collective 1: rank 1 is at start-up" in failure.detail


async def test_a_malformed_plan_is_reported_with_a_traceback(make_forked_group: MakeGroup) -> None:
    group = make_forked_group(1)
    pids = pids_of(await group.start())[:1]
    group.submit(StepPlan(0, chunks=(Chunk(3, 0, 1, True),)))
    failure = await failure_of(group)
    assert failure.kind is FailureKind.ERROR
    assert "slot 3's chunk [0, 1) covers a token that is not known" in failure.detail
    assert "Traceback" in failure.traceback
    assert "Traceback" not in failure.detail, "the detail is one line, for people"
    await wait_gone(pids)


async def test_a_slow_step_is_no_failure(make_forked_group: MakeGroup) -> None:
    """Computing for longer than the stall time-out, without a collective, is work; a stop does not wait for its end.

    So is a load of an adapter whose files come slowly.
    """
    group = make_forked_group(1, model="misbehave", stall_timeout_s=0.3, stop_grace_s=0.05)
    pids = pids_of(await group.start())[:1]
    talk = RankConversation(group, [[1, standin.COMPUTE]])
    talk.submit()
    await talk.result()
    assert group.in_flight == 0
    computing = group.signs
    assert computing >= 3, "each look at a step of a second finds a sign of life"
    loading = asyncio.create_task(group.load_adapter(AdapterOrder(0, standin.SLOW_ADAPTER)))
    await asyncio.sleep(0)
    talk.submit()
    await talk.result()
    assert await loading == ""
    talk.submit()
    await group.stop()
    await wait_gone(pids)


async def test_wake_that_takes_too_long_ends_the_ranks(make_forked_group: MakeGroup) -> None:
    group = make_forked_group(1)
    pids = pids_of(await group.start())[:1]
    await group.sleep(1)
    group.config = replace(group.config, start_timeout_s=0.0)
    with pytest.raises(RanksFailedError, match=r"not awake within 0 s \(RYZANSTEIN_START_TIMEOUT_S\)"):
        await group.wake()
    assert (await failure_of(group)).kind is FailureKind.STALLED
    await wait_gone(pids)


async def test_a_killed_server_leaves_no_process(tmp_path: Path) -> None:
    """Of a launcher's; a single rank is in tests/e2e/test_first_light.py."""
    ranks, pid_file = 2, tmp_path / "pids"
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.integration.worker_ranks.server", str(pid_file), str(ranks)
    )
    try:
        async with asyncio.timeout(120):
            while not pid_file.exists():  # noqa: ASYNC110 - a file of another process
                await asyncio.sleep(0.05)
        pids = [int(pid) for pid in pid_file.read_text().split()]
        assert len(alive(pids)) == ranks + 1
    finally:
        server.kill()
        await server.wait()
    await wait_gone(pids)


async def test_group_fails_when_a_watch_raises(make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that nothing watches could hang for ever."""

    def fail(pids: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(rank_group_run, "find_stopped", fail)
    monkeypatch.setattr(rank_group_run, "_IDLE_LOOK_S", 0.01)
    group = make_group(1)
    pids = pids_of(await group.start())[:1]
    failure = await failure_of(group)
    assert failure.detail == "the task rank-progress has failed: ZeroDivisionError()"
    await wait_gone(pids)
