"""One router process, real Redis, workers that are real gRPC servers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ryzanstein.v1 import routing_pb2 as pb
from ryzanstein.v1 import routing_pb2_grpc, worker_pb2

from services.common.ports import free_port
from services.common.rpc import open_channel
from tests.integration.router.conftest import RouterRig, ask, eligible, lists, views
from tests.integration.router.fake_worker import FakeWorker
from tests.integration.router.processes import metrics_with, page, router_process, until


async def test_a_request_goes_to_the_less_loaded_worker_and_says_why(fleet: RouterRig) -> None:
    await fleet.worker("busy", queued_prefill_tokens=50_000)
    idle = await fleet.worker("idle")
    router = await fleet.router(workers=2, ROUTER_ID="router-a")
    placed = await router.Route(ask())
    assert (placed.worker_id, placed.incarnation, placed.address) == ("idle", idle.incarnation, idle.address)
    assert placed.ticket.router_id == "router-a"
    assert placed.decision.reason == "lowest cost"
    assert [c.worker_id for c in placed.decision.candidates] == ["idle"]
    assert placed.decision.candidates[0].ttft_ms == pytest.approx(10)


async def test_own_dispatches_count_until_acknowledged_by_the_worker(fleet: RouterRig) -> None:
    worker = await fleet.worker("only")
    router = await fleet.router(workers=1, ROUTER_ID="router-a")
    ticket = (await router.Route(ask(prompt_tokens=5000))).ticket
    assert (await views(router))["only"].unacknowledged == 1
    assert (await router.Explain(ask())).candidates[0].queued_tokens == 5000
    worker.update(acked={"router-a": ticket.seq}, queued_prefill_tokens=4000)

    async def acknowledged() -> bool:
        return (await router.Explain(ask())).candidates[0].queued_tokens == 4000

    await until(acknowledged)


async def test_explain_shows_every_worker_without_side_effects(fleet: RouterRig) -> None:
    for i in range(6):
        await fleet.worker(f"w{i}", queued_prefill_tokens=1000 * i)
    router = await fleet.router(workers=6)
    decision = await router.Explain(ask(session="s", excluded_workers=["w0"]))
    assert decision.worker_id == "w1"
    assert {c.worker_id: c.why_not for c in decision.candidates if c.why_not} == {"w0": "excluded"}
    eligible_ones = [c for c in decision.candidates if not c.why_not]
    assert [c.worker_id for c in eligible_ones] == [f"w{i}" for i in range(1, 6)], "the cheapest first"
    assert [c.queued_tokens for c in eligible_ones] == [1000 * i for i in range(1, 6)]
    assert [c.ttft_ms for c in eligible_ones] == pytest.approx([10 + 100 * i for i in range(1, 6)])
    assert not any(view.unacknowledged for view in (await views(router)).values())
    assert not [key async for key in fleet.redis.scan_iter("rz:default:sess:*")]


async def test_only_serving_workers_get_work_and_exclusions_hold_while_alternatives_exist(fleet: RouterRig) -> None:
    worker = await fleet.worker("a")
    await fleet.worker("b")
    router = await fleet.router(workers=2)
    assert {(await router.Route(ask(excluded_workers=["a"]))).worker_id for _ in range(5)} == {"b"}
    assert (await router.Route(ask(excluded_workers=["a", "b"]))).worker_id in "ab"
    for phase in (worker_pb2.PHASE_DRAINING, worker_pb2.PHASE_RECOVERING, worker_pb2.PHASE_LOADING):
        worker.update(phase=phase)
        await until(lambda: eligible(router, 1))
        assert {(await router.Route(ask(excluded_workers=["b"]))).worker_id for _ in range(5)} == {"b"}
        worker.update(phase=worker_pb2.PHASE_SERVING)
        await until(lambda: eligible(router, 2))


async def refusals(router: routing_pb2_grpc.RouterStub) -> list[grpc.aio.AioRpcError]:
    """Of one more request than the queue holds: one that waits in vain and some that cannot even wait."""
    results = await asyncio.gather(*(router.Route(ask(f"r{i}")) for i in range(4)), return_exceptions=True)
    assert all(isinstance(result, grpc.aio.AioRpcError) for result in results)
    return results  # type: ignore[return-value]


async def test_status_codes_name_the_kind_of_error(fleet: RouterRig) -> None:
    worker = await fleet.worker("only")
    router = await fleet.router(workers=1, QUEUE_SIZE="1", QUEUE_TIMEOUT_S="0.2")
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await router.Route(ask(model="other"))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    assert "tiny" in (unknown.value.details() or "")
    worker.update(queued_prefill_tokens=1_000_000)
    await until(lambda: eligible(router, 0))
    for refusal in await refusals(router):
        assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, "it will be able to again"
        assert dict(refusal.trailing_metadata())["retry-after"] == "70"
    worker.update(phase=worker_pb2.PHASE_RECOVERING)

    async def recovering() -> bool:
        return (await views(router))["only"].why_not == "recovering"

    await until(recovering)
    refused = await refusals(router)
    assert {refusal.code() for refusal in refused} == {grpc.StatusCode.UNAVAILABLE}, "no worker serves"
    reasons = {f"no worker serves tiny now ({why})" for why in ("1 recovering", "1 recovering, the queue is full")}
    assert {refusal.details() for refusal in refused} == reasons
    await worker.stop()

    async def gone() -> bool:
        return not await views(router)

    await until(gone)
    with pytest.raises(grpc.aio.AioRpcError) as empty:
        await router.Route(ask())
    assert empty.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_queued_request_is_rejected_before_the_deadline_of_its_caller(fleet: RouterRig) -> None:
    await fleet.worker("only", queued_prefill_tokens=1_000_000)
    router = await fleet.router(workers=0, QUEUE_TIMEOUT_S="60")
    await until(lambda: lists(router, "only"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.Route(ask(timeout_ms=5000), timeout=5)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_request_held_for_a_saturated_worker_lets_interrupted_requests_pass_and_ends_with_the_worker(
    fleet: RouterRig,
) -> None:
    """An error would lose a text that the client of an interrupted request reads already."""
    worker = await fleet.worker("only")
    router = await fleet.router(workers=1, QUEUE_TIMEOUT_S="3600")
    worker.update(queued_prefill_tokens=1_000_000)
    await until(lambda: eligible(router, 0))
    waiting = asyncio.ensure_future(router.Route(ask(patience_ms=1)))

    async def held() -> bool:
        return [model.held for model in (await router.GetDemand(pb.GetDemandRequest())).models] == [1]

    await until(held)
    assert (await router.Route(ask("text", attempt=2), timeout=60)).worker_id == "only"
    assert not waiting.done()
    await worker.stop()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await waiting
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_waiting_requests_are_placed_when_a_worker_becomes_eligible(fleet: RouterRig) -> None:
    worker = await fleet.worker("only", phase=worker_pb2.PHASE_LOADING)
    port = free_port()
    router = await fleet.router(workers=0, QUEUE_TIMEOUT_S="30", METRICS_PORT=str(port))
    await until(lambda: lists(router, "only"))
    waiting = [asyncio.ensure_future(router.Route(ask(f"r{i}"))) for i in range(5)]
    await metrics_with(port, 'ryzanstein_router_queue_length{model="tiny"} 5.0')
    assert not any(task.done() for task in waiting)
    worker.update(phase=worker_pb2.PHASE_SERVING)
    placed = await asyncio.gather(*waiting)
    assert {p.worker_id for p in placed} == {"only"}
    assert all(p.decision.queue_ms > 0 for p in placed)


async def test_three_reported_faults_open_the_breaker_and_handoffs_do_not(fleet: RouterRig) -> None:
    bad = await fleet.worker("bad")
    await fleet.worker("good")
    router = await fleet.router(workers=2)

    async def report(*results: pb.Outcome.Result) -> None:
        async def outcomes():  # type: ignore[no-untyped-def]
            about = {"incarnation": bad.incarnation, "worker_id": "bad"}
            some = [pb.Outcome(**about, result=result) for result in results]
            some.append(pb.Outcome(worker_id="gone", incarnation="i", result=pb.Outcome.RESULT_FAULT))
            yield pb.Outcomes(outcomes=some)

        await router.Report(outcomes())

    innocent = (pb.Outcome.RESULT_HANDOFF, pb.Outcome.RESULT_CANCELLED, pb.Outcome.RESULT_REJECTED)
    await report(*innocent * 5, *[pb.Outcome.RESULT_FAULT] * 2)
    assert (await views(router))["bad"].eligible
    await report(pb.Outcome.RESULT_FAULT)
    view = (await views(router))["bad"]
    assert (view.breaker, view.why_not) == (pb.WorkerView.BREAKER_OPEN, "breaker open")
    placed = [await router.Route(ask(f"r{i}")) for i in range(10)]
    assert {(each.worker_id, each.trial) for each in placed} == {("good", False)}

    async def tried() -> bool:
        answer = await router.Route(ask("trial", excluded_workers=["good"]))
        return answer.trial

    await until(lambda: eligible(router, 2))
    assert await tried()
    assert not (await views(router))["bad"].eligible, "one request at a time"
    await report(pb.Outcome.RESULT_BEGUN)
    assert (await views(router))["bad"].breaker == pb.WorkerView.BREAKER_CLOSED
    assert not await tried()


async def test_draining_takes_effect_at_once(fleet: RouterRig) -> None:
    worker = await fleet.worker("a")
    await fleet.worker("b")
    router = await fleet.router(workers=2)
    response = await router.DrainWorker(pb.DrainWorkerRequest(worker_id="a", grace_ms=250))
    assert (response.handed_off, worker.drains) == (2, [250])
    assert {(await router.Route(ask(f"r{i}"))).worker_id for i in range(10)} == {"b"}
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await router.DrainWorker(pb.DrainWorkerRequest(worker_id="c"))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("policy", ["round_robin", "weighted", "least_loaded", "session_hash"])
async def test_every_policy_serves(fleet: RouterRig, policy: str) -> None:
    for i in range(2):
        await fleet.worker(f"w{i}")
    router = await fleet.router(workers=2, POLICY=policy)
    placed = [await router.Route(ask(f"r{i}", session=f"s{i}")) for i in range(40)]
    assert {p.worker_id for p in placed} == {"w0", "w1"}
    assert {p.decision.policy for p in placed} == {policy}


async def test_a_composed_policy_serves_and_explains_its_costs(fleet: RouterRig) -> None:
    worker = await fleet.worker("w0")
    await fleet.worker("w1")
    parts = {"name": "mine", "scorers": [{"type": "load", "weight": 10}], "filters": [{"type": "keep_session"}]}
    router = await fleet.router(workers=2, POLICY=json.dumps(parts))
    worker.update(running=3)

    async def explained() -> bool:
        candidates = (await router.Explain(ask())).candidates
        return {candidate.worker_id: candidate.cost_ms for candidate in candidates} == {"w0": 30, "w1": 0}

    await until(explained)
    placed = await router.Route(ask("first", session="s"))
    assert (placed.worker_id, placed.decision.policy, placed.decision.reason) == ("w1", "mine", "session bound")
    assert (await router.Route(ask("second", session="s"))).decision.reason == "session kept"


async def test_metrics_and_probes_tell_the_truth(fleet: RouterRig) -> None:
    port = free_port()
    await fleet.worker("only")
    process = fleet.process(router_process(fleet.redis_server.url_of("router"), METRICS_PORT=str(port)))
    router = await fleet.stub(process)
    await until(lambda: eligible(router, 1))
    (chosen,) = (await router.Route(ask())).decision.candidates
    text = await metrics_with(port, 'ryzanstein_router_workers{model="tiny",state="eligible"} 1.0')
    assert 'ryzanstein_router_decisions_total{model="tiny",reason="lowest cost"} 1.0' in text
    expected = re.findall(r'router_expected_first_token_seconds_(?:count|sum){model="tiny"} (\S+)', text)
    assert [float(value) for value in expected] == [1, pytest.approx(chosen.ttft_ms / 1000)]
    assert chosen.ttft_ms > 0
    assert [await asyncio.to_thread(page, port, path) for path in ("/readyz", "/livez")] == ["ok\n", "ok\n"]
    async with open_channel(process.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "ryzanstein.v1.Router"):
            response = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_metrics_show_breakers_and_session_outcomes(fleet: RouterRig) -> None:
    port = free_port()
    worker = await fleet.worker("w0")
    await fleet.worker("w1")
    process = fleet.process(
        router_process(fleet.redis_server.url_of("router"), METRICS_PORT=str(port), REDIS_TIMEOUT_MS="5000")
    )
    router = await fleet.stub(process)
    await until(lambda: eligible(router, 2))
    first = await router.Route(ask(session="s"))
    assert (await router.Route(ask(session="s"))).worker_id == first.worker_id
    await router.Route(ask(session="s", excluded_workers=[first.worker_id]))

    async def outcomes() -> AsyncIterator[pb.Outcomes]:
        fault = pb.Outcome(
            worker_id="w0", incarnation=worker.incarnation, result=pb.Outcome.RESULT_FAULT, request_id="r"
        )
        yield pb.Outcomes(outcomes=[fault] * 3)

    await router.Report(outcomes())
    text = await metrics_with(port, 'ryzanstein_router_breakers{model="tiny",state="open"} 1.0')
    assert 'ryzanstein_router_breakers{model="tiny",state="closed"} 1.0' in text
    for result in ("new", "kept", "moved"):
        assert f'ryzanstein_router_session_bindings_total{{result="{result}"}} 1.0' in text
    assert "ryzanstein_router_redis_seconds_count 3.0" in text  # a read and two bindings: the router remembers them
    fleet.redis_server.kill()
    await router.Route(ask(session="another"))
    text = await asyncio.to_thread(page, port)
    assert 'ryzanstein_router_session_bindings_total{result="unknown"} 1.0' in text
    assert "ryzanstein_router_redis_seconds_count 4.0" in text  # failed operations included


async def test_a_router_that_has_seen_neither_redis_nor_workers_is_not_ready(fleet: RouterRig) -> None:
    fleet.redis_server.kill()
    process = fleet.process(router_process(fleet.redis_server.url_of("router")))
    async with open_channel(process.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert (
            await health.Check(health_pb2.HealthCheckRequest())
        ).status == health_pb2.HealthCheckResponse.NOT_SERVING
        fleet.redis_server.start()

        async def serving() -> bool:
            response = await health.Check(health_pb2.HealthCheckRequest())
            return response.status == health_pb2.HealthCheckResponse.SERVING

        await until(serving)
    assert process.end() == 0


async def test_a_taken_port_is_a_start_up_error(fleet: RouterRig) -> None:
    process = fleet.process(router_process(fleet.redis_server.url_of("router")))
    with pytest.raises(RuntimeError, match="status 1"):
        router_process(fleet.redis_server.url_of("router"), ROUTER_PORT=process.address.rpartition(":")[2])


async def test_request_must_name_its_model_when_several_are_served(fleet: RouterRig) -> None:
    other = FakeWorker("other", "other")
    await other.start(fleet.redis, fleet.keys)
    await fleet.worker("w")
    router = await fleet.router(workers=2)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.Route(ask())
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert refused.value.details() == "model: name one of other, tiny"
    other.refuses = "no time"
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await router.DrainWorker(pb.DrainWorkerRequest(worker_id="other", grace_ms=10))
    assert refusal.value.details() == "worker other did not drain: no time"
    assert (await views(router))["other"].eligible
    await other.stop()
