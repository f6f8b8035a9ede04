"""Over a real gRPC server that answers when and in the order a test wants."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from ryzanstein.v1 import kv_pb2 as pb
from ryzanstein.v1 import kv_pb2_grpc

from services.common import shared_call
from services.common.batches import MAX_BATCH
from services.common.rpc import bind, new_server, open_channel
from services.common.shared_call import CallBrokenError, Lookups, PeerSilentError, SharedCall, share_lookups

PATIENCE_S = 60.0


class Peer(kv_pb2_grpc.KvCoordinatorServicer):
    """Answers with the request's first hash as a depth, once `release` is called for it."""

    def __init__(self) -> None:
        self.asked: list[pb.LookupRequest] = []
        self.answers: asyncio.Queue[pb.LookupResponse | None] = asyncio.Queue()
        self.n_calls = self.n_messages = 0

    async def Lookup(  # noqa: N802
        self, messages: AsyncIterator[pb.LookupRequests], context: object
    ) -> AsyncIterator[pb.LookupResponses]:
        self.n_calls += 1
        reading = asyncio.create_task(self._read(messages))
        while (answer := await self.answers.get()) is not None:
            yield pb.LookupResponses(responses=[answer])
        reading.cancel()

    async def _read(self, messages: AsyncIterator[pb.LookupRequests]) -> None:
        async for message in messages:
            self.n_messages += 1
            self.asked.extend(message.requests)

    def release(self, request: pb.LookupRequest) -> None:
        depth = pb.WorkerDepth(worker_id="w", blocks=request.hashes[0])
        self.answers.put_nowait(pb.LookupResponse(tag=request.tag, depths=[depth]))

    async def until_asked(self, n: int) -> None:
        while len(self.asked) < n:  # noqa: ASYNC110  # the other side of a connection
            await asyncio.sleep(0.01)


@pytest.fixture
async def peer() -> AsyncIterator[tuple[Peer, Lookups]]:
    peer, server = Peer(), new_server()
    kv_pb2_grpc.add_KvCoordinatorServicer_to_server(peer, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = share_lookups(kv_pb2_grpc.KvCoordinatorStub(channel))
        yield peer, call
        await call.close()
    await server.stop(None)


async def test_every_caller_gets_its_own_answer_in_any_order(peer: tuple[Peer, Lookups]) -> None:
    there, call = peer
    asking = [call.ask(pb.LookupRequest(hashes=[i]), PATIENCE_S) for i in range(100)]
    await there.until_asked(100)
    for request in random.Random(0).sample(there.asked, 100):
        there.release(request)
    assert [answer.depths[0].blocks for answer in await asyncio.gather(*asking)] == list(range(100))
    assert there.n_calls == 1
    assert 100 / MAX_BATCH <= there.n_messages < 10, "those that wait at the same time travel together"


async def test_requests_gather_while_a_message_is_unanswered(
    peer: tuple[Peer, Lookups], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_call, "MERGE_S", PATIENCE_S)
    there, call = peer
    asking = []
    for i in range(10):
        asking.append(call.ask(pb.LookupRequest(hashes=[i]), PATIENCE_S))
        await there.until_asked(1)
        await asyncio.sleep(0.01)  # a message would leave meanwhile
    there.release(there.asked[0])
    await there.until_asked(10)
    assert there.n_messages == 2
    for request in there.asked[1:]:
        there.release(request)
    await asyncio.gather(*asking)


async def test_a_message_that_stays_unanswered_holds_none_up(peer: tuple[Peer, Lookups]) -> None:
    there, call = peer
    asking = []
    for i in range(3):
        asking.append(call.ask(pb.LookupRequest(hashes=[i]), PATIENCE_S))
        await there.until_asked(i + 1)
    for request in there.asked:
        there.release(request)
    await asyncio.gather(*asking)


async def test_a_late_answer_disturbs_no_caller(peer: tuple[Peer, Lookups]) -> None:
    there, call = peer
    with pytest.raises(TimeoutError):
        await call.ask(pb.LookupRequest(hashes=[1]), 0.2)
    other = call.ask(pb.LookupRequest(hashes=[2]), PATIENCE_S)
    await there.until_asked(2)
    for request in there.asked:
        there.release(request)
    assert (await other).depths[0].blocks == 2


@pytest.mark.parametrize("politely", [True, False])
async def test_the_end_of_the_call_ends_every_waiting_request(peer: tuple[Peer, Lookups], politely: bool) -> None:
    there, call = peer
    asking = [call.ask(pb.LookupRequest(hashes=[i]), PATIENCE_S) for i in range(3)]
    await there.until_asked(3)
    if politely:
        there.answers.put_nowait(None)
    else:
        await call.close()
    for result in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(result, CallBrokenError)
    assert call.broken
    with pytest.raises(CallBrokenError):
        await call.ask(pb.LookupRequest(hashes=[4]), PATIENCE_S)


async def test_a_peer_that_is_not_there_is_said_at_once() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        call = share_lookups(kv_pb2_grpc.KvCoordinatorStub(channel))
        with pytest.raises(CallBrokenError, match="UNAVAILABLE"):
            await call.ask(pb.LookupRequest(hashes=[1]), PATIENCE_S)


@pytest.mark.parametrize("beats", [True, False])
async def test_only_a_peer_that_sends_heartbeats_is_given_up_for_its_silence(beats: bool) -> None:
    peer, server = Peer(), new_server()
    kv_pb2_grpc.add_KvCoordinatorServicer_to_server(peer, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = kv_pb2_grpc.KvCoordinatorStub(channel)
        call: Lookups = SharedCall(
            stub.Lookup, lambda some: pb.LookupRequests(requests=some), lambda message: message.responses, silent_s=1.5
        )
        if beats:
            peer.answers.put_nowait(pb.LookupResponse())
        await asyncio.sleep(2.0)  # no request waits, so no message is due
        first = call.ask(pb.LookupRequest(hashes=[1]), PATIENCE_S)
        await peer.until_asked(1)
        if beats:
            for _ in range(8):
                await asyncio.sleep(0.25)
                peer.answers.put_nowait(pb.LookupResponse())
            assert not first.done(), "it is alive and takes its time"
            with pytest.raises(PeerSilentError):
                await first
            assert call.broken
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(first), 2.5)
        await call.close()
        first.exception()
    await server.stop(None)
