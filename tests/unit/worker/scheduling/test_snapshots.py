"""Prefixes of models with states are continued from snapshots at ends of blocks, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
from ryzanstein.v1.worker_pb2 import Attention, Sampling

from services.worker.protocol.plan import StepPlan
from services.worker.scheduling.request import Request
from tests.unit.worker.scheduling.fake_ranks import generate
from tests.unit.worker.scheduling.harness import Harness

PROMPT = [token % 97 for token in range(150)]


def harness(snapshots: int = 8, **options: Any) -> Harness:
    return Harness(has_state=True, snapshots=snapshots, max_running=4, **options)


def served(runner: Harness, prompt: list[int]) -> int:
    """Serve a request to its end; returns its tokens that came from the cache."""
    request = runner.submit(prompt)
    runner.drain()
    assert runner.answers[request] == generate(prompt, 4, request.sampling)
    return request.cached_tokens


def test_same_prompt_continues_at_its_last_whole_block() -> None:
    runner = harness()
    assert [served(runner, PROMPT) for _ in range(2)] == [0, 144]


def test_following_turn_continues_where_the_prompt_before_ended() -> None:
    runner = harness()
    served(runner, PROMPT)
    assert served(runner, [*PROMPT, 1, 2, 3, *PROMPT[:40]]) == 144


@pytest.mark.parametrize(("shared", "cached"), [(130, 128), (143, 128), (127, 0)])
def test_other_prompt_continues_at_a_multiple_of_the_spacing(shared: int, cached: int) -> None:
    runner = harness()
    assert runner.scheduler.config.n_blocks * 16 // 8 == 128  # tokens from snapshot to snapshot
    served(runner, PROMPT)
    assert served(runner, [*PROMPT[:shared], 96, 95, 94]) == cached


def test_least_recently_used_snapshot_is_replaced() -> None:
    runner = harness(snapshots=2)
    prompts = [[first, *PROMPT[:60]] for first in (1, 2, 3)]
    assert [served(runner, prompts[index]) for index in (0, 1, 0, 2, 0, 1)] == [0, 0, 48, 0, 48, 0]


def test_without_snapshots_no_block_is_reused() -> None:
    runner = harness(snapshots=0)
    assert [served(runner, PROMPT) for _ in range(2)] == [0, 0]


def test_snapshot_of_a_cancelled_request_waits_for_its_blocks() -> None:
    runner = harness(snapshots=1)
    request = runner.submit(PROMPT)
    plan = runner.plan()
    assert isinstance(plan, StepPlan)
    assert [save.row for save in plan.saves] == [4]
    runner.scheduler.cancel(request)
    runner.drain()
    assert [served(runner, PROMPT) for _ in range(2)] == [0, 144]


@pytest.mark.parametrize(
    ("copy_tokens", "spacing", "cached"),
    [(0, 128, 144), (1, 128, 144), (7, 256, 144), (33, 2048, 144), (71, 4096, 144), (72, 4096, 0)],
)
def test_spacing_and_ends_follow_the_measured_cost_of_a_copy(copy_tokens: int, spacing: int, cached: int) -> None:
    """Copies take a 32nd of a long prompt at most, and two take no longer than the tokens that a snapshot saves."""
    runner = harness(snapshot_s=0.5)
    snapshots = runner.scheduler.transfers.snapshots
    assert snapshots is not None
    snapshots.adapt(2.0 * copy_tokens)
    assert snapshots.spacing == spacing
    assert [served(runner, PROMPT) for _ in range(2)] == [0, cached]


def test_snapshot_is_not_replaced_during_a_copy() -> None:
    runner = harness(snapshots=1)
    served(runner, PROMPT[:60])
    snapshots = runner.scheduler.transfers.snapshots
    assert snapshots is not None
    digest = runner.submit(PROMPT[:60]).digests[2]
    assert snapshots.hold(digest) == 4
    assert served(runner, [1, *PROMPT[:60]]) == 0
    assert digest in snapshots
    snapshots.release(digest)
    assert served(runner, [1, *PROMPT[:60]]) == 0
    assert digest not in snapshots


@pytest.mark.parametrize(
    ("attention", "cached"), [(Attention(), 0), (Attention(window=5), 48), (Attention(pages=9), 48)]
)
def test_generated_tokens_of_narrowed_attention_take_no_snapshot(attention: Attention, cached: int) -> None:
    """No other request may begin with their state: that of another prompt stays."""
    runner = harness(snapshots=2, n_blocks=16)
    served(runner, PROMPT[:60])
    runner.submit([96, *PROMPT[:59]], 100, sampling=Sampling(attention=attention))
    runner.drain()
    assert served(runner, PROMPT[:60]) == cached


def test_resumed_text_of_narrowed_attention_takes_the_snapshot_of_its_prompt() -> None:
    runner, narrowed = harness(), Sampling(attention=Attention(pages=9))
    text = PROMPT[:60] + generate(PROMPT[:60], 80, narrowed)
    runner.scheduler.submit(Request(text, 60, narrowed, max_tokens=90))
    plan = runner.plan()
    assert plan is not None
    assert [save.position for save in plan.saves] == [48]


@pytest.mark.parametrize("n_others", [1, 9], ids=["only its state", "all of it"])
def test_evicted_prefix_comes_back_with_its_state(n_others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = harness(snapshots=1, kept_blocks=(500,))
    assert runner.kept is not None
    monkeypatch.setattr(runner.kept.random, "random", lambda: 0.0)  # no load breaks off
    assert served(runner, PROMPT) == 0
    for seed in range(1, n_others + 1):
        runner.kept.end()
        assert served(runner, [(token + seed) % 97 for token in PROMPT]) == 0
    runner.kept.end()
    n_blocks = runner.kept.n_loaded
    assert served(runner, PROMPT) == 144
    assert runner.kept.states.n_loaded == 1
    assert runner.kept.n_loaded - n_blocks == (0 if n_others == 1 else 9)
