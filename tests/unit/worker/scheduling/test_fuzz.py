"""Random traffic against every invariant. RYZANSTEIN_FUZZ_STEPS=100000 for the long run."""

from __future__ import annotations

import os
import random
from functools import partial

import pytest
from ryzanstein.v1.worker_pb2 import Sampling

from services.common.blockhash import HASH_BLOCK_TOKENS, chain_root, extend_chain
from services.worker.engine.errors import TooLongError
from services.worker.engine.output import Finish
from services.worker.scheduling.prefill_budget import PrefillBudget
from services.worker.scheduling.request import Request
from services.worker.scheduling.speculation import DraftCost
from services.worker.scheduling.transfers import Arrival, Pin
from tests.unit.worker.scheduling.fake_ranks import generate
from tests.unit.worker.scheduling.harness import Guesses, Harness, cache_of

STEPS = int(os.environ.get("RYZANSTEIN_FUZZ_STEPS", "10000"))
SEEDS = range(8)


class FuzzTraffic:
    """Clients that share prefixes, cancel, resume, and ask for too much; workers that fetch and send blocks."""

    def __init__(self, seed: int, *, keeps: bool) -> None:
        self.random = random.Random(seed)
        choice = self.random.choice
        max_running = choice([1, 4, 16])
        snapshots = choice([0, 0, 1, 20])
        self.harness = Harness(
            share_min_tokens=choice([1, 32, 10_000]),
            n_blocks=choice([6, 20, 60]),
            block_tokens=choice([16, 32]),
            max_model_len=choice([100, 200]),
            max_running=max_running,
            max_batched_tokens=choice([max_running, 40, 500]),
            share_max_steps=choice([2, 64]),
            kept_events=10**7,
            kept_blocks=(choice([5, 30, 500]), choice([5, 100, 500])) if keeps else (),
            rng=self.random,
            speculation=choice([False, True, True]) and not snapshots,
            has_state=snapshots > 0,
            snapshots=snapshots,
        )
        self.harness.scheduler.speculator.most_running = max_running
        self.harness.scheduler.speculator.cost = choice([DraftCost(1.0, 0.01), DraftCost(1.0, 0.3)])
        self.harness.scheduler.prefill_budget = PrefillBudget(choice([5, 100, 10_000]), choice([0.0, 0.001, 1.0]))
        self.prefixes = [[self.random.randrange(97) for _ in range(150)] for _ in range(3)]
        self.cancelled: set[Request] = set()
        self.expected: dict[Request, list[int]] = {}
        self.pulls: list[tuple[Request, Arrival, int]] = []  # and the blocks on their way into the ranks
        self.pins: list[Pin] = []

    def submit(self) -> None:
        rng = self.random
        prompt = rng.choice(self.prefixes)[: rng.randrange(150)]
        prompt = prompt + [rng.randrange(97) for _ in range(rng.randrange(1, 20))]
        max_tokens = rng.choice([0, 1, 2, 30, 60])
        sampling = Sampling(
            seed=rng.randrange(3),
            stop_token_ids=(5, 6, 7) if rng.random() < 0.5 else (),
            prompt_logprobs=1 if rng.random() < 0.1 else None,
        )
        try:
            request = self.harness.submit(
                prompt,
                max_tokens,
                sampling=sampling,
                tenant=rng.choice("abc"),
                priority=rng.choice([0, 0, 0, 1, -1]),
                embed=rng.random() < 0.05,
                cacheable=rng.random() < 0.95,
                deferred=(deferred := rng.random() < 0.2),
            )
        except TooLongError:
            return
        if deferred:
            self.expect(request)
        n = 0 if request.embed else request.limit - len(prompt)
        self.expected[request] = generate(prompt, n, sampling)
        if request.drafts is not None:
            request.drafts.drafters = [Guesses(self.expected[request], request.n_prompt, rng)]

    def expect(self, request: Request) -> None:
        """A request was told that another worker holds its beginning."""
        transfers = self.harness.scheduler.transfers
        arrival = transfers.expect(request, self.random.randrange(200)) if request.reads_cache else None
        if arrival is None:
            self.harness.scheduler.requeue(request)
        else:
            self.pulls.append((request, arrival, 0))

    def transfer(self) -> None:
        """Some blocks arrive or are used, a pull ends well or breaks off, somebody reads or has read."""
        rng, scheduler = self.random, self.harness.scheduler
        if self.pulls and rng.random() < 0.7:
            request, arrival, written = self.pulls.pop(rng.randrange(len(self.pulls)))
            scheduler.adopt(arrival, written)
            if rng.random() < 0.3 or not arrival.fresh:
                scheduler.transfers.finish(arrival)
                scheduler.requeue(request)
                return
            written = rng.randrange(len(arrival.fresh) + 1)
            self.harness.write(arrival, request, written)
            self.pulls.append((request, arrival, written))
        elif self.pins and rng.random() < 0.5:
            scheduler.transfers.unpin(self.pins.pop(rng.randrange(len(self.pins))))
        elif rng.random() < 0.5:
            self.take_copy()
        else:
            digests = extend_chain(chain_root("test"), rng.choice(self.prefixes))
            per_block = self.harness.config.block_tokens // HASH_BLOCK_TOKENS
            if (pin := scheduler.transfers.pin(digests[per_block - 1 :: per_block])) is not None:
                self.pins.append(pin)

    def take_copy(self) -> None:
        """Another worker sends blocks of a request that it runs, as to its standby."""
        prefix, size = self.random.choice(self.prefixes), self.harness.config.block_tokens
        copied = Request(list(prefix), len(prefix), Sampling(), chain_root=chain_root("test"))
        copied.extend_digests()
        digests = copied.block_digests(size, 0, self.random.randrange(len(prefix) // size + 1))
        hashes_of = partial(copied.block_hashes, size)
        if (arrival := self.harness.scheduler.transfers.expect_prefix(digests, hashes_of)) is not None:
            self.pulls.append((copied, arrival, 0))

    def end_transfers(self) -> None:
        while self.pulls or self.pins:
            self.transfer()

    def keep(self) -> None:
        """Blocks go to the place below the pool or come back."""
        if self.harness.kept is not None:
            self.harness.kept.work()

    def cancel(self) -> None:
        alive = [r for r in self.harness.answers if r not in self.harness.ended and r not in self.cancelled]
        if alive:
            request = self.random.choice(alive)
            assert self.harness.scheduler.cancel(request)
            assert not self.harness.scheduler.cancel(request)
            self.cancelled.add(request)

    def move(self) -> None:
        roll = self.random.random()
        if roll < 0.25 and self.harness.scheduler.n_waiting < 30:
            self.submit()
        elif roll < 0.28:
            self.cancel()
        elif roll < 0.38:
            self.transfer()
        elif roll < 0.65:
            self.harness.plan()
        elif roll < 0.75:
            self.keep()
        elif self.harness.in_flight:
            self.harness.apply()

    def end_well(self) -> None:
        """Everybody ends exactly once, with the tokens that the request alone would have got."""
        self.end_transfers()
        while not self.harness.scheduler.idle or self.harness.in_flight:
            self.harness.step()
            self.keep()
        if self.harness.kept is not None:
            self.harness.kept.end()
        self.harness.drain()
        for request, expected in self.expected.items():
            answer = self.harness.answers[request]
            if request in self.cancelled:
                assert request not in self.harness.ended
                assert answer == expected[: len(answer)]
            else:
                finish = self.harness.ended[request]
                assert answer == expected
                assert (finish is Finish.EMBEDDED) == request.embed
                assert (finish is Finish.STOP) == (bool(answer) and answer[-1] in request.end_token_ids)
        self.expected.clear()
        self.harness.answers.clear()
        self.harness.ended.clear()
        self.cancelled.clear()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("keeps", [False, True], ids=["device", "all-places"])
@pytest.mark.timeout(600 + STEPS // 20)
def test_random_traffic_breaks_no_invariant(seed: int, keeps: bool) -> None:
    traffic = FuzzTraffic(seed, keeps=keeps)
    scheduler = traffic.harness.scheduler
    for step in range(STEPS // len(SEEDS)):
        traffic.move()
        if step % 7 == 0:
            scheduler.check()
        if step % 500 == 499:
            traffic.end_well()
            traffic.harness.events.flush()
            assert cache_of(traffic.harness.events) == set(scheduler.pool.hashes())
            for store in traffic.harness.kept.stores if traffic.harness.kept else ():
                assert cache_of(traffic.harness.events, store.place) == set(store.hashes())
    traffic.end_well()
    assert scheduler.pool.used == 0
    assert len(scheduler.transfers) == 0
    assert scheduler.counters.generated_tokens > 0
    assert traffic.harness.kept is None or all(each.totals.stored_bytes for each in traffic.harness.kept.stores)
    if scheduler.config.speculation and scheduler.config.max_running > 1:
        assert scheduler.counters.proposed_tokens["guesses"] > scheduler.counters.accepted_tokens["guesses"] > 0
