"""The parts of a gateway that serve files and batches: routes, a store, and a runner."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI

from services.common.keys import RedisKeys
from services.common.redis_client import open_redis
from services.gateway.asgi import ASGIApp
from services.gateway.batches.file_routes import UploadEndpoint, add_files
from services.gateway.batches.files import FileStore, StorageLimits
from services.gateway.batches.routes import DOCUMENTED, PATH, BatchHandler, add_batches
from services.gateway.batches.run import BatchContext
from services.gateway.batches.runner import BatchRunner
from services.gateway.batches.store import BatchStore
from services.gateway.drain import Drain
from services.gateway.generation.entrance import Entrance
from services.gateway.http.documentation import Documentation
from services.gateway.http.endpoint import Endpoint, JsonEndpoint
from services.gateway.http.exchange import BodyLimits
from services.gateway.settings import GatewaySettings
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.redis_guard import RedisGuard
from services.gateway.tenants.tenant import Gate

_TIMEOUT_S = 5.0  # for a Redis operation: longer than for admission, since no client waits for it


class Batches:
    """The routes, store and runner of batches, when batches are enabled."""

    def __init__(self, settings: GatewaySettings, keys: RedisKeys, metrics: GatewayMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._redis = open_redis(settings.redis, _TIMEOUT_S)
        guard = RedisGuard(self._redis, settings.redis, _TIMEOUT_S, metrics, "batches wait until it is back")
        limits = StorageLimits(
            total=settings.batch_storage_bytes,
            tenant=settings.batch_tenant_bytes,
            file=settings.batch_file_bytes,
            life_s=settings.batch_file_life_s,
        )
        self._store = BatchStore(FileStore(guard, keys, limits))
        self._woken = asyncio.Event()

    @property
    def files(self) -> FileStore:
        """The files of batches and fine-tuning jobs."""
        return self._store.files

    @property
    def documented(self) -> dict[str, Documentation]:
        """The routes that take JSON."""
        return {PATH: DOCUMENTED}

    def endpoints(self, entrance: Entrance, limits: BodyLimits) -> dict[str, Endpoint]:
        """The hot routes."""
        handler = BatchHandler(self._store, entrance.gate.credential, self._woken.set)
        return {
            "/v1/files": UploadEndpoint(self._store.files, entrance, limits.timeout_s),
            PATH: JsonEndpoint(entrance, limits, handler),
        }

    def add_routes(self, app: FastAPI) -> None:
        """Add all other routes."""
        add_files(app, self._store.files)
        add_batches(app, self._store, self._woken.set)

    async def run(self, routes: ASGIApp, gate: Gate, gateway_id: str, drain: Drain) -> None:
        """Run batches until cancelled; their requests go to `routes`."""
        settings = self._settings
        context = BatchContext(
            store=self._store,
            routes=routes,
            gate=gate,
            slots=asyncio.Semaphore(settings.batch_concurrency),
            concurrency=settings.batch_concurrency,
            max_line_bytes=settings.max_body_bytes,
            metrics=self._metrics,
        )
        await BatchRunner(context, gateway_id, drain, self._woken).run()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._redis.aclose()
