"""A pull that goes wrong costs time and nothing else: the tokens come, they are right, and the metrics say why.

The ranks are those of the scheduler's tests, which notice KV of another prefix; sources that misbehave are servers of
the test.
"""

from __future__ import annotations

import asyncio
import zlib
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1 import worker_pb2_grpc

from services.common.blockhash import chain_root, extend_chain
from services.common.ports import free_port
from services.common.rpc import bind, new_server, open_channel
from services.worker.process.failure import FailureKind, RankFailure, RanksFailedError
from tests.integration.worker_server.conftest import RunningWorker, running_worker
from tests.integration.worker_server.gateway import FakeGateway, GatewayAnswer, until
from tests.unit.worker.scheduling.fake_ranks import extend, generate

PROMPT = [i % 90 + 1 for i in range(130)]  # 8 blocks and 2 tokens
CACHED = 128
BLOCK = 16
N = 5


@asynccontextmanager
async def a_worker(redis_url: str, **settings: object) -> AsyncIterator[tuple[RunningWorker, FakeGateway]]:
    port = free_port()
    async with (
        running_worker(redis_url, metrics_port=port, **settings) as worker,
        FakeGateway(worker.address) as gateway,
    ):
        await gateway.wait_serving()
        yield worker, gateway


async def metric(worker: RunningWorker, name: str, **labels: str) -> float:
    """A total of the worker."""
    return await level(worker, f"{name}_total", **labels)


async def level(worker: RunningWorker, name: str, **labels: str) -> float:
    """A gauge of the worker."""
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.settings.metrics_port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = (await reader.read()).decode().partition("\r\n\r\n")[2]
    writer.close()
    # All lines would keep the loop of the worker, which is this one, busy: they are read again and again.
    lines = "\n".join(line for line in text.splitlines() if line.startswith(f"ryzanstein_worker_{name}"))
    samples = [s for family in text_string_to_metric_families(lines) for s in family.samples]
    return next(s.value for s in samples if s.name == f"ryzanstein_worker_{name}" and s.labels == labels)


async def hint_of(gateway: FakeGateway, address: str, tokens: int = CACHED) -> pb.PullHint:
    state = await gateway.state()
    return pb.PullHint(worker_id=state.worker_id, incarnation=state.incarnation, address=address, tokens=tokens)


def is_right(answer: GatewayAnswer, prompt: list[int] = PROMPT) -> bool:
    return answer.ids == generate(prompt, N, pb.Sampling())


def cached(answer: GatewayAnswer) -> int:
    return answer.outputs[0].cached_tokens


async def test_pulled_blocks_are_counted_announced_and_reused_by_other_requests(redis_url: str) -> None:
    async with a_worker(redis_url) as (one, source), a_worker(redis_url) as (two, target):
        assert is_right(await source.complete(PROMPT))
        pulled = await target.complete(PROMPT, pull=await hint_of(source, one.address))
        assert is_right(pulled)
        assert cached(pulled) == CACHED
        assert await metric(two, "pulled_blocks") == await metric(one, "sent_blocks") == CACHED // BLOCK
        assert await metric(two, "pulled_bytes") == await metric(one, "sent_bytes") == CACHED * 8
        assert await metric(two, "pulled_seconds") > 0
        assert two.group.n_steps <= one.group.n_steps
        dump = [await anext(aiter(stub.KvSync(pb.KvSyncRequest()))) for stub in (source.stub, target.stub)]
        assert list(dump[0].events[0].stored) == list(dump[1].events[0].stored)
        assert cached(await target.complete(PROMPT)) == CACHED
        assert cached(await target.complete(PROMPT, pull=await hint_of(source, one.address))) == CACHED
        assert await metric(two, "pulled_blocks") == CACHED // BLOCK, "what is there is not fetched again"


async def test_only_missing_blocks_are_pulled(redis_url: str) -> None:
    async with a_worker(redis_url) as (one, source), a_worker(redis_url) as (two, target):
        await source.complete(PROMPT)
        await target.complete(PROMPT[:50])
        pulled = await target.complete(PROMPT, pull=await hint_of(source, one.address))
        assert is_right(pulled)
        assert cached(pulled) == CACHED
        assert await metric(two, "pulled_blocks") == (CACHED - 48) // BLOCK


async def test_requests_with_the_same_prefix_share_a_single_pull(redis_url: str) -> None:
    async with a_worker(redis_url) as (one, source), a_worker(redis_url) as (two, target):
        await source.complete(PROMPT)
        one.group.step_s = 0.2
        hint = await hint_of(source, one.address)
        answers = [await target.submit(PROMPT, pull=hint) for _ in range(3)]
        await asyncio.gather(*(answer.end.wait() for answer in answers))
        assert all(is_right(answer) and cached(answer) == CACHED for answer in answers)
        assert await metric(two, "pulled_blocks") == CACHED // BLOCK


async def test_an_evicted_end_is_computed(redis_url: str) -> None:
    async with a_worker(redis_url) as (one, source), a_worker(redis_url) as (two, target):
        await source.complete(PROMPT[:100])  # six blocks of it
        pulled = await target.complete(PROMPT, pull=await hint_of(source, one.address))
        assert is_right(pulled)
        assert cached(pulled) == 96
        assert await metric(two, "pull_failures", reason="evicted") == 1


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"tensor_parallel": 2}])
async def test_kv_of_another_kind_is_refused_by_name(redis_url: str, settings: dict[str, object]) -> None:
    async with (
        a_worker(redis_url, dtype="float32") as (one, source),
        a_worker(redis_url, **{"dtype": "float32", **settings}) as (two, target),
    ):
        await source.complete(PROMPT)
        pulled = await target.complete(PROMPT, pull=await hint_of(source, one.address))
        assert is_right(pulled)
        assert cached(pulled) == 0
        assert await metric(two, "pull_failures", reason="mismatch") == 1
        layout = pb.KvLayout(hash_root="another model")
        state = await source.state()
        with pytest.raises(grpc.aio.AioRpcError, match="hash_root 'another model' is asked for") as refused:
            await anext(
                aiter(source.stub.PullBlocks(pb.PullBlocksRequest(incarnation=state.incarnation, layout=layout)))
            )
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_restarted_or_gone_worker_holds_no_blocks(redis_url: str) -> None:
    async with a_worker(redis_url) as (one, source), a_worker(redis_url) as (two, target):
        await source.complete(PROMPT)
        hint = await hint_of(source, one.address)
        hint.incarnation = "an earlier one"
        assert is_right(await target.complete(PROMPT, pull=hint))
        assert await metric(two, "pull_failures", reason="gone") == 1
        hint.address = f"127.0.0.1:{free_port()}"
        other = [5, *PROMPT]
        assert is_right(await target.complete(other, pull=hint), other)
        assert await metric(two, "pull_failures", reason="unreachable") == 1


Blocks = Callable[[pb.PullBlocksRequest], AsyncIterator[pb.KvBlock]]


def good(request: pb.PullBlocksRequest, index: int) -> pb.KvBlock:
    """The contents that the fake ranks would have computed for block `index` of PROMPT."""
    states, state = [], 0
    for token in PROMPT[: (index + 1) * BLOCK]:
        state = extend(state, token)
        states.append(state)
    data = array("Q", states[index * BLOCK :]).tobytes()
    return pb.KvBlock(digest=request.digests[index], data=data, crc32=zlib.crc32(data))


async def wrong_bytes(request: pb.PullBlocksRequest) -> AsyncIterator[pb.KvBlock]:
    yield good(request, 0)
    block = good(request, 1)
    block.data = bytes(len(block.data))
    yield block


async def too_short(request: pb.PullBlocksRequest) -> AsyncIterator[pb.KvBlock]:
    block = good(request, 0)
    data = block.data[:-8]
    yield pb.KvBlock(digest=block.digest, data=data, crc32=zlib.crc32(data))


async def wrong_order(request: pb.PullBlocksRequest) -> AsyncIterator[pb.KvBlock]:
    yield good(request, 1)


async def breaks_off(request: pb.PullBlocksRequest) -> AsyncIterator[pb.KvBlock]:
    yield good(request, 0)
    yield good(request, 1)
    raise RuntimeError("the test's source gives up")


async def falls_silent(request: pb.PullBlocksRequest) -> AsyncIterator[pb.KvBlock]:
    yield good(request, 0)
    await asyncio.sleep(3600)


@asynccontextmanager
async def a_source(blocks: Blocks) -> AsyncIterator[pb.PullHint]:
    class PullSource(worker_pb2_grpc.WorkerServicer):
        async def PullBlocks(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
            async for block in blocks(request):
                yield block

    server = new_server()
    worker_pb2_grpc.add_WorkerServicer_to_server(PullSource(), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    yield pb.PullHint(worker_id="source", incarnation="i", address=f"127.0.0.1:{port}", tokens=CACHED)
    await server.stop(None)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        (wrong_bytes, "corrupt"),
        (too_short, "corrupt"),
        (wrong_order, "corrupt"),
        (breaks_off, "error"),
        (falls_silent, "timeout"),
    ],
)
async def test_a_source_that_misbehaves_changes_no_token(redis_url: str, blocks: Blocks, reason: str) -> None:
    async with a_worker(redis_url) as (two, target), a_source(blocks) as hint:
        assert is_right(await target.complete(PROMPT, pull=hint))
        assert await metric(two, "pull_failures", reason=reason) == 1
        assert is_right(await target.complete(PROMPT))
        assert (await target.state()).kv_blocks_used == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ZeroDivisionError("planted"), "error"),
        (RanksFailedError(RankFailure(0, FailureKind.EXITED, "planted")), "ranks_lost"),
    ],
)
async def test_a_mistake_of_ours_in_a_pull_changes_no_token(redis_url: str, error: Exception, reason: str) -> None:
    async def write(*_blocks: object) -> None:
        raise error

    async with a_worker(redis_url) as (one, source), a_worker(redis_url) as (two, target):
        await source.complete(PROMPT)
        two.group.write_blocks = write
        assert is_right(await target.complete(PROMPT, pull=await hint_of(source, one.address)))
        assert await metric(two, "pull_failures", reason=reason) == 1
        assert (await target.state()).kv_blocks_used == 0


async def test_neighbours_go_on_while_a_request_waits_for_its_blocks(redis_url: str) -> None:
    async with a_worker(redis_url) as (_, target), a_source(falls_silent) as hint:
        waiting = await target.submit(PROMPT, pull=hint)
        neighbours = [await target.complete([7, i]) for i in range(5)]
        assert all(len(answer.ids) == N for answer in neighbours)
        assert not waiting.outputs
        await waiting.end.wait()
        assert is_right(waiting)


async def test_request_cancelled_during_its_pull_leaves_no_blocks_behind(redis_url: str) -> None:
    """Its blocks come later, and are not written."""
    goes_on = asyncio.Event()

    async def late(request: pb.PullBlocksRequest) -> AsyncIterator[pb.KvBlock]:
        await goes_on.wait()
        for index in range(len(request.digests)):
            yield good(request, index)

    async with a_worker(redis_url) as (two, target), a_source(late) as hint:
        waiting = await target.submit(PROMPT, pull=hint)
        await target.wait_state(lambda state: state.waiting == 1)
        await target.cancel(waiting)
        await target.wait_state(lambda state: state.waiting == 0)
        goes_on.set()
        await target.wait_state(lambda state: state.kv_blocks_used == 0)
        assert not waiting.outputs
        assert await metric(two, "pulled_blocks") == 0
        assert cached(await target.complete(PROMPT)) == 0


async def test_ranks_lost_on_either_side_hand_off_or_compute(redis_url: str) -> None:
    async with a_worker(redis_url) as (one, source), a_worker(redis_url) as (two, target):
        await source.complete(PROMPT)
        one.group.step_s = 0.5
        hint = await hint_of(source, one.address)
        waiting = await target.submit(PROMPT, pull=hint)
        await until(lambda: one.group.n_reads)
        one.group.die()
        await waiting.end.wait()
        assert is_right(waiting)
        assert await metric(two, "pull_failures", reason="unreachable") == 1
        await source.wait_serving()


async def test_a_reader_that_goes_away_lets_go_of_the_blocks(redis_url: str) -> None:
    async with a_worker(redis_url) as (one, source):
        await source.complete(PROMPT)
        one.group.step_s = 2.0  # the first one reads still when the last one asks
        async with open_channel(one.address) as channel:
            reading = worker_pb2_grpc.WorkerStub(channel).PullBlocks(await _request(source))
            await until(lambda: one.group.n_reads)
            assert (await source.state()).kv_blocks_used > 0
            others = [worker_pb2_grpc.WorkerStub(channel).PullBlocks(await _request(source)) for _ in range(3)]
            await until(lambda: one.group.n_reads == 4)
            with pytest.raises(grpc.aio.AioRpcError, match="4 workers are reading already"):
                await anext(aiter(source.stub.PullBlocks(await _request(source))))
            for call in (reading, *others):
                call.cancel()
        await source.wait_state(lambda state: state.kv_blocks_used == 0)


async def _request(gateway: FakeGateway) -> pb.PullBlocksRequest:
    """For all of PROMPT, by a twin of the worker."""
    state, card = await gateway.state(), await gateway.stub.GetModelCard(pb.GetModelCardRequest())
    layout = pb.KvLayout(
        hash_root=card.hash_root, device="cpu", tensor_parallel=1, block_tokens=BLOCK, block_bytes=8 * BLOCK
    )
    digests = extend_chain(chain_root(card.hash_root), PROMPT)
    return pb.PullBlocksRequest(digests=digests, incarnation=state.incarnation, layout=layout)
