"""Detects when an installation has recovered from a fault."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import grpc
import psutil
from redis.asyncio import Redis
from redis.exceptions import RedisError
from ryzanstein.v1 import kv_pb2, kv_pb2_grpc, routing_pb2, routing_pb2_grpc

from bench.soaking.faults import Struck, pids_of
from services.common.rpc import open_channel
from tests.stack import RunningStack

_POLL_S = 0.1
_TIMEOUT_S = 1.0
_SETTLED_S = 1.0  # longer than a service may report its state from before the fault


@dataclass(frozen=True)
class Health:
    """Asks the control services for their health; close it with :meth:`aclose`."""

    stack: RunningStack
    workers: int
    router: grpc.aio.Channel
    coordinator: grpc.aio.Channel
    redis: Redis

    @classmethod
    def of(cls, stack: RunningStack, workers: int) -> Health:
        """Connect to the services. Restarted processes keep their addresses, so the connections last."""
        state = stack.state
        redis = Redis(unix_socket_path=str(stack.folder / "redis.sock"), socket_timeout=_TIMEOUT_S)
        return cls(stack, workers, open_channel(state["router"]), open_channel(state["coordinator"]), redis)

    async def aclose(self) -> None:
        """Close the connections."""
        await asyncio.gather(self.router.close(), self.coordinator.close(), self.redis.aclose())

    async def whole(self) -> bool:
        """Whether Redis and the coordinator answer, and all workers are eligible at the router."""
        try:
            await self.redis.ping()
            await kv_pb2_grpc.KvCoordinatorStub(self.coordinator).Stats(kv_pb2.StatsRequest(), timeout=_TIMEOUT_S)
            seen = await routing_pb2_grpc.RouterStub(self.router).ListWorkers(
                routing_pb2.ListWorkersRequest(), timeout=_TIMEOUT_S
            )
        except (grpc.aio.AioRpcError, RedisError, OSError):
            return False
        return sum(worker.eligible for worker in seen.workers) >= self.workers

    def replaced(self, struck: Struck) -> bool:
        """Whether a new process has replaced the victim; True if the fault needs no replacement."""
        if not struck.fault.replaces:
            return True
        try:
            now = pids_of(self.stack, struck.fault)
        except psutil.NoSuchProcess:
            return False
        return bool(now) and not set(now) & set(struck.pids)

    async def recovered(self, struck: Struck, timeout_s: float) -> float | None:
        """Seconds until the installation was whole and stayed so; None if that takes longer than `timeout_s`."""
        began = time.monotonic()
        since: float | None = None
        while time.monotonic() - began < timeout_s:
            if await asyncio.to_thread(self.replaced, struck) and await self.whole():
                since = since or time.monotonic()
                if time.monotonic() - since >= _SETTLED_S:
                    return since - began
            else:
                since = None
            await asyncio.sleep(_POLL_S)
        return None
