"""The parts of a gateway that serve fine-tuning jobs: routes, a store, and a runner."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI

from services.common.fine_tuning.store import TuningStore
from services.gateway.asgi import ASGIApp
from services.gateway.batches.files import FileStore
from services.gateway.billing.meter import Meter
from services.gateway.fine_tuning.publishing import Publisher
from services.gateway.fine_tuning.routes import DOCUMENTED, PATH, FineTuningHandler, add_fine_tuning
from services.gateway.fine_tuning.runner import FineTuningRunner
from services.gateway.generation.entrance import Entrance
from services.gateway.http.adapters import AdapterAdmin
from services.gateway.http.documentation import Documentation
from services.gateway.http.endpoint import Endpoint, JsonEndpoint
from services.gateway.http.exchange import BodyLimits


class FineTuning:
    """The routes, store and runner of fine-tuning jobs, whose files are those of batches."""

    def __init__(self, files: FileStore, admin: AdapterAdmin) -> None:
        self._files, self._admin = files, admin
        self._store = TuningStore(files.guard.client, files.keys, files.guard.run, files.limits.life_s)
        self._woken = asyncio.Event()

    @property
    def documented(self) -> dict[str, Documentation]:
        """The routes that take JSON."""
        return {PATH: DOCUMENTED}

    def endpoints(self, entrance: Entrance, limits: BodyLimits) -> dict[str, Endpoint]:
        """The hot routes."""
        handler = FineTuningHandler(self._store, self._files, entrance.gate.credential, self._woken.set)
        return {PATH: JsonEndpoint(entrance, limits, handler)}

    def add_routes(self, app: FastAPI) -> None:
        """Add all other routes."""
        add_fine_tuning(app, self._store)

    async def run(self, routes: ASGIApp, meter: Meter, gateway_id: str) -> None:
        """Check and publish jobs until cancelled; requests of validations go to `routes`, trained tokens to `meter`."""
        publisher = Publisher(self._store, self._files, self._admin, routes)
        await FineTuningRunner(self._store, self._files, publisher, meter, gateway_id, self._woken).run()
