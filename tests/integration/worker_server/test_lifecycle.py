"""Loading, draining, losing ranks, leases: what routers and gateways see of a worker's life."""

from __future__ import annotations

import asyncio
import json
import time
from importlib.metadata import version

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis import Redis
from ryzanstein.v1 import worker_pb2 as pb

from services.common.keys import RedisKeys
from services.common.leases import LeaseTable
from services.common.lifecycle import GaveUpError
from services.common.ports import free_port
from services.common.rpc import open_channel
from services.worker.engine import base
from services.worker.process.failure import FailureKind, RankFailure
from services.worker.scheduling.scheduler import Scheduler
from tests.integration.worker_server.conftest import RunningWorker, running_worker
from tests.integration.worker_server.gateway import FakeGateway, GatewayAnswer, until
from tests.unit.worker.scheduling.fake_ranks import generate

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health(address: str, service: str = "") -> int:
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True)).status


def lease_of(worker: RunningWorker) -> dict[str, object] | None:
    with Redis.from_url(worker.settings.redis_url) as redis:
        value = redis.hget(RedisKeys("default").leases, worker.settings.worker_id)
    return json.loads(value) if value else None


async def test_while_loading_submits_are_handed_off_and_only_liveness_serves(redis_url: str) -> None:
    async with running_worker(redis_url, hold_start=True) as worker, FakeGateway(worker.address) as gateway:
        assert await health(worker.address) == NOT_SERVING
        assert await health(worker.address, "liveness") == SERVING
        answer = await gateway.complete([1, 2])
        assert answer.last.handoff.reason == pb.Handoff.REASON_LOADING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await gateway.stub.GetModelCard(pb.GetModelCardRequest())
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        worker.group.may_start.set()
        await gateway.wait_serving()
        assert await health(worker.address) == SERVING
        assert (await gateway.complete([1, 2])).ids == generate([1, 2], 5, pb.Sampling())


async def test_drain_finishes_short_requests_and_hands_off_long_requests(
    worker: RunningWorker, gateway: FakeGateway
) -> None:
    worker.group.step_s = 0.05  # the drain begins before the short one's end, and ends long before the long one's
    short = await gateway.submit([1], max_tokens=20)
    long = await gateway.submit([2], max_tokens=240)
    await long.at_least(1)
    done = await gateway.stub.Drain(pb.DrainRequest(grace_ms=3000))
    assert (done.completed, done.handed_off) == (1, 1)
    assert short.last.finish == pb.FINISH_REASON_LENGTH
    await long.end.wait()
    assert long.last.handoff.reason == pb.Handoff.REASON_DRAIN
    assert 0 < len(long.ids) < 240
    late = await gateway.complete([3])
    assert late.last.handoff.reason == pb.Handoff.REASON_DRAIN
    assert (await gateway.state()).phase == pb.PHASE_DRAINING
    assert await health(worker.address) == NOT_SERVING


async def test_the_stop_signal_hands_off_flushes_and_gives_the_lease_up(redis_url: str) -> None:
    async with running_worker(redis_url) as worker, FakeGateway(worker.address) as gateway:
        worker.group.step_s = 0.01
        await gateway.wait_serving()
        await until(lambda: (lease_of(worker) or {}).get("phase") == "serving")
        lease = lease_of(worker)
        assert lease is not None
        assert lease["address"] == worker.address
        answer = await gateway.submit([5], max_tokens=240)
        await answer.at_least(2)
        worker.stop.set()
        await asyncio.wait_for(answer.end.wait(), 60)
        assert answer.last.handoff.reason == pb.Handoff.REASON_DRAIN
        assert answer.ids == generate([5], 240, pb.Sampling())[: len(answer.ids)]
        await asyncio.wait_for(worker.task, 60)
        assert lease_of(worker) is None


async def test_lost_ranks_hand_off_at_once_and_the_worker_comes_back(
    worker: RunningWorker, gateway: FakeGateway
) -> None:
    worker.group.step_s = 0.01
    incarnation = (await gateway.state()).incarnation
    answer = await gateway.submit(list(range(40)), max_tokens=200)
    await answer.at_least(2)
    worker.group.may_start.clear()
    worker.group.begin_to_die()
    await asyncio.wait_for(answer.end.wait(), 60)
    assert answer.last.handoff.reason == pb.Handoff.REASON_RANKS_LOST
    assert "rank 1" in answer.last.handoff.detail
    assert answer.last.handoff.in_flight
    state = await gateway.state()
    assert (state.phase, state.detail) == (pb.PHASE_RECOVERING, "rank 1 is dying")
    worker.group.die()
    await gateway.wait_state(lambda state: "killed by the test" in state.detail)
    assert (await gateway.complete([1])).last.handoff.reason == pb.Handoff.REASON_LOADING
    worker.group.may_start.set()
    await gateway.wait_serving()
    again = await gateway.complete(list(range(40)), max_tokens=200)
    assert again.outputs[0].cached_tokens == 0
    assert again.ids == generate(list(range(40)), 200, pb.Sampling())
    assert (await gateway.state()).incarnation == incarnation
    assert worker.group.starts == 2


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (None, "rank 1 exited: killed by the test"),  # the next start hangs
        (RankFailure(0, FailureKind.ERROR, "ModelError: no weights"), "rank 0 error: ModelError: no weights"),
    ],
)
async def test_ranks_that_do_not_come_back_in_time_end_the_worker(
    redis_url: str, failure: RankFailure | None, why: str
) -> None:
    with pytest.raises(GaveUpError) as gave_up:  # noqa: PT012
        async with running_worker(redis_url, recovery_limit_s=1.0) as worker, FakeGateway(worker.address) as gateway:
            await gateway.wait_serving()
            worker.group.start_failure = failure
            if failure is None:
                worker.group.may_start.clear()
            worker.group.die()
            await until(worker.task.done)
            assert lease_of(worker) is None
    assert str(gave_up.value) == f"not serving for 1 s (RYZANSTEIN_RECOVERY_LIMIT_S): {why}"


async def test_an_error_of_ours_is_a_loss_of_ranks_and_not_a_stand_still(
    worker: RunningWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    async with FakeGateway(worker.address) as gateway:
        await gateway.wait_state(lambda state: state.computed_tokens >= 135)  # the start-up probe has ended
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "apply", fail)
            answer = await gateway.complete([1, 2])
        assert answer.last.handoff.reason == pb.Handoff.REASON_RANKS_LOST
        await gateway.wait_serving()
        assert (await gateway.complete([1, 2])).ids == generate([1, 2], 5, pb.Sampling())


async def test_without_redis_the_worker_serves(tmp_path: object) -> None:
    async with running_worker(f"unix://{tmp_path}/nothing.sock") as worker, FakeGateway(worker.address) as gateway:
        await gateway.wait_serving()
        assert len((await gateway.complete([1])).ids) == 5


async def test_model_card_holds_the_fields_used_by_gateways(gateway: FakeGateway) -> None:
    card = await gateway.stub.GetModelCard(pb.GetModelCardRequest())
    assert card.model == "ryzanstein-tiny"
    recommended = card.sampling_defaults  # by the model's generation_config.json
    assert (round(recommended.temperature, 3), round(recommended.top_p, 3)) == (0.7, 0.95)
    assert not recommended.HasField("top_k")
    assert json.loads(card.tokenizer_json)["model"]
    assert "add_generation_prompt" in card.chat_template
    assert card.special_tokens["eos_token"]
    assert card.eos_token_ids
    assert card.max_model_len == 256
    assert [(phase.name, phase.ms) for phase in card.startup] == [("load", 500.0), ("warm-up", 250.0)]
    assert dict(card.memory_bytes) == {"process": 5, "weights": 1, "workspace": 2, "kv": 3, "server": 96 << 20}
    assert card.hash_root.endswith(card.dtype)


async def test_the_state_counts_and_acknowledges(gateway: FakeGateway) -> None:
    for seq in (3, 7, 5):
        await gateway.complete([1] * 40, ticket=pb.DispatchTicket(router_id="router", seq=seq))
    state = await gateway.wait_state(lambda state: state.running == 0)
    assert dict(state.acked) == {"router": 7}
    assert state.prefill_tokens_per_s > 0
    assert state.decode_step_ms > 0
    assert state.kv_blocks_total == 64
    assert state.kv_blocks_cached > 0


async def test_idle_worker_reports_an_unchanged_state_every_two_seconds(gateway: FakeGateway) -> None:
    await gateway.complete([1])
    await gateway.wait_state(lambda state: state.running == 0)
    stream = gateway.stub.WatchState(pb.WatchStateRequest())
    states, began = [await stream.read()], asyncio.get_running_loop().time()
    while len(states) < 3:
        states.append(await stream.read())
    assert 3.8 < asyncio.get_running_loop().time() - began < 60
    assert [state.unchanged for state in states] == [False, True, True]
    assert len({state.incarnation for state in states}) == 1
    assert states[0].seq < states[1].seq < states[2].seq
    assert {field.name for field, _ in states[2].ListFields()} == {"worker_id", "incarnation", "seq", "unchanged"}
    await gateway.complete([2])
    assert not (await stream.read()).unchanged


async def test_decoding_worker_reports_rarely_and_at_once_when_a_request_ends(
    worker: RunningWorker, gateway: FakeGateway
) -> None:
    loop = asyncio.get_running_loop()
    worker.group.step_s = 0.01

    async def end_of(answer: GatewayAnswer) -> float:
        await answer.end.wait()
        return loop.time()

    answer = await gateway.submit([1] * 100, max_tokens=150)
    await answer.at_least(1)
    states, slower, ended = [], [], asyncio.create_task(end_of(answer))
    async for state in gateway.stub.WatchState(pb.WatchStateRequest()):
        states.append(state)
        if worker.group.step_s == 0.02:
            slower.append(state)
        elif len(answer.ids) > 75:
            worker.group.step_s = 0.02
        if not state.unchanged and state.running == 0:
            break
    ended_at = loop.time()
    assert abs(ended_at - await ended) < 1.5  # the state may come before the answer's end
    assert len(states) < 25, "150 steps of 10 and 20 ms are over 75 pauses of 20 ms"
    assert max(state.decode_step_ms for state in slower) > 15, "steps of 20 ms after those of 10"


async def test_too_many_waiting_requests_are_handed_off(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_WAITING", 2)
    async with running_worker(redis_url, max_running=1) as worker, FakeGateway(worker.address) as gateway:
        await gateway.wait_state(lambda state: state.decode_step_ms > 0 and state.running == 0)
        worker.group.step_s = 0.5  # the first runs on until the others have been refused
        answers = [await gateway.submit([i], max_tokens=100) for i in range(6)]
        await until(lambda: sum(answer.end.is_set() for answer in answers) >= 3)
        worker.group.step_s = 0.0
        await asyncio.gather(*(answer.end.wait() for answer in answers))
        refused = [a for a in answers if a.last.handoff.reason == pb.Handoff.REASON_OVERLOAD]
        assert 3 <= len(refused) <= 4
        assert all(len(answer.ids) == 100 for answer in answers if answer not in refused)


async def test_the_start_up_probe_is_nobodys_request(redis_url: str) -> None:
    """A router would take what it measures for the speed under load, and send the first crowd to the luckiest."""
    async with running_worker(redis_url, hold_start=True) as worker, FakeGateway(worker.address) as gateway:
        requests: list[int] = []

        def probed(state: pb.WorkerState) -> bool:
            requests.append(state.running + state.waiting)
            return state.phase == pb.PHASE_SERVING and state.computed_tokens > 128

        worker.group.step_s = 0.02
        asyncio.get_running_loop().call_later(0.1, worker.group.may_start.set)
        await gateway.wait_state(probed)
        assert len(requests) > 2
        assert not any(requests)


async def test_metrics_and_probes_are_served(redis_url: str) -> None:
    port = free_port()
    async with (
        running_worker(redis_url, hold_start=True, metrics_port=port, telemetry_names=("vllm",)) as worker,
        FakeGateway(worker.address) as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http,
    ):
        assert (await http.get("/livez")).status_code == 200
        assert (await http.get("/readyz")).status_code == 503
        worker.group.may_start.set()
        await gateway.wait_serving()
        await gateway.complete([1] * 40, max_tokens=10)
        await gateway.complete([1] * 40, max_tokens=10)
        assert (await http.get("/readyz")).status_code == 200
        lines = (await http.get("/metrics")).text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        assert float(values["ryzanstein_worker_prefix_hit_tokens_total"]) == 32
        assert float(values["ryzanstein_worker_generated_tokens_total"]) >= 20
        assert float(values["ryzanstein_worker_ttft_seconds_count"]) == 2
        assert float(values["ryzanstein_worker_queue_seconds_count"]) == 2
        assert float(values['ryzanstein_worker_phase{phase="serving"}']) == 1
        assert float(values["ryzanstein_worker_kv_blocks_capacity"]) == 64
        model = '{model_name="ryzanstein-tiny"}'
        named = {name.removesuffix(model): float(value) for name, value in values.items() if name.startswith("vllm:")}
        assert named["vllm:prefix_cache_hits_total"] == 32
        computed = float(values["ryzanstein_worker_prefill_tokens_total"])  # those of the probe at the start included
        assert named["vllm:prefix_cache_queries_total"] == computed + 32
        assert named["vllm:num_requests_running"] == named["vllm:num_requests_waiting"] == 0
        assert named["vllm:request_queue_time_seconds_count"] == 2
        used = float(values["ryzanstein_worker_kv_blocks_used"]) / 64
        assert named["vllm:kv_cache_usage_perc"] == named["vllm:gpu_cache_usage_perc"] == used


async def test_metrics_and_probes_last_until_the_drain_is_over(redis_url: str) -> None:
    port = free_port()
    async with (
        running_worker(redis_url, metrics_port=port, drain_s=60) as worker,
        FakeGateway(worker.address) as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http,
    ):
        worker.group.step_s = 0.05
        await gateway.wait_serving()
        answer = await gateway.submit([5], max_tokens=240)
        await answer.at_least(1)
        worker.stop.set()
        await gateway.wait_state(lambda state: state.phase == pb.PHASE_DRAINING)
        for n_tokens in (10, 20, 30):
            await answer.at_least(n_tokens)
            assert (await http.get("/livez")).status_code == 200
            assert (await http.get("/readyz")).status_code == 503
            assert 'ryzanstein_worker_phase{phase="draining"} 1.0' in (await http.get("/metrics")).text
        assert not answer.end.is_set()
        worker.group.step_s = 0.0
        await answer.end.wait()
        assert answer.last.finish == pb.FINISH_REASON_LENGTH


async def test_the_metrics_tell_a_workers_life(redis_url: str) -> None:
    port = free_port()
    async with (
        running_worker(redis_url, metrics_port=port, drain_s=0.0, dtype="float32") as worker,
        FakeGateway(worker.address) as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http,
    ):

        async def values() -> dict[str, float]:
            lines = (await http.get("/metrics")).text.splitlines()
            pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("ryzanstein_worker_")]
            return {name.removeprefix("ryzanstein_worker_"): float(value) for name, value in pairs}

        await gateway.wait_serving()
        await gateway.complete([1])
        metrics = await values()
        info = (
            'info{device="cpu",dtype="float32",engine="native",model="ryzanstein-tiny",resume="exact",revision="",'
            'tensor_parallel="1",'
            f'version="{version("ryzanstein")}"}}'
        )
        assert metrics[info] == 1
        assert {name: value for name, value in metrics.items() if name.startswith(("startup", "memory"))} == {
            'startup_seconds{phase="load"}': 0.5,
            'startup_seconds{phase="warm-up"}': 0.25,
            'memory_bytes{kind="process"}': 5,
            'memory_bytes{kind="weights"}': 1,
            'memory_bytes{kind="workspace"}': 2,
            'memory_bytes{kind="kv"}': 3,
            'memory_bytes{kind="server"}': 96 << 20,
            "memory_held_bytes": 100,
        }
        assert abs(metrics["last_step_timestamp_seconds"] - time.time()) < 60
        assert metrics["drain_seconds"] == 0
        worker.group.step_s = 0.05
        answers = [await gateway.submit([i], max_tokens=240) for i in range(3)]
        await answers[-1].at_least(1)
        worker.group.die()
        await asyncio.gather(*(answer.end.wait() for answer in answers))
        await gateway.wait_serving()
        metrics = await values()
        assert metrics['recoveries_total{cause="exited"}'] == 1
        assert metrics['ranks_lost_total{rank="1"}'] == 1
        assert metrics['handoffs_total{reason="ranks_lost"}'] == 3
        await (await gateway.submit([7], max_tokens=240)).at_least(1)
        await gateway.stub.Drain(pb.DrainRequest(grace_ms=0))
        metrics = await values()
        assert metrics['handoffs_total{reason="drain"}'] == 1
        assert 0 < metrics["drain_seconds"] < 60


async def test_the_same_id_again_replaces_the_earlier_request(gateway: FakeGateway) -> None:
    first = await gateway.submit([1], max_tokens=240, request_id="same")
    await first.at_least(2)
    second = await gateway.complete([2], max_tokens=20, request_id="same", attempt=2)
    assert not first.end.is_set()
    assert second.ids == generate([2], 20, pb.Sampling())
    await gateway.wait_state(lambda state: state.running == 0)


async def test_worker_hands_requests_off_and_gives_up_when_a_loop_ends(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(GaveUpError, match=r"LeaseKeeper\.run has ended: ZeroDivisionError"):  # noqa: PT012
        async with running_worker(redis_url) as worker, FakeGateway(worker.address) as gateway:
            await gateway.wait_serving()
            worker.group.step_s = 0.1
            answer = await gateway.submit([1, 2], max_tokens=200)
            monkeypatch.setattr(LeaseTable, "write", fail)
            await asyncio.wait_for(answer.end.wait(), 60)
            assert answer.last.handoff.reason == pb.Handoff.REASON_DRAIN
            await until(worker.task.done)
