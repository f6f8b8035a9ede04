"""Prefixes of models with states are continued from snapshots at ends of blocks, and nowhere else."""

from __future__ import annotations

import pytest

from services.worker.protocol.plan import StepPlan
from tests.unit.worker.scheduling.fake_ranks import generate
from tests.unit.worker.scheduling.harness import Harness

PROMPT = [token % 97 for token in range(150)]


def harness(snapshots: int = 8, **sizes: int) -> Harness:
    return Harness(has_state=True, snapshots=snapshots, max_running=4, **sizes)


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
