"""Tokens through real processes: the same for any number of ranks."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from ryzanstein.v1.worker_pb2 import Sampling

from services.worker.process.rank_group import RanksFailedError
from services.worker.protocol.order_codec import AdapterOrder
from services.worker.protocol.plan import StepPlan
from services.worker.protocol.rank_config import SETTINGS_VARIABLE
from tests.integration.worker_ranks.conftest import MakeGroup, RankConversation, pids_of

PROMPTS = [[1, 2, 3], [4], list(range(5, 25)), [30, 31]]
SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=7)


def environment(pid: int) -> set[str]:
    return set(Path(f"/proc/{pid}/environ").read_text().split("\0"))


def assert_launched(of_ranks: list[int], parent: int) -> None:
    """Only several ranks have torchrun above them: with torch in it, it was a third of a worker's memory."""
    for rank, pid in enumerate(of_ranks):
        sizes = {f"WORLD_SIZE={len(of_ranks)}", f"LOCAL_WORLD_SIZE={len(of_ranks)}"}
        assert {f"RANK={rank}", f"LOCAL_RANK={rank}", *sizes} <= environment(pid)
    assert (parent == os.getpid()) is (len(of_ranks) == 1)
    assert len(of_ranks) == 1 or "libtorch" in Path(f"/proc/{parent}/maps").read_text()


async def test_single_rank_and_two_ranks_sample_the_same_tokens(make_group: MakeGroup) -> None:
    tokens = []
    for ranks in (1, 2):
        group = make_group(ranks)
        started = await group.start()
        assert [rank.rank for rank in started.ranks] == list(range(ranks))
        assert started.n_blocks == 1024 // 16
        assert list(started.ranks[0].phases) == [
            "launch",
            "import",
            "rendezvous",
            "weights",
            "kv_cache",
            "warm_up",
        ]
        assert started.ranks[0].memory.kv == (64 + 1) * 16 * 16 * 4
        *of_ranks, parent = pids_of(started)
        assert_launched(of_ranks, parent)
        tokens.append(await RankConversation(group, PROMPTS, SAMPLED).run(10))
        assert await group.load_adapter(AdapterOrder(0, "/adapter")) == "/adapter: no slots for adapters"
        await group.stop()
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 1


@pytest.mark.parametrize("ranks", [1, 2])
async def test_group_tells_once_that_all_its_ranks_have_their_weights(make_forked_group: MakeGroup, ranks: int) -> None:
    group, stages = make_forked_group(ranks), list[str]()
    group.on_warming = lambda: stages.append("warming")
    for _ in range(2):
        await group.start()
        stages.append("ready")
        assert stages == ["warming", "ready"]
        stages.clear()
    await group.sleep(1)
    await group.wake()
    assert not stages, "a wake on a CPU computes no first steps"


async def test_results_can_be_iterated(make_forked_group: MakeGroup) -> None:
    group = make_forked_group(1)
    await group.start()
    group.submit(StepPlan(0))
    group.submit(StepPlan(1))
    with pytest.raises(ValueError, match="2 plans are in flight already, max_in_flight is 2"):
        group.submit(StepPlan(2))
    results = group.results()
    assert [(await anext(results)).step for _ in range(2)] == [0, 1]
    assert group.in_flight == 0


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_rank_that_cannot_even_start_is_reported(make_group: MakeGroup, ranks: int) -> None:
    group = make_group(ranks, rank_module="tests.integration.worker_ranks.no_such_module")
    with pytest.raises(RanksFailedError, match=r"No module named .*no_such_module"):
        await group.start()


def ranks_marked(mark: str) -> set[Path]:
    """The live ranks that inherited the mark; other tests start ranks at the same time."""
    actual = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            environ = path.read_bytes()
            if SETTINGS_VARIABLE.encode() in environ and mark.encode() in environ:
                actual.add(path)
    return actual


async def test_a_start_that_takes_too_long_is_given_up(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STARTED_BY", str(tmp_path))
    group = make_group(start_timeout_s=0.5)
    with pytest.raises(RanksFailedError, match=r"ranks \[0, 1\] not ready within 0.5 s"):
        await group.start()
    assert not ranks_marked(str(tmp_path))
