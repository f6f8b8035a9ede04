"""Sleep and wake of a worker: refusals, losses, drains and adapters. Ranks are fakes; real ones: test_real_ranks.py."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from ryzanstein.v1 import worker_pb2 as pb

from services.common.ports import free_port
from services.compute.model.adapters.served import read_adapter
from services.compute.model.registry import describe
from services.worker.native import engine as native
from services.worker.process.failure import FailureKind, RankFailure
from tests.adapters import write_adapter
from tests.integration.worker_server.conftest import RunningWorker, running_worker
from tests.integration.worker_server.gateway import FakeGateway, until
from tests.integration.worker_server.test_lifecycle import lease_of
from tests.models import BUNDLED_MODEL
from tests.unit.worker.scheduling.fake_ranks import generate

PROMPT = list(range(40))
TOKENS = generate(PROMPT, 5, pb.Sampling())


@pytest.fixture
async def gateway(worker: RunningWorker) -> AsyncIterator[FakeGateway]:
    """A connection to the worker, whose start-up probe has ended."""
    async with FakeGateway(worker.address) as gateway:
        await gateway.wait_state(lambda state: state.computed_tokens >= 135)
        yield gateway


async def phase(gateway: FakeGateway, wanted: pb.Phase) -> pb.WorkerState:
    return await gateway.wait_state(lambda state: state.phase == wanted)


async def refused(call: grpc.aio.UnaryUnaryCall[object, object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details() or ""


async def test_asleep_the_cache_is_cleared_and_requests_are_handed_off_until_the_wake(
    worker: RunningWorker, gateway: FakeGateway
) -> None:
    assert (await gateway.complete(PROMPT)).ids == TOKENS
    before = await gateway.wait_state(lambda state: state.running == 0)
    for _ in range(2):
        await gateway.stub.Sleep(pb.SleepRequest())
    asleep = await gateway.state()
    assert worker.group.asleep == 1
    assert (asleep.phase, asleep.detail) == (pb.PHASE_SLEEPING, "asleep")
    assert (asleep.kv_blocks_total, asleep.kv_blocks_cached) == (0, 0)
    assert asleep.max_request_tokens == before.max_request_tokens
    assert (before.memory_bytes, asleep.memory_bytes, asleep.wake_ms) == (100, 1, 0)
    assert asleep.memory == before.memory
    assert asleep.awake_bytes == sum(asleep.memory.values()) == 11 + asleep.memory["server"]
    async for message in gateway.stub.KvSync(pb.KvSyncRequest(incarnation=asleep.incarnation)):
        assert message.events[-1].cleared
        break
    handoff = (await gateway.complete(PROMPT)).last.handoff
    assert (handoff.reason, handoff.detail) == (pb.Handoff.REASON_LOADING, "the worker is asleep")
    assert (await gateway.stub.GetModelCard(pb.GetModelCardRequest())).tokenizer_json
    await until(lambda: (lease_of(worker) or {}).get("phase") == "sleeping")
    for _ in range(2):
        await gateway.stub.Wake(pb.WakeRequest())
    awake = await phase(gateway, pb.PHASE_SERVING)
    assert awake.wake_ms > 0
    assert awake.incarnation == before.incarnation
    again = await gateway.complete(PROMPT)
    assert (again.ids, again.outputs[0].cached_tokens) == (TOKENS, 0)
    assert worker.group.starts == 1


async def test_sleep_is_refused_while_a_request_runs_and_for_an_unknown_level(
    worker: RunningWorker, gateway: FakeGateway
) -> None:
    worker.group.step_s = 0.02
    answer = await gateway.submit(PROMPT, max_tokens=100)
    await answer.at_least(1)
    code, text = await refused(gateway.stub.Sleep(pb.SleepRequest()))
    assert (code, text) == (grpc.StatusCode.FAILED_PRECONDITION, "1 requests run or wait")
    await gateway.cancel(answer)
    await gateway.wait_state(lambda state: state.running == 0)
    code, text = await refused(gateway.stub.Sleep(pb.SleepRequest(level=3)))
    assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, "level: 3 is not one of 0, 1, 2")
    await gateway.stub.Sleep(pb.SleepRequest(level=2))  # the steps of the cancelled request may still be computed
    assert worker.group.asleep == 2


async def test_probe_of_the_start_gives_way_to_a_sleep(redis_url: str) -> None:
    async with running_worker(redis_url, hold_start=True) as worker, FakeGateway(worker.address) as gateway:
        worker.group.step_s = 0.3  # the probe is under way when the order to sleep comes
        code, text = await refused(gateway.stub.Sleep(pb.SleepRequest()))
        assert (code, text) == (grpc.StatusCode.FAILED_PRECONDITION, "the worker is loading: loading the model")
        code, _ = await refused(gateway.stub.Wake(pb.WakeRequest()))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        worker.group.may_start.set()
        await gateway.wait_serving()
        await gateway.stub.Sleep(pb.SleepRequest())
        assert (await gateway.state()).computed_tokens < 135
        worker.group.step_s = 0.0
        await gateway.stub.Wake(pb.WakeRequest())
        assert (await gateway.wait_state(lambda state: state.decode_step_ms > 0)).phase == pb.PHASE_SERVING


async def test_wake_is_refused_without_memory(
    worker: RunningWorker, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gateway.stub.Sleep(pb.SleepRequest())
    with monkeypatch.context() as patch:
        patch.setattr(native, "available_host_memory", lambda: 0)
        code, text = await refused(gateway.stub.Wake(pb.WakeRequest()))
    assert (code, text) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "to wake takes 1 MiB of memory but 0 MiB are available",
    )
    code, text = await refused(gateway.stub.Wake(pb.WakeRequest(promised_bytes=1 << 50)))
    promised = ", without 1,073,741,824 MiB that workers which woke have yet to take"
    assert (code, text) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"to wake takes 1 MiB of memory but 0 MiB are available{promised}",
    )
    assert (await gateway.state()).phase == pb.PHASE_SLEEPING
    worker.group.to_take = 7
    await gateway.stub.Wake(pb.WakeRequest())
    assert (await phase(gateway, pb.PHASE_SERVING)).promised_bytes == 7


async def test_ranks_lost_asleep_stay_away_until_the_wake(worker: RunningWorker, gateway: FakeGateway) -> None:
    await gateway.stub.Sleep(pb.SleepRequest())
    worker.group.die()
    lost = await gateway.wait_state(lambda state: "killed by the test" in state.detail)
    assert lost.phase == pb.PHASE_SLEEPING
    await gateway.stub.Sleep(pb.SleepRequest())
    assert worker.group.starts == 1
    await gateway.stub.Wake(pb.WakeRequest())
    assert (await phase(gateway, pb.PHASE_SERVING)).wake_ms > 0
    assert worker.group.starts == 2
    assert (await gateway.complete(PROMPT)).ids == TOKENS
    await gateway.wait_state(lambda state: state.running == 0)
    await gateway.stub.Sleep(pb.SleepRequest())
    await gateway.stub.Wake(pb.WakeRequest())
    await phase(gateway, pb.PHASE_SERVING)
    assert worker.group.starts == 2


async def test_failed_wake_recovers_with_its_reason(worker: RunningWorker, gateway: FakeGateway) -> None:
    await gateway.stub.Sleep(pb.SleepRequest())
    worker.group.may_wake.clear()
    await gateway.stub.Wake(pb.WakeRequest())
    assert (await phase(gateway, pb.PHASE_WAKING)).detail == "waking"
    assert (await gateway.complete(PROMPT)).last.handoff.detail == "the worker is waking"
    worker.group.start_failure = RankFailure(0, FailureKind.ERROR, "ModelError: no weights")
    worker.group.die()
    await gateway.wait_state(lambda state: "no weights" in state.detail and state.phase == pb.PHASE_RECOVERING)
    worker.group.start_failure = None
    await phase(gateway, pb.PHASE_SERVING)
    assert (await gateway.complete(PROMPT)).ids == TOKENS


@pytest.mark.parametrize("waking", [False, True])
async def test_drain_ends_a_worker_that_is_asleep_or_wakes(redis_url: str, waking: bool) -> None:
    async with running_worker(redis_url) as worker, FakeGateway(worker.address) as gateway:
        await gateway.wait_serving()
        await gateway.stub.Sleep(pb.SleepRequest())
        if waking:
            worker.group.may_wake.clear()
            await gateway.stub.Wake(pb.WakeRequest())
        done = await gateway.stub.Drain(pb.DrainRequest(grace_ms=60_000))
        assert (done.handed_off, done.completed) == (0, 0)
        worker.group.may_wake.set()
        code, _ = await refused(gateway.stub.Wake(pb.WakeRequest()))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert (await gateway.state()).phase == pb.PHASE_DRAINING
        worker.stop.set()
        await asyncio.wait_for(worker.task, 60)


async def test_resident_adapters_are_loaded_again_after_the_wake(redis_url: str, tmp_path: Path) -> None:
    write_adapter(BUNDLED_MODEL, tmp_path, {"q_proj": 4})
    digest = read_adapter(tmp_path, describe(BUNDLED_MODEL), 64).digest
    adapter = pb.Adapter(digest=digest, source=str(tmp_path), name="a")
    async with (
        running_worker(redis_url, adapters={"a": str(tmp_path)}, adapter_slots=2) as worker,
        FakeGateway(worker.address) as gateway,
    ):
        await gateway.wait_serving()
        expected = (await gateway.complete(PROMPT, adapter=adapter)).ids
        await gateway.wait_state(lambda state: state.running == 0)
        await gateway.stub.Sleep(pb.SleepRequest())
        assert not (await gateway.state()).adapters
        await gateway.stub.Wake(pb.WakeRequest())
        state = await gateway.wait_state(lambda state: len(state.adapters) == 1 and state.adapters[0].in_slot)
        assert state.adapters[0].digest == digest
        await until(lambda: len(worker.group.orders) == 2)
        assert {order.folder for order in worker.group.orders} == {str(tmp_path)}
        assert (await gateway.complete(PROMPT, adapter=adapter)).ids == expected


async def test_sleeping_worker_is_ready_and_its_metrics_tell_phase_and_wakes(redis_url: str) -> None:
    port = free_port()
    async with (
        running_worker(redis_url, metrics_port=port) as worker,
        FakeGateway(worker.address) as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http,
    ):
        await gateway.wait_serving()
        await gateway.stub.Sleep(pb.SleepRequest())
        assert (await http.get("/readyz")).status_code == 200
        assert 'ryzanstein_worker_phase{phase="sleeping"} 1.0' in (await http.get("/metrics")).text
        await gateway.stub.Wake(pb.WakeRequest())
        await phase(gateway, pb.PHASE_SERVING)
        text = (await http.get("/metrics")).text
        assert 'ryzanstein_worker_phase{phase="serving"} 1.0' in text
        assert "ryzanstein_worker_wake_seconds_count 1.0" in text
        assert worker.group.starts == 1


async def test_orders_in_any_sequence_leave_a_worker_that_serves(worker: RunningWorker, gateway: FakeGateway) -> None:
    """Losses, sleeps, wakes and requests meet in every order; a forbidden phase would end the worker."""
    rng = random.Random(5)

    async def lose() -> None:
        if not worker.group.lost:
            worker.group.die()

    async def ask() -> None:
        await gateway.submit(PROMPT, max_tokens=rng.randrange(1, 9))

    orders = (
        *[lambda: gateway.stub.Sleep(pb.SleepRequest())] * 6,
        *[lambda: gateway.stub.Wake(pb.WakeRequest())] * 8,
        *[lambda: asyncio.sleep(rng.random() / 100)] * 6,
        *[ask] * 6,
        lose,
    )
    for _ in range(60):
        await asyncio.gather(rng.choice(orders)(), return_exceptions=True)
        assert not worker.task.done()

    async def serves() -> None:
        while (await gateway.state()).phase != pb.PHASE_SERVING:
            await asyncio.gather(gateway.stub.Wake(pb.WakeRequest()), return_exceptions=True)
            await asyncio.sleep(0.02)

    await asyncio.wait_for(serves(), 60)
    assert (await gateway.complete(PROMPT)).ids == TOKENS


async def test_worker_ends_when_a_wake_raises_an_unexpected_error(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would wake for ever, and count as ready."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with running_worker(redis_url) as worker, FakeGateway(worker.address) as gateway:
            await gateway.wait_state(lambda state: state.computed_tokens >= 135)
            await gateway.stub.Sleep(pb.SleepRequest())
            monkeypatch.setattr(native.NativeEngine, "_open", fail)
            await gateway.stub.Wake(pb.WakeRequest())
            await until(worker.task.done)
