"""Asks workers whether an adapter fits their model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import grpc.aio
from ryzanstein.v1 import routing_pb2, worker_pb2, worker_pb2_grpc

from services.common.adapters import RegisteredAdapter
from services.common.rpc import open_channel
from services.common.tls.credentials import Tls
from services.gateway.errors import ApiError, invalid, unavailable

_INSPECT_S = 60.0  # a digest reads the whole file


async def inspect(
    views: Sequence[routing_pb2.WorkerView], name: str, base: str, source: str, tls: Tls | None
) -> RegisteredAdapter:
    """Check an adapter on all serving workers of its base; raises :class:`ApiError` if one cannot load it."""
    serving = [view for view in views if view.model == base and view.state.phase == worker_pb2.PHASE_SERVING]
    if not serving:
        raise unavailable(f"No worker serves the model `{base}` at the moment.")
    adapters = await asyncio.gather(*(_inspect_on(view, source, tls) for view in serving))
    digests = {adapter.digest for adapter in adapters}
    if len(digests) > 1:
        raise invalid(f"`lora_path`: workers see different adapters in {source}.", "lora_path")
    return RegisteredAdapter(name, base, adapters[0].digest, source)


async def _inspect_on(view: routing_pb2.WorkerView, source: str, tls: Tls | None) -> worker_pb2.Adapter:
    request = worker_pb2.InspectAdapterRequest(source=source)
    async with open_channel(view.address, to="worker", tls=tls) as channel:
        try:
            return await worker_pb2_grpc.WorkerStub(channel).InspectAdapter(request, timeout=_INSPECT_S)
        except grpc.aio.AioRpcError as error:
            raise _explained(error, view.worker_id) from error


def _explained(error: grpc.aio.AioRpcError, worker_id: str) -> ApiError:
    if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
        return invalid(f"`lora_path`: worker {worker_id}: {error.details()}", "lora_path")
    return unavailable(f"Worker {worker_id} did not check the adapter: {error.details()}")
