"""Which models there are: cards come from workers, workers from the routers' list."""

from __future__ import annotations

import asyncio
import logging

import grpc.aio
from ryzanstein.v1 import worker_pb2, worker_pb2_grpc

from services.common.rpc import open_channel
from services.gateway.errors import unavailable, unknown_model
from services.gateway.text.codec import ModelCardError, ServedModel
from services.gateway.upstream.connection import WorkerPool, WorkerRef
from services.gateway.upstream.fleet import Fleet, ref_of
from services.gateway.upstream.router import RouterClient

log = logging.getLogger(__name__)

_CARD_TIMEOUT_S = 10.0
_FIRST_REFRESH_S = 0.1


class Catalog:
    """Served models by name, renewed in the background.

    `ready` once a router has said which workers there are, and the card of a model is here if any serves one; it stays.
    Without workers a gateway is ready, too: its 503 with Retry-After tells clients more than a refused connection does.
    """

    def __init__(self, router: RouterClient, pool: WorkerPool) -> None:
        self._router = router
        self._pool = pool
        # A model stays known when its last worker goes, so that requests hear 503 and not 404.
        self._models: dict[str, ServedModel] = {}
        self._sources: dict[str, WorkerRef] = {}
        self._troubles: dict[str, str | None] = {}  # by worker, as last logged
        self.ready = False

    def get(self, name: str) -> ServedModel:
        """A model by name (empty: the only one); raises :class:`ApiError` 404, or 503 before any is known."""
        if not self._models:
            raise unavailable("no model is being served yet")
        if not name and len(self._models) == 1:
            return next(iter(self._models.values()))
        model = self._models.get(name)
        if model is None:
            raise unknown_model(name, sorted(self._models))
        return model

    def available(self) -> list[ServedModel]:
        """Models that have a worker now."""
        live = self._router.fleet.models()
        return [model for name, model in sorted(self._models.items()) if name in live]

    async def run(self, every_s: float) -> None:
        """Renew until cancelled; quickly while nothing is known."""
        while True:
            await self.refresh()
            await asyncio.sleep(every_s if self._models else min(every_s, _FIRST_REFRESH_S))

    async def refresh(self) -> None:
        """Renew the list of workers and the cards of models that are new or whose worker has gone."""
        fleet = await self._router.list_workers()
        if fleet is None:
            return
        live = fleet.refs()
        for name in sorted(fleet.models()):
            if self._sources.get(name) not in live:
                await self._load(name, fleet)
        await self._pool.keep(live)
        self.ready = self.ready or bool(self._models) or not fleet.anybody_serves

    async def _load(self, name: str, fleet: Fleet) -> None:
        for view in fleet.workers:
            if view.model != name or view.state.phase != worker_pb2.PHASE_SERVING:
                continue
            try:
                await self._adopt(await _fetch_card(view.address), ref_of(view))
                return
            except (grpc.aio.AioRpcError, ModelCardError) as error:
                self._complain(view.worker_id, error)

    def _complain(self, worker_id: str, error: grpc.aio.AioRpcError | ModelCardError) -> None:
        """One line per trouble, not per try."""
        reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        if self._troubles.get(worker_id) != reason:
            self._troubles[worker_id] = reason
            log.warning("no model card from %s: %s", worker_id, reason)

    async def _adopt(self, card: worker_pb2.ModelCard, source: WorkerRef) -> None:
        known = self._models.get(card.model)
        if known is None or _identity(known.card) != _identity(card):
            self._models[card.model] = await asyncio.to_thread(ServedModel.from_card, card)
            log.info("model %s: %d tokens of context, card from %s", card.model, card.max_model_len, source.worker_id)
        self._sources[card.model] = source
        self._troubles.pop(source.worker_id, None)


def _identity(card: worker_pb2.ModelCard) -> tuple[object, ...]:
    """What makes two cards the same model for the gateway."""
    return (
        card.hash_root,
        card.tokenizer_json,
        card.chat_template,
        dict(card.special_tokens),
        card.max_model_len,
        tuple(card.eos_token_ids),
        card.add_bos_token,
    )


async def _fetch_card(address: str) -> worker_pb2.ModelCard:
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        card: worker_pb2.ModelCard = await stub.GetModelCard(worker_pb2.GetModelCardRequest(), timeout=_CARD_TIMEOUT_S)
        return card
