"""Prefixes that are not computed twice."""

from __future__ import annotations

import random

import pytest
from ryzanstein.v1.worker_pb2 import Attention, Sampling

from services.worker.scheduling.request import Request
from tests.unit.worker.scheduling.fake_ranks import generate
from tests.unit.worker.scheduling.harness import Harness

PREFIX = [i % 97 for i in range(160)]


class PrefixPrompt(random.Random):
    """Every load goes on, and brings all of its blocks at once."""

    def random(self) -> float:
        return 0.4

    def randrange(self, stop: int) -> int:
        return stop - 1


def wave(harness: Harness, n: int = 8) -> list:
    return [harness.submit([*PREFIX, 1, i], 4) for i in range(n)]


def test_a_first_wave_computes_its_shared_prefix_once() -> None:
    harness = Harness(n_blocks=200)
    requests = wave(harness)
    harness.drain()
    assert harness.scheduler.counters.prefill_tokens == 162 + 7 * 2
    for i, request in enumerate(requests):
        assert harness.answers[request] == generate([*PREFIX, 1, i], 4, Sampling())


def test_prefix_waiters_wait_for_shared_blocks_only() -> None:
    """The producer's own 90 tokens come after the shared 160: no request waits for those."""
    harness = Harness(n_blocks=200, max_batched_tokens=64)
    producer = harness.submit([*PREFIX, *[7] * 90], 4)
    waiter = harness.submit([*PREFIX, 3], 1)
    harness.drain()
    assert waiter.cached_tokens == 160
    assert list(harness.ended) == [waiter, producer]


def test_a_prefix_shorter_than_the_wait_is_worth_is_computed_again() -> None:
    harness = Harness(n_blocks=200, share_min_tokens=161)
    wave(harness)
    harness.step()
    assert harness.scheduler.n_waiting == 0
    harness.drain()
    assert harness.scheduler.counters.prefill_tokens == 8 * 162


def test_when_the_producer_is_cancelled_a_prefix_waiter_produces() -> None:
    harness = Harness(n_blocks=200, max_batched_tokens=64)
    producer, *waiters = wave(harness)
    harness.plan()
    assert harness.scheduler.n_waiting == 7
    harness.scheduler.cancel(producer)
    harness.drain()
    assert set(harness.ended) == set(waiters)
    # The first 64 rows were the producer's; what it had written by then is not computed again.
    assert harness.scheduler.counters.prefill_tokens <= 64 + 162 + 6 * 2


def test_a_prefix_waiter_gives_up_waiting_in_the_end() -> None:
    harness = Harness(n_blocks=200, max_batched_tokens=16, max_running=16, share_max_steps=3)
    wave(harness, 2)
    for _ in range(5):
        harness.step()
    assert harness.scheduler.n_running == 2
    harness.drain()


def test_the_last_prompt_token_is_always_computed() -> None:
    harness = Harness()
    prompt = PREFIX[:64]
    harness.submit(prompt, 3)
    harness.drain()
    again = harness.submit(prompt, 3)
    harness.drain()
    assert again.cached_tokens == 48
    assert harness.answers[again] == generate(prompt, 3, Sampling())


def test_a_fully_repeated_prompt_and_its_continuation_stay_reusable() -> None:
    """The recomputed last block replaces the cached one, so what follows it can be published."""
    harness = Harness()
    prompt = PREFIX[:64]
    harness.submit(prompt, 1)
    harness.drain()
    first = harness.submit(prompt, 40)
    harness.drain()
    conversation = [*prompt, *harness.answers[first], 5, 5]
    turn = harness.submit(conversation, 2)
    harness.drain()
    assert turn.cached_tokens == 96


@pytest.mark.parametrize("fields", [{"sampling": Sampling(prompt_logprobs=0)}, {"embed": True}])
def test_requests_that_must_see_every_position_take_no_hits_but_leave_blocks(fields: dict[str, object]) -> None:
    harness = Harness()
    harness.submit(PREFIX[:64], 2)
    harness.drain()
    request = harness.submit(PREFIX[:80], 2, **fields)
    harness.drain()
    assert request.cached_tokens == 0
    assert harness.scheduler.counters.prefill_tokens == 64 + 80
    last = harness.submit(PREFIX[:90], 2)
    harness.drain()
    assert last.cached_tokens == 80


def test_tenants_with_different_salts_share_no_blocks() -> None:
    harness = Harness()
    harness.submit(PREFIX[:64], 2)
    harness.drain()
    other = harness.submit(PREFIX[:64], 2, chain_root=b"another root of 32 bytes.........")
    harness.drain()
    assert other.cached_tokens == 0


@pytest.mark.parametrize("attention", [Attention(window=5), Attention(pages=9)])
def test_generated_blocks_of_narrowed_attention_are_not_shared(attention: Attention) -> None:
    """Their KV differs from that of prompts; a dense text with the same tokens and a resume compute them."""
    harness = Harness(n_blocks=200)
    narrowed = Sampling(attention=attention)
    first = harness.submit(PREFIX[:40], 60, sampling=narrowed)
    harness.drain()
    text = first.token_ids[:90]
    dense = harness.submit(text, 4)
    harness.drain()
    assert dense.cached_tokens == 32
    resumed = Request(list(text), 40, narrowed, max_tokens=60, chain_root=dense.chain_root)
    harness.scheduler.submit(resumed)
    assert harness.scheduler.transfers.expect(resumed, 90) is None, "all blocks of its prompt are cached"
    assert harness.plan() is not None
    assert resumed.cached_tokens == 32


def test_blocks_below_the_pool_are_loaded_by_all_sessions_that_wait_for_room() -> None:
    """The pool has room for one session at a time; a load before that would be evicted or not begin."""
    harness = Harness(n_blocks=16, kept_blocks=(500,), rng=PrefixPrompt())
    sessions = [[session, *PREFIX] for session in range(6)]
    for session in sessions:
        harness.submit(session[:130])
        harness.drain()
        harness.kept.end()
    later = [harness.submit([*session, *PREFIX[:20]]) for session in sessions]
    while not harness.scheduler.idle:
        harness.step()
        harness.kept.work()
    assert [request.cached_tokens for request in later] == [128] * len(sessions)
    assert harness.kept.stores[0].totals.evicted_blocks == 0
