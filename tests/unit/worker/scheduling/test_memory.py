"""Blocks: who gets them, who gives them back, what is evicted first, what is refused."""

from __future__ import annotations

import random

import pytest
from ryzanstein.v1.worker_pb2 import Sampling

from services.worker.engine.errors import TooLongError
from services.worker.engine.kv_events import KvEvent, KvEventLog
from services.worker.scheduling.block_pool import BlockPool
from services.worker.scheduling.preemption import MAX_PREEMPTIONS
from tests.unit.worker.scheduling.fake_ranks import generate
from tests.unit.worker.scheduling.harness import Harness


def chain(*names: str) -> list[tuple[bytes, tuple[int, ...]]]:
    return [(name.encode(), (int.from_bytes(name.encode()),)) for name in names]


def store(pool: BlockPool, *names: str) -> list[int]:
    """A request computes the blocks of a prefix that it does not find, and holds them all."""
    table = pool.match(digest for digest, _ in chain(*names))
    pool.share(table)
    table += pool.allocate(len(names) - len(table))
    for index, (digest, hashes) in enumerate(chain(*names)):
        assert pool.publish(table[index], table[index - 1] if index else 0, digest, hashes)
    return table


def test_eviction_takes_the_oldest_leaf_and_never_a_parent_before_its_child() -> None:
    log = KvEventLog()
    pool = BlockPool(5, 16, log)
    pool.release(store(pool, "a", "ab", "abc"))
    pool.release(store(pool, "a", "ax"))
    log.flush()
    names = {int.from_bytes(name.encode()): name for name in ("a", "ab", "abc", "ax")}
    evicted = []
    for _ in range(5):
        pool.allocate(1)
        log.flush()
    for event in log.since(0) or []:
        evicted += [names[value] for value in event.removed]
    assert evicted == ["abc", "ab", "ax", "a"]
    assert pool.available == 0


def test_a_block_on_a_private_parent_stays_private() -> None:
    pool = BlockPool(8, 16, KvEventLog())
    first = store(pool, "a")
    twin, child = pool.allocate(2)
    (a, ab) = chain("a", "ab")
    assert not pool.publish(twin, 0, *a), "the canonical block is in use"
    assert not pool.publish(child, twin, *ab)
    pool.release(first)
    assert pool.publish(twin, 0, *a), "an unused canonical block is replaced"
    assert pool.publish(child, twin, *ab)
    pool.check([[twin, child]])


def test_the_log_replays_its_events_and_reports_its_gaps() -> None:
    log = KvEventLog(capacity=2)
    for value in range(4):
        log.stored([value])
        log.flush()
    assert log.since(1) is None
    assert log.since(2) == [KvEvent(stored=(2,)), KvEvent(stored=(3,))]
    assert log.since(4) == []
    assert log.since(5) is None
    log.stored([8])
    log.stored([9])
    log.removed([8, 9])
    log.flush()
    assert log.since(4) == [KvEvent(stored=(8, 9)), KvEvent(removed=(9, 8))]


def test_preempted_requests_answer_like_undisturbed_requests() -> None:
    harness = Harness(n_blocks=12, max_running=8)
    sampling = Sampling(seed=5)
    requests = [harness.submit([i] * 20, 60, sampling=sampling, tenant=str(i % 2)) for i in range(8)]
    harness.drain()
    assert harness.scheduler.counters.preemptions > 0
    assert max(request.n_preempted for request in requests) <= MAX_PREEMPTIONS
    for i, request in enumerate(requests):
        assert harness.answers[request] == generate([i] * 20, 60, sampling)


@pytest.mark.parametrize(("seed", "kept_blocks"), [(0, ()), (1, ()), (0, (200,))])
def test_full_pool_under_load_causes_few_preemptions(seed: int, kept_blocks: tuple[int, ...]) -> None:
    """Above 85 % use, with requests of unknown lengths waiting all the time, work is not done twice."""
    rng, n_requests = random.Random(seed), 60
    sizes = {"n_blocks": 100, "max_running": 16, "max_batched_tokens": 256, "max_model_len": 600}
    harness = Harness(kept_blocks=kept_blocks, rng=rng, **sizes)
    scheduler, requests, use = harness.scheduler, [], []
    while len(requests) < n_requests:
        while scheduler.n_waiting < 4:
            prompt = [rng.randrange(97) for _ in range(rng.randrange(20, 200))]
            requests.append(harness.submit(prompt, rng.randrange(20, 250), tenant=rng.choice("abc")))
        harness.step()
        if harness.kept is not None:
            harness.kept.work()
        use.append(scheduler.pool.used / scheduler.pool.total)
    harness.drain()
    counters = scheduler.counters
    assert sum(use) / len(use) > 0.85
    assert counters.preemptions > 0, "the pool was not full"
    assert counters.preemptions < n_requests / 2
    computed, known = counters.prefill_tokens, sum(len(request.token_ids) for request in requests)
    assert computed - sum(request.n_prompt for request in requests) < 0.2 * known


def test_the_youngest_request_of_the_most_served_tenant_gives_way() -> None:
    harness = Harness(n_blocks=8, max_running=8)
    greedy = [harness.submit([i] * 20, 70, tenant="greedy") for i in range(3)]
    modest = harness.submit([9] * 20, 60, tenant="modest")
    harness.drain()
    assert modest.n_preempted == 0
    assert greedy[0].n_preempted <= greedy[-1].n_preempted
    assert greedy[-1].n_preempted > 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field", "most"),
    [(64, 0, None, None), (65, 0, "prompt_ids", 64), (30, 36, "sampling.max_tokens", 35), (30, 35, None, None)],
)
def test_a_request_larger_than_an_empty_pool_is_rejected_with_the_largest_size(
    prompt: int, max_tokens: int, field: str | None, most: int | None
) -> None:
    harness = Harness(n_blocks=4)
    assert harness.scheduler.capacity.max_request_tokens == 65
    if field is None:
        request = harness.submit([1] * prompt, max_tokens)
        harness.drain()
        assert len(harness.answers[request]) == (max_tokens or 1)
        return
    with pytest.raises(TooLongError, match=f"at most {most}") as refused:
        harness.submit([1] * prompt, max_tokens)
    assert refused.value.field == field
    assert harness.scheduler.idle


def test_output_ends_at_the_context_of_the_model() -> None:
    harness = Harness(max_model_len=100)
    request = harness.submit([1] * 90, 500)
    harness.drain()
    assert len(harness.answers[request]) == 10


def test_lost_ranks_leave_the_scheduler_empty() -> None:
    harness = Harness(n_blocks=30, max_running=4)
    requests = [harness.submit([i] * 50, 20) for i in range(9)]
    for _ in range(5):
        harness.step()
    harness.plan()
    assert set(harness.scheduler.abandon()) == set(requests)
    assert harness.scheduler.idle
    assert harness.scheduler.pool.available == 30
    harness.scheduler.check()
    assert not any(harness.scheduler.cancel(request) for request in requests)
