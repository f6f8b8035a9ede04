"""A coordinator that follows the events holds what the worker holds."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from ryzanstein.v1 import worker_pb2 as pb

from services.common.blockhash import wire_chain
from tests.integration.worker_server.conftest import RunningWorker
from tests.integration.worker_server.gateway import FakeGateway, until


class Subscriber:
    """The smallest coordinator."""

    def __init__(self, gateway: FakeGateway, request: pb.KvSyncRequest) -> None:
        self.held: set[int] = set()
        self.below: defaultdict[int, set[int]] = defaultdict(set)  # by place below the device
        self.next_seq = -1
        self.resets = 0
        self.incarnation = ""
        self._stream = gateway.stub.KvSync(request)
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for message in self._stream:
            self.incarnation = message.incarnation
            if message.reset:
                self.held.clear()
                self.below.clear()
                self.resets += 1
            else:
                assert self.next_seq in (-1, message.first_seq), "a gap"
            for event in message.events:
                if event.cleared:
                    self.held.clear()
                assert not self.held & set(event.stored)
                self.held |= set(event.stored)
                assert self.held >= set(event.removed)
                self.held -= set(event.removed)
                self.below[event.place] |= set(event.offloaded)
                assert self.below[event.place] >= set(event.dropped)
                self.below[event.place] -= set(event.dropped)
            self.next_seq = message.first_seq + len(message.events)

    async def holds(self, hashes: set[int]) -> None:
        await until(lambda: self.held == hashes or self._task.done())
        assert self.held == hashes

    async def holds_below(self, place: int, n_blocks: int) -> None:
        await until(lambda: len(self.below[place]) >= n_blocks or self._task.done())
        assert len(self.below[place]) >= n_blocks

    def stop(self) -> None:
        self._stream.cancel()


async def test_live_events_a_replay_and_a_dump_agree(worker: RunningWorker) -> None:
    prompt = list(range(64))
    async with FakeGateway(worker.address) as gateway:
        await gateway.wait_serving()
        card = await gateway.stub.GetModelCard(pb.GetModelCardRequest())
        live = Subscriber(gateway, pb.KvSyncRequest())
        answer = await gateway.complete(prompt, max_tokens=40)
        known = set(wire_chain(card.hash_root, "", [*prompt, *answer.ids][:-1]))
        await live.holds(known)
        assert live.resets == 1

        dump = Subscriber(gateway, pb.KvSyncRequest())
        await dump.holds(known)
        replay = Subscriber(gateway, pb.KvSyncRequest(incarnation=card.incarnation, next_seq=0))
        await replay.holds(known)
        assert (dump.resets, replay.resets) == (1, 0)
        empty = Subscriber(gateway, pb.KvSyncRequest(incarnation=card.incarnation, next_seq=replay.next_seq))
        await until(lambda: empty.next_seq == replay.next_seq)  # nothing was missed, and that is said
        assert not empty.held
        empty.stop()

        # More prompts than the pool of 64 blocks holds: evictions also reach every subscriber.
        for i in range(12):
            await gateway.complete([i] * 100, max_tokens=30)
        subscribers = (live, dump, replay)
        await until(lambda: len({subscriber.next_seq for subscriber in subscribers}) == 1)
        assert live.held == dump.held == replay.held
        assert not live.held >= known
        for subscriber in subscribers:
            subscriber.stop()


async def test_an_unknown_incarnation_or_sequence_gets_a_dump(worker: RunningWorker) -> None:
    async with FakeGateway(worker.address) as gateway:
        await gateway.wait_serving()
        await gateway.complete(list(range(40)))
        card = await gateway.stub.GetModelCard(pb.GetModelCardRequest())
        for request in (
            pb.KvSyncRequest(incarnation="another", next_seq=0),
            pb.KvSyncRequest(incarnation=card.incarnation, next_seq=10**6),
        ):
            subscriber = Subscriber(gateway, request)
            await subscriber.holds(set(wire_chain(card.hash_root, "", list(range(32)))))
            assert subscriber.resets == 1
            subscriber.stop()


async def test_lost_ranks_clear_the_cache(worker: RunningWorker) -> None:
    async with FakeGateway(worker.address) as gateway:
        await gateway.wait_serving()
        subscriber = Subscriber(gateway, pb.KvSyncRequest())
        await gateway.complete(list(range(40)))
        await until(lambda: subscriber.held)
        worker.group.die()
        await subscriber.holds(set())
        subscriber.stop()
