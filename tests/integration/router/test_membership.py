"""Workers, Redis and routers come, go and fail."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from subprocess import PIPE, Popen

import grpc
import pytest
from ryzanstein.v1 import routing_pb2 as pb
from ryzanstein.v1 import routing_pb2_grpc, worker_pb2

from services.common.leases import LeaseTable, LeaseWatcher
from services.common.redis_client import RedisAccess
from services.gateway.upstream.router import RouterClient
from services.gateway.upstream.workers import WorkerList
from services.router.membership import SILENT_S
from services.router.sessions import SESSION_TTL_S
from tests.integration.router.conftest import RouterRig, ask, eligible, router_client, views
from tests.integration.router.processes import router_process, running, until


@contextmanager
def worker_process(worker_id: str, redis_url: str) -> Iterator[Popen[bytes]]:
    command = [sys.executable, "-m", "tests.integration.router.fake_worker", worker_id, redis_url]
    with Popen(command, stdout=PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
        process.kill()


async def test_starting_router_knows_the_workers_before_serving(fleet: RouterRig) -> None:
    """Killed routers start again under load: a request that comes at once must not hear that there are no workers."""
    await fleet.worker("here")
    await fleet.redis.client_pause(20_000, all=False)
    starting = asyncio.create_task(
        asyncio.to_thread(router_process, fleet.redis_server.url_of("router"), NAMESPACE=fleet.keys.namespace)
    )

    async def read_is_held() -> bool:
        clients = await fleet.redis.client_list()
        return sum(client["cmd"] == "evalsha" and "b" in client["flags"] for client in clients) == 2  # and the beat

    await until(read_is_held)
    await asyncio.sleep(0.2)  # long enough to listen, if it did not wait
    assert not starting.done()
    await fleet.redis.client_unpause()
    with running(await starting) as router:
        async with grpc.aio.insecure_channel(router.address) as channel:
            answer = await routing_pb2_grpc.RouterStub(channel).Route(ask("first"), timeout=120)
    assert answer.worker_id == "here"


async def test_killed_worker_gets_no_requests_long_before_its_lease_ends(fleet: RouterRig) -> None:
    await fleet.worker("alive", queued_prefill_tokens=9000)
    with worker_process("victim", fleet.redis_server.url_of("worker")) as process:
        router = await fleet.router(workers=2)
        assert (await router.Route(ask("before"))).worker_id == "victim"
        process.send_signal(signal.SIGKILL)
        process.wait()
        await until(lambda: eligible(router, 1))
        leases = await LeaseWatcher(fleet.redis, fleet.keys, RedisAccess(fleet.redis_server.url)).read()
        assert "victim" in leases, "the lease is still there"
        assert (await views(router))["victim"].why_not == "state stream broken"
        assert (await router.Route(ask("after"))).worker_id == "alive"


async def test_a_stopped_worker_is_found_by_its_silence_and_comes_back(fleet: RouterRig) -> None:
    with worker_process("victim", fleet.redis_server.url_of("worker")) as process:
        router = await fleet.router(workers=1)
        process.send_signal(signal.SIGSTOP)
        await until(lambda: eligible(router, 0))
        process.send_signal(signal.SIGCONT)
        await until(lambda: eligible(router, 1))


async def test_idle_worker_stays_eligible_with_its_last_reported_load(fleet: RouterRig) -> None:
    await fleet.worker("idle", queued_prefill_tokens=7)
    router = await fleet.router(workers=1)
    await asyncio.sleep(SILENT_S + 0.5)
    view = (await views(router))["idle"]
    assert view.eligible
    assert view.state.queued_prefill_tokens == 7
    assert not view.state.unchanged


async def test_without_redis_live_workers_are_kept_and_routers_agree_on_sessions(fleet: RouterRig) -> None:
    for i in range(4):
        await fleet.worker(f"w{i}")
    one, two = await fleet.router(workers=4), await fleet.router(workers=4)
    fleet.redis_server.kill()
    for i in range(12):
        here, there = await asyncio.gather(
            one.Route(ask(f"a{i}", session=f"s{i}")), two.Route(ask(f"b{i}", session=f"s{i}"))
        )
        assert here.decision.reason == there.decision.reason == "session hashed"
        assert here.worker_id == there.worker_id
    await asyncio.sleep(1.5)
    assert await eligible(one, 4)
    # Redis restarts empty: no worker is dropped before the workers have renewed their leases.
    fleet.redis_server.start()

    async def bound_again() -> bool:
        assert await eligible(one, 4)
        return (await one.Route(ask("c", session="s"))).decision.reason in ("session bound", "session kept")

    await until(bound_again)


async def test_a_stopped_redis_is_left_alone_after_a_few_time_outs(fleet: RouterRig) -> None:
    await fleet.worker("only")
    router = await fleet.router(workers=1, REDIS_TIMEOUT_MS="50")
    fleet.redis_server.signal(signal.SIGSTOP)
    placed = [await router.Route(ask(f"r{i}", session="s"), timeout=60) for i in range(20)]
    assert {p.decision.reason for p in placed} == {"session hashed"}
    fleet.redis_server.signal(signal.SIGCONT)

    async def bound() -> bool:
        return (await router.Route(ask("r", session="s"))).decision.reason != "session hashed"

    await until(bound)


async def test_sessions_stay_and_move_with_a_restart(fleet: RouterRig) -> None:
    workers = [await fleet.worker(f"w{i}") for i in range(3)]
    router = await fleet.router(workers=3)
    first = await router.Route(ask("r0", session="s", tenant="t"))
    assert first.decision.reason == "session bound"
    for i in range(1, 5):
        placed = await router.Route(ask(f"r{i}", session="s", tenant="t"))
        assert (placed.worker_id, placed.decision.reason) == (first.worker_id, "session kept")
    ttl = await fleet.redis.ttl(fleet.keys.session("t", "s"))
    assert SESSION_TTL_S - 100 < ttl <= SESSION_TTL_S
    assert (await views(router))[first.worker_id].sessions == 1
    worker = next(w for w in workers if w.worker_id == first.worker_id)
    # A restart: the same name, another incarnation, an empty cache and a queue.
    worker.incarnation = "restarted"
    worker.update(incarnation="restarted", queued_prefill_tokens=9000)

    async def restarted() -> bool:
        return (await views(router))[first.worker_id].state.incarnation == "restarted"

    await until(restarted)
    assert not (await views(router))[first.worker_id].sessions

    async def moved() -> bool:
        placed = await router.Route(ask("r9", session="s", tenant="t"))
        return placed.worker_id != first.worker_id

    await until(moved)


async def test_session_leaves_its_worker_when_overloaded(fleet: RouterRig) -> None:
    workers = {f"w{i}": await fleet.worker(f"w{i}") for i in range(2)}
    router = await fleet.router(workers=2)
    bound = (await router.Route(ask("r0", session="s"))).worker_id
    workers[bound].update(queued_prefill_tokens=100_000)

    async def rebound() -> bool:
        return (await router.Route(ask("r1", session="s"))).worker_id != bound

    await until(rebound)
    # The new binding holds although the old worker is idle again.
    workers[bound].update(queued_prefill_tokens=0)
    placed = await router.Route(ask("r2", session="s"))
    assert (placed.worker_id != bound, placed.decision.reason) == (True, "session kept")


async def race_for(session: str, fleet: RouterRig, *routers: routing_pb2_grpc.RouterStub) -> list[pb.RouteResponse]:
    """Every router has found the session unbound before the first one can bind it."""
    # Reading a binding prolongs it, which is a write: reads that wait here are all answered before anything that comes
    # later, so before any router has chosen.
    await fleet.redis.client_pause(60_000, all=False)
    placing = [router.Route(ask(f"{session}-{i}", session=session)) for i, router in enumerate(routers)]

    async def all_read() -> bool:
        clients = await fleet.redis.client_list()
        return sum(client["cmd"] == "getex" and "b" in client["flags"] for client in clients) == len(routers)

    await until(all_read)
    await fleet.redis.client_unpause()
    return await asyncio.gather(*placing)


async def test_two_routers_that_race_for_sessions_agree_at_once(fleet: RouterRig) -> None:
    for i in range(4):  # so fast that nothing but the bindings matters
        await fleet.worker(f"w{i}", prefill_tokens_per_s=1e9, decode_step_ms=0.001)
    one, two = [await fleet.router(workers=4, REDIS_TIMEOUT_MS="60000") for _ in range(2)]
    reasons = []
    for i in range(12):
        here, there = await race_for(f"s{i}", fleet, one, two)
        assert here.worker_id == there.worker_id, (here.decision.reason, there.decision.reason)
        # So much longer than all before that moving it would even nothing out, however the sessions lie.
        again = await two.Route(ask(f"again-{i}", session=f"s{i}", prompt_tokens=100 * 2**i))
        assert (again.worker_id, again.decision.reason) == (here.worker_id, "session kept")
        reasons += [here.decision.reason, there.decision.reason]
    # Ties are broken by a hash of the request, so that in some races both have chosen the same worker.
    assert set(reasons) == {"session bound", "session bound by another router"}


async def test_a_dead_workers_binding_is_replaced(fleet: RouterRig) -> None:
    workers = {f"w{i}": await fleet.worker(f"w{i}") for i in range(2)}
    router = await fleet.router(workers=2)
    bound = (await router.Route(ask("r0", session="s"))).worker_id
    await workers[bound].break_streams()
    await until(lambda: eligible(router, 1))
    placed = await router.Route(ask("r1", session="s"))
    assert (placed.worker_id != bound, placed.decision.reason) == (True, "session rebound")
    assert (await router.Route(ask("r2", session="s"))).decision.reason == "session kept"


async def test_an_unreadable_binding_is_replaced(fleet: RouterRig) -> None:
    await fleet.worker("only")
    router = await fleet.router(workers=1)
    await fleet.redis.set(fleet.keys.session("t", "s"), b"\xff not a binding")
    assert (await router.Route(ask("r0", session="s", tenant="t"))).decision.reason == "session bound"
    assert (await router.Route(ask("r1", session="s", tenant="t"))).decision.reason == "session kept"


class GatewayList:
    """The list of workers of a gateway's client."""

    def __init__(self, gateway: RouterClient) -> None:
        self.gateway = gateway

    async def wait(self, true: Callable[[WorkerList], bool]) -> None:
        async def reads() -> bool:
            listed = await self.gateway.list_workers()
            return listed is not None and true(listed)

        await until(reads)

    async def wait_view(self, true: Callable[[pb.WorkerView], bool]) -> None:
        """Wait for a worker that is new to the list."""
        assert not any(map(true, self.gateway.listed.views))
        await self.wait(lambda listed: any(map(true, listed.views)))

    async def wait_load(self, tokens: int) -> None:
        async def knows() -> bool:
            return tokens in {view.state.queued_prefill_tokens for view in await self.gateway.views() or ()}

        await until(knows)


async def test_gateway_gets_the_list_of_workers_again_only_when_the_list_has_changed(fleet: RouterRig) -> None:
    """Else a gateway's costs grow with workers that it does not use."""
    a, b = await fleet.worker("a"), await fleet.worker("b")
    services = [fleet.process(router_process(fleet.redis_server.url_of("router"))) for _ in range(2)]
    first, second = [await fleet.stub(service) for service in services]
    await until(lambda: eligible(first, 2))
    await until(lambda: eligible(second, 2))
    async with router_client([services[0].address], route_timeout_s=5.0, unknown_timeout_s=30.0) as gateway:
        list_of = GatewayList(gateway)
        await list_of.wait(lambda listed: listed.expected is not None)
        before = gateway.listed
        a.update(queued_prefill_tokens=9000)
        await list_of.wait_load(9000)
        assert await gateway.list_workers() is before, "it has no loads"
        a.update(phase=worker_pb2.PHASE_DRAINING)
        await list_of.wait_view(lambda view: view.state.phase == worker_pb2.PHASE_DRAINING)
        faults = [pb.Outcome(worker_id="b", incarnation=b.incarnation, result=pb.Outcome.RESULT_FAULT)] * 3
        await first.Report(iter([pb.Outcomes(outcomes=faults)]))
        await list_of.wait_view(lambda view: view.breaker != pb.WorkerView.BREAKER_CLOSED)
        b.update(incarnation="next")
        await list_of.wait_view(lambda view: view.state.incarnation == "next")
        await b.stop()
        await list_of.wait(lambda listed: [view.worker_id for view in listed.views] == ["a"])
        assert not gateway.listed.views[0].state.queued_prefill_tokens
        brief = pb.ListWorkersRequest(brief=True, version=gateway.listed.version)
    same, other = await first.ListWorkers(brief), await second.ListWorkers(brief)
    assert (same.unchanged, list(same.workers)) == (True, [])
    assert not other.unchanged, "another router may know other workers"


async def test_an_unreadable_lease_is_ignored(fleet: RouterRig) -> None:
    await fleet.worker("good")
    await fleet.redis.hset(fleet.keys.leases, "bad", b'{"worker_id": 1}')
    await fleet.redis.zadd(fleet.keys.workers, {"bad": 1e12})
    router = await fleet.router(workers=1)
    assert set(await views(router)) == {"good"}


async def test_an_address_that_answers_for_another_worker_is_not_used(fleet: RouterRig) -> None:
    real = await fleet.worker("real")
    leases, router = LeaseTable(fleet.redis, fleet.keys), await fleet.router(workers=1)

    async def listed() -> bool:
        await leases.write(replace(real.lease(), worker_id="ghost"))  # leases end
        return "ghost" in await views(router)

    await until(listed)
    assert not (await views(router))["ghost"].eligible


async def test_a_router_with_many_workers_ends_when_told(fleet: RouterRig) -> None:
    for i in range(40):
        await fleet.worker(f"w{i}")
    process = router_process(fleet.redis_server.url_of("router"))
    router = await fleet.stub(process)
    await until(lambda: eligible(router, 40))
    assert await asyncio.to_thread(process.end) == 0
    with pytest.raises(grpc.aio.AioRpcError):
        await router.Route(ask("r"))
