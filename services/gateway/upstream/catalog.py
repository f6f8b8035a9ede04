"""The known models. Cards come from workers, and from the store while a model has none; workers' list from routers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection
from typing import Protocol

import grpc.aio
from ryzanstein.v1 import routing_pb2, worker_pb2, worker_pb2_grpc

from services.common.adapters import RegisteredAdapter
from services.common.rpc import open_channel
from services.common.tls.credentials import Tls
from services.gateway.errors import unavailable, unknown_model
from services.gateway.ids import new_id
from services.gateway.text.codec import ModelCardError, ServedModel
from services.gateway.upstream.cards import Cards, StoredCard
from services.gateway.upstream.connection import WorkerPool, WorkerRef
from services.gateway.upstream.patience import StartPatience
from services.gateway.upstream.router import NoWorkerError, RouterClient
from services.gateway.upstream.workers import WorkerList, ref_of

log = logging.getLogger(__name__)

_CARD_TIMEOUT_S = 10.0
_WITH_CARD = (worker_pb2.PHASE_SERVING, worker_pb2.PHASE_SLEEPING, worker_pb2.PHASE_WAKING)
REFRESH_S = 1.0
STORE_EVERY_S = 600.0  # a card is stored again
_FIRST_REFRESH_S = 0.1


class Adapters(Protocol):
    """The adapters that were loaded while the installation runs."""

    async def read(self) -> dict[str, RegisteredAdapter] | None:
        """All by name; None: they cannot be read now."""

    async def find(self, name: str) -> RegisteredAdapter | None:
        """One; None if there is none, or it cannot be read now."""


class Catalog:
    """Served models by name, refreshed in the background.

    `ready` becomes true, for good, once a router has listed the workers and, if a worker serves, one of the cards is
    loaded. A gateway without workers is also ready: a 503 with Retry-After is more useful than a refused connection.
    """

    def __init__(
        self, router: RouterClient, pool: WorkerPool, adapters: Adapters, cards: Cards, tls: Tls | None = None
    ) -> None:
        self._tls = tls
        self._router = router
        self._pool = pool
        self._adapter_store = adapters
        self._cards = cards
        self._written: dict[str, tuple[str, float]] = {}  # by model, digest and time of the card that was stored last
        self._registered: dict[str, RegisteredAdapter] = {}  # loaded while the installation runs
        self._reading = asyncio.Lock()  # no older reading of adapters replaces a newer one
        self._adapted: dict[str, ServedModel] = {}  # models of adapters, as last made
        self._dismissed: frozenset[str] = frozenset()  # no longer expected; kept while a worker serves them
        self._adopting = asyncio.Lock()
        # A model stays known after its last worker leaves, so that requests get 503 and not 404.
        self._models: dict[str, ServedModel] = {}
        self._digests: dict[str, str] = {}  # digests of the cards, by model
        self._sources: dict[str, WorkerRef] = {}
        self._troubles: dict[str, str | None] = {}  # the last logged error of each worker
        self.ready = False

    async def find(
        self, name: str, tenant: str = "", allowed: Collection[str] = (), patience: StartPatience | None = None
    ) -> ServedModel:
        """A model by name (empty: the only one); raises :class:`ApiError` 404, or 503 before any is known.

        A request for an expected model, or for one whose first workers start, waits in the routers' queue, and is
        counted there.
        """
        if not name and not self._models and len(awaited := self._router.listed.awaited) == 1:
            name = next(iter(awaited))
        if name not in self._models and self.expects(name):
            await self._recall(name)
            if name not in self._models:
                await self._wait_for(name, tenant, patience or StartPatience())
        await self.look_up(name)
        return self.get(name, allowed)

    def get(self, name: str, allowed: Collection[str] = ()) -> ServedModel:
        """A model by name, without waiting. If `allowed` is not empty, the error lists only those models."""
        if not self._models:
            raise unavailable("no model is being served yet")
        if not name and len(self._models) == 1:
            return next(iter(self._models.values()))
        model = self._models.get(name) or self._with_adapter(name)
        if model is None:
            if self._router.listed.expected is None:
                raise unavailable("The models of this installation are not known yet.")
            raise unknown_model(name, list(self.listed(allowed)))
        return model

    def expects(self, name: str) -> bool:
        """Whether requests for the model wait for a worker."""
        return name in self._router.listed.awaited

    def knows(self, name: str) -> bool:
        """Whether the model's card is known."""
        return name in self._models or name in self.adapters()

    def adapters(self) -> dict[str, RegisteredAdapter]:
        """All adapters by name: those of workers' settings, and those that were loaded later."""
        fixed = {
            adapter.name: RegisteredAdapter(adapter.name, base, adapter.digest, adapter.source, adapter.pinned)
            for base, model in self._models.items()
            for adapter in model.card.adapters
        }
        adapters = self._registered | fixed
        return {name: adapter for name, adapter in adapters.items() if name not in self._models}

    def adapter_slots(self, base: str) -> int:
        """How many slots for adapters a worker of a model has; 0: none, or not known."""
        model = self._models.get(base)
        return model.card.adapter_slots if model else 0

    async def read_adapters(self) -> None:
        """Read the registry again; the last known list stays while Redis is away."""
        async with self._reading:
            registered = await self._adapter_store.read()
            if registered is not None:
                self._registered = registered

    async def look_up(self, name: str) -> None:
        """Know an adapter that is unknown here, if another gateway has loaded it a moment ago."""
        if not name or self.knows(name) or self.expects(name):
            return
        async with self._reading:
            if not self.knows(name) and (adapter := await self._adapter_store.find(name)):
                self._registered = {**self._registered, name: adapter}

    def _with_adapter(self, name: str) -> ServedModel | None:
        """The model of an adapter; None if there is no such adapter, or no worker has ever served its base."""
        adapter = self.adapters().get(name)
        base = self._models.get(adapter.base) if adapter else None
        if adapter is None or base is None:
            self._adapted.pop(name, None)
            return None
        made = self._adapted.get(name)
        if made is None or made.adapter != adapter or made.tokenizer is not base.tokenizer:
            made = self._adapted[name] = base.adapted(adapter)
        return made

    def available(self) -> list[ServedModel]:
        """The models that have a worker now, in no order."""
        live = self._router.listed.models
        models = [model for name, model in self._models.items() if name in live]
        named = [adapter.name for adapter in self.adapters().values() if adapter.base in live]
        return models + [model for name in named if (model := self._with_adapter(name)) is not None]

    def listed(self, allowed: Collection[str] = ()) -> dict[str, ServedModel | None]:
        """The available and the awaited models; None for one that no worker has served yet.

        Clients may take the first one for a chat: models that generate, then those that embed, then adapters.
        If `allowed` is not empty, only those models.
        """
        models: dict[str, ServedModel | None] = {name: self._models.get(name) for name in self._router.listed.awaited}
        models |= {model.name: model for model in self.available()}
        adapters = self.adapters()

        def order(name: str) -> tuple[bool, bool, str]:
            model = models[name]
            return name in adapters, bool(model and model.card.only_embeds), name

        return {name: models[name] for name in sorted(models, key=order) if not allowed or name in allowed}

    def phase(self, name: str) -> str:
        """The phase of a model's worker, or of its base's, that is nearest to serving; "" without a worker."""
        adapter = self.adapters().get(name)
        return self._router.listed.phase(adapter.base if adapter else name)

    async def _wait_for(self, name: str, tenant: str, patience: StartPatience) -> None:
        """Wait until the model is known; raises :class:`ApiError` (503) when the routers' queue gives up."""
        request = routing_pb2.RouteRequest(request_id=new_id("wait"), model=name, tenant=tenant, attempt=1)
        try:
            ref = (await self._router.route(request, patience)).ref
            async with self._adopting:  # all waiting requests share one fetched card
                if name not in self._models:
                    await self._adopt(StoredCard.of(await _fetch_card(ref.address, self._tls)), ref)
        except NoWorkerError as error:
            raise unavailable(f"No worker serves the model `{name}` at the moment.", error.retry_after_s) from error
        except (grpc.aio.AioRpcError, ModelCardError) as error:
            self._complain(ref.worker_id, error)
            raise unavailable(f"The first worker of the model `{name}` cannot be used yet.") from error

    async def run(self) -> None:
        """Refresh until cancelled, in short intervals while no model is known."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_S if self._models else _FIRST_REFRESH_S)

    async def refresh(self) -> None:
        """Refresh the list of workers, and the cards of models that are new or whose worker has left."""
        expected = self._router.listed.expected or frozenset()
        workers = await self._router.list_workers()
        await self.read_adapters()  # also while no router answers
        if workers is None:
            return
        self._dismissed = (self._dismissed | expected) - (workers.expected or frozenset())
        live = workers.refs
        for name in self._dismissed - workers.models:
            self._models.pop(name, None)
            self._digests.pop(name, None)
            self._sources.pop(name, None)
        for name in sorted(workers.models):
            if self._sources.get(name) not in live:
                await self._load(name, workers)
        await self._exchange(workers.awaited, live)
        await self._pool.keep(live)
        self.ready = self.ready or bool(self._models) or not workers.anybody_serves

    async def _load(self, name: str, workers: WorkerList) -> None:
        for view in workers.views:
            if view.model != name or view.state.phase not in _WITH_CARD:
                continue
            try:
                await self._adopt(StoredCard.of(await _fetch_card(view.address, self._tls)), ref_of(view))
                return
            except (grpc.aio.AioRpcError, ModelCardError) as error:
                self._complain(view.worker_id, error)

    def _complain(self, worker_id: str, error: grpc.aio.AioRpcError | ModelCardError) -> None:
        """Log an error once, not at each try."""
        reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        if self._troubles.get(worker_id) != reason:
            self._troubles[worker_id] = reason
            log.warning("no model card from %s: %s", worker_id, reason)

    async def _exchange(self, awaited: Collection[str], live: Collection[WorkerRef]) -> None:
        """Store cards that came from workers, and read those of models that wait for workers.

        A card is stored once, since workers of two revisions may serve a model during an upgrade, and from time to
        time again: routers know a model without workers by the age of its card.
        """
        stored = await self._cards.digests()
        if stored is None:
            return
        now = asyncio.get_running_loop().time()
        for name in awaited:
            digest, known = stored.get(name, ""), self._digests.get(name, "")
            if self._sources.get(name) not in live:
                if digest not in ("", known):
                    await self._recall(name)
                continue
            written, at = self._written.get(name, ("", -math.inf))
            due = not digest or known != written or now > at + STORE_EVERY_S
            if due and await self._cards.write(StoredCard(self._models[name].card, known)):
                self._written[name] = known, now

    async def _recall(self, name: str) -> None:
        """Know a model by its stored card, if there is one that can be used."""
        stored = await self._cards.read(name)
        if stored is not None:
            try:
                await self._adopt(stored, None)
            except ModelCardError as error:
                self._complain("the store", error)

    async def _adopt(self, stored: StoredCard, source: WorkerRef | None) -> None:
        """Know a model by a card of a worker, or of the store."""
        name, place = stored.card.model, source.worker_id if source else "the store"
        if self._digests.get(name) != stored.digest:
            self._models[name] = await asyncio.to_thread(ServedModel.from_card, stored.card)
            self._digests[name] = stored.digest
            log.info("model %s: %d tokens of context, card from %s", name, stored.card.max_model_len, place)
        if source is not None:
            self._sources[name] = source
        self._troubles.pop(place, None)


async def _fetch_card(address: str, tls: Tls | None) -> worker_pb2.ModelCard:
    async with open_channel(address, to="worker", tls=tls) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        card: worker_pb2.ModelCard = await stub.GetModelCard(worker_pb2.GetModelCardRequest(), timeout=_CARD_TIMEOUT_S)
        return card
