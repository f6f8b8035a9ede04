"""Look-ups of a router at the coordinator, with real processes and with coordinators that do not answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest
from ryzanstein.v1 import kv_pb2, kv_pb2_grpc, worker_pb2

from services.cli import status
from services.kv_coordinator.settings import CoordinatorSettings
from tests.integration.router.conftest import RouterRig, ask
from tests.integration.router.fake_worker import FakeWorker
from tests.integration.router.processes import coordinator_process, router_process, until


async def test_the_coordinators_call_is_open_before_the_first_request(fleet: RouterRig) -> None:
    """Opening it takes longer than a lookup may: the first requests would go without, and the breaker would open."""

    class Silent(kv_pb2_grpc.KvCoordinatorServicer):
        opened = asyncio.Event()

        async def Lookup(  # noqa: N802
            self, messages: AsyncIterator[kv_pb2.LookupRequests], context: object
        ) -> AsyncIterator[kv_pb2.LookupResponses]:
            self.opened.set()
            async for _ in messages:
                yield kv_pb2.LookupResponses()

    server, silent = grpc.aio.server(), Silent()
    kv_pb2_grpc.add_KvCoordinatorServicer_to_server(silent, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await fleet.router(workers=0, COORDINATOR_ADDRESS=f"127.0.0.1:{port}")
    async with asyncio.timeout(60):
        await silent.opened.wait()
    await server.stop(None)


async def test_cached_prefixes_attract_until_the_coordinator_dies(fleet: RouterRig) -> None:
    chain = list(range(1, 100))
    for i in range(3):
        await fleet.worker(f"w{i}")
    holder = await fleet.worker("holder", queued_prefill_tokens=500)
    holder.store(chain[:64])
    coordinator = coordinator_process(fleet.redis_server.url_of("coordinator"))
    # On a shared machine 25 ms may pass for any reason.
    router = await fleet.router(workers=4, COORDINATOR_ADDRESS=coordinator.address, LOOKUP_TIMEOUT_MS="5000")
    request = ask(prompt_tokens=1600, block_hashes=chain)

    async def known() -> bool:
        return any(c.matched_tokens == 1024 for c in (await router.Explain(request)).candidates)

    await until(known)
    assert (await router.Route(request)).worker_id == "holder"
    coordinator.kill()
    placed = await router.Route(request)
    assert placed.worker_id != "holder"
    assert not any(c.matched_tokens for c in placed.decision.candidates)


async def test_coordinators_that_divide_the_workers_are_all_asked_and_one_may_be_away(
    fleet: RouterRig, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = list(range(1, 65))
    names = [f"w{i}" for i in range(8)]
    for name in names:
        (await fleet.worker(name)).store(chain)
    url = fleet.redis_server.url_of("coordinator")
    shards = [coordinator_process(url, COORDINATOR_SHARD=str(n), COORDINATOR_SHARDS="2") for n in range(2)]
    addresses = [shard.address for shard in shards]
    process = fleet.process(
        router_process(
            fleet.redis_server.url_of("router"), COORDINATOR_ADDRESS=",".join(addresses), LOOKUP_TIMEOUT_MS="5000"
        )
    )
    router = await fleet.stub(process)
    request = ask(prompt_tokens=1600, block_hashes=chain)

    async def holders(expected: Sequence[str]) -> bool:
        candidates = (await router.Explain(request)).candidates
        return sorted(c.worker_id for c in candidates if c.matched_tokens == 1024) == list(expected)

    await until(lambda: holders(names))
    await asyncio.to_thread(status.show, process.address, addresses, as_json=True)
    index = json.loads(capsys.readouterr().out)["kv_coordinator"]
    assert (int(index["entries"]), len(index["workers"])) == (8 * len(chain), 8)
    shards[0].kill()
    of_second = [name for name in names if CoordinatorSettings(coordinator_shard=1, coordinator_shards=2).follows(name)]
    assert 0 < len(of_second) < len(names)
    await until(lambda: holders(of_second))
    await asyncio.to_thread(status.show, process.address, addresses, as_json=False)
    assert "1 of 2 do not answer" in capsys.readouterr().out
    shards[1].kill()


async def test_worker_of_a_moved_session_gets_a_pull_hint_to_the_cache(fleet: RouterRig) -> None:
    chain = list(range(1, 101))
    moving = {"prefill_tokens_per_s": 1000, "kv_bytes_per_token": 50_000}
    free = await fleet.worker("free", pull_bytes_per_s=1e9, **moving)
    holder = await fleet.worker("holder", queued_prefill_tokens=20_000, **moving)
    holder.store(chain)
    coordinator = coordinator_process(fleet.redis_server.url_of("coordinator"))
    router = await fleet.router(workers=2, COORDINATOR_ADDRESS=coordinator.address, LOOKUP_TIMEOUT_MS="5000")
    request = ask(prompt_tokens=1700, block_hashes=chain)

    async def known() -> bool:
        return any(c.matched_tokens for c in (await router.Explain(request)).candidates)

    await until(known)
    placed = await router.Route(request)
    assert placed.worker_id == "free"
    hint = worker_pb2.PullHint(
        worker_id="holder", incarnation=holder.incarnation, address=holder.address, tokens=len(chain) * 16
    )
    assert placed.pull == hint
    assert next(c for c in placed.decision.candidates if c.worker_id == "free").pulled_tokens == 1600
    free.update(pull_bytes_per_s=1e7)  # the link is slower than computing

    async def computed() -> bool:
        return not (await router.Explain(request)).candidates[0].pulled_tokens

    await until(computed)
    placed = await router.Route(request)
    assert placed.worker_id == "free"
    assert not placed.HasField("pull")
    coordinator.kill()


async def test_router_reads_answers_by_numbers_of_its_roster_and_by_names(fleet: RouterRig) -> None:
    """A coordinator that restarts has other numbers; one of the revision before names workers."""
    one, two = await fleet.worker("one"), await fleet.worker("two")

    def roster(version: int, *workers: FakeWorker) -> kv_pb2.Roster:
        places = [kv_pb2.WorkerPlace(worker_id=each.worker_id, incarnation=each.incarnation) for each in workers]
        return kv_pb2.Roster(version=version, places=places)

    depth = kv_pb2.WorkerDepth(worker_id="two", incarnation=two.incarnation, blocks=2)
    held = [kv_pb2.HeldPrefix(blocks=3, places=b"\x01")]
    steps = [  # the version that the router names, the answer, matched tokens of the two
        (0, kv_pb2.LookupResponse(held=held, roster=roster(7, one, two)), (48, 0)),
        (7, kv_pb2.LookupResponse(held=held), (48, 0)),
        (7, kv_pb2.LookupResponse(held=held, roster=roster(8, two, one)), (0, 48)),
        (8, kv_pb2.LookupResponse(held=held), (0, 48)),
        (8, kv_pb2.LookupResponse(depths=[depth]), (0, 32)),
    ]

    class Scripted(kv_pb2_grpc.KvCoordinatorServicer):
        def __init__(self) -> None:
            self.named: list[int] = []

        async def Lookup(  # noqa: N802
            self, messages: AsyncIterator[kv_pb2.LookupRequests], context: object
        ) -> AsyncIterator[kv_pb2.LookupResponses]:
            async for message in messages:
                for request in message.requests:
                    _, answer, _ = steps[len(self.named)]
                    self.named.append(request.roster)
                    answer.tag = request.tag
                    yield kv_pb2.LookupResponses(responses=[answer])

    server, scripted = grpc.aio.server(), Scripted()
    kv_pb2_grpc.add_KvCoordinatorServicer_to_server(scripted, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    router = await fleet.router(workers=2, COORDINATOR_ADDRESS=f"127.0.0.1:{port}", LOOKUP_TIMEOUT_MS="30000")
    for _, _, matched in steps:
        candidates = (await router.Explain(ask(prompt_tokens=100, block_hashes=[1, 2, 3]), timeout=60)).candidates
        actual = {each.worker_id: each.matched_tokens for each in candidates}
        assert (actual["one"], actual["two"]) == matched
    assert scripted.named == [version for version, _, _ in steps]
    await server.stop(None)


async def test_a_stalled_coordinator_costs_its_time_out_and_not_the_request(fleet: RouterRig) -> None:
    class Stalled(kv_pb2_grpc.KvCoordinatorServicer):
        calls = 0

        async def Lookup(  # noqa: N802
            self, messages: AsyncIterator[kv_pb2.LookupRequests], context: object
        ) -> AsyncIterator[kv_pb2.LookupResponses]:
            async for message in messages:
                self.calls += len(message.requests)
            yield kv_pb2.LookupResponses()

    server, stalled = grpc.aio.server(), Stalled()
    kv_pb2_grpc.add_KvCoordinatorServicer_to_server(stalled, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await fleet.worker("only")
    router = await fleet.router(workers=1, COORDINATOR_ADDRESS=f"127.0.0.1:{port}")
    for _ in range(20):
        placed = await router.Route(ask(block_hashes=[1, 2, 3]), timeout=60)
        assert placed.decision.candidates[0].matched_tokens == 0
    assert stalled.calls < 20, "after 50 ms of time-outs it is left alone"
    await server.stop(None)
