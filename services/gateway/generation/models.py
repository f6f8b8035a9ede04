"""Which model answers: the one that a request names or its route chooses, or a fallback where that one cannot."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from msgspec import Struct

from services.gateway.errors import NO_MODEL, NO_WORKERS, ApiError, model_not_allowed, no_worker, unknown_model
from services.gateway.generation.mirroring import Mirrors
from services.gateway.names.picking import Origin, fraction, pick
from services.gateway.names.route import WAIT_S, Condition, External, Mirror, ModelRoute
from services.gateway.names.table import RouteTable
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.tenant import Tenant
from services.gateway.text.codec import ServedModel
from services.gateway.upstream.catalog import Catalog
from services.gateway.upstream.patience import StartPatience

NEVER: frozenset[Condition] = frozenset()
# Conditions of fallbacks by the code of an error. Not "poison": the request would break the next model's workers.
_CONDITIONS: dict[str | None, Condition] = {
    NO_WORKERS: "no_worker",
    "overloaded": "overloaded",
    "context_length_exceeded": "context_too_long",
    "generation_failed": "error",
    "resume_budget": "error",
}


def check_permission(name: str, tenant: Tenant) -> None:
    """Raises :class:`ApiError` (403) when the tenant may not use the model."""
    if name and tenant.models and name not in tenant.models:
        raise model_not_allowed(name, tenant.models)


class ChainLink(Struct, frozen=True):
    """A model of a chain."""

    model: str
    when: frozenset[Condition] = NEVER  # conditions on which it takes over
    routed: bool = False  # a route names it, and not the request
    external: External | None = None  # the API elsewhere that has the model


class Chain(Struct, frozen=True):
    """The models that may answer a request of a tenant, in order; only the first one has no conditions."""

    name: str  # as the request gives it
    links: tuple[ChainLink, ...]
    wait_s: float | None = None  # longest search for a worker where a later link would take over; None: no limit
    mirror: Mirror | None = None  # None also for a request that is not drawn
    patience_s: float | None = None  # longest wait for a model that starts; None: by the gateway's settings

    @property
    def routed(self) -> bool:
        """Whether the name is a route's."""
        return self.links[0].routed


class ChainPlace(Struct, frozen=True):
    """The link of a chain whose model answers."""

    chain: Chain
    index: int
    model: ServedModel


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A name that requests may give."""

    name: str
    served: ServedModel | None  # the model, or the first known one of a route; None: no worker has served it yet
    targets: tuple[str, ...] = ()  # models of a route; empty for a model
    phase: str = ""  # phase of the worker that is nearest to serving; empty: no worker, or a route


class HandedOutError(Exception):
    """External models take a request over."""

    def __init__(self, links: tuple[ChainLink, ...], error: ApiError) -> None:
        """`links`: those that may answer, in order; `error`: the last one of this installation."""
        super().__init__(str(error))
        self.links, self.error = links, error


class Models:
    """The models of the catalog and the routes to them, as tenants may use them."""

    def __init__(
        self,
        catalog: Catalog,
        table: RouteTable,
        mirrors: Mirrors,
        fallback_model: str,
        metrics: GatewayMetrics,
    ) -> None:
        """`fallback_model`: the last link of every chain; empty: none."""
        self._catalog = catalog
        self._table = table
        self.mirrors = mirrors
        self._fallback_model = fallback_model
        self._metrics = metrics

    def chain(self, name: str, tenant: Tenant, origin: Origin, *, outside: bool = False) -> Chain:
        """The models for a name; raises :class:`ApiError` (403) when the tenant may use none of them.

        `outside`: whether external models may answer.
        """
        route = self._table.routes.get(name)
        if route is None:
            check_permission(name, tenant)
            last = self._last_link(tenant, name)
            # On a machine of several models the fallback may sleep in turn, and would keep the model from waking.
            limited = last and self._catalog.phase(name) not in ("sleeping", "waking")
            return Chain(name, (ChainLink(name), *last), WAIT_S if limited else None)
        granted = not tenant.models or name in tenant.models
        targets = [target for target in route.targets if granted or target.model in tenant.models]
        if not any(target.weight for target in targets):
            raise model_not_allowed(name, tenant.models)
        first = pick(name, targets, origin.key(route))
        fallbacks = [fallback for fallback in route.fallbacks if granted or fallback.model in tenant.models]
        own = (
            ChainLink(fallback.model, frozenset(fallback.when), routed=True)
            for fallback in fallbacks
            if not fallback.external and fallback.model != first.model
        )
        externals = self._table.routes.fixed.externals
        others = (
            ChainLink(fallback.model, frozenset(fallback.when), routed=True, external=external)
            for fallback in fallbacks
            if outside and (external := externals.get(fallback.external))
        )
        links = ChainLink(first.model, routed=True), *own, *self._last_link(tenant, first.model), *others
        mirror = route.mirror
        if mirror and (mirror.model == first.model or fraction("mirror", name, origin.draw) >= mirror.share):
            mirror = None
        return Chain(name, links, route.wait_s, mirror, route.patience_s)

    async def find(self, chain: Chain, tenant: Tenant, patience: StartPatience) -> ServedModel:
        """The first model of a chain; raises :class:`ApiError`, such as 403 for a model that the tenant may not use."""
        return await self._find(chain.links[0], tenant, patience)

    async def open(
        self,
        chain: Chain,
        tenant: Tenant,
        patience: StartPatience,
        failed: ChainPlace | None = None,
        error: ApiError | None = None,
    ) -> ChainPlace:
        """The first link that can answer, after the one that has failed with `error` before its first token.

        Raises :class:`HandedOutError` when an external model takes over, and the last error when no link does.
        """
        start = failed.index + 1 if failed else 0
        for index, link in enumerate(chain.links[start:], start):
            if index and (error is None or _CONDITIONS.get(error.code) not in link.when or not self._takes(link)):
                continue
            if error is not None and link.external:
                raise HandedOutError(chain.links[index:], error)
            try:
                return ChainPlace(chain, index, await self._within(chain, index, tenant, patience))
            except ApiError as failure:
                error = failure
        assert error is not None
        raise error

    def handed_on(self, place: ChainPlace) -> frozenset[Condition]:
        """The conditions on which a later link takes over without a longer wait."""
        later = place.chain.links[place.index + 1 :]
        if not later:
            return NEVER
        return NEVER.union(*(link.when for link in later if self._takes(link)))

    def count(self, chain: Chain, model: str, *, fallback: bool) -> None:
        """Count a request that a model begins to answer."""
        if fallback:
            self._metrics.fallbacks.labels(chain.name).inc()
        if chain.routed:
            self._metrics.routed.labels(chain.name, model).inc()

    def listed(self, tenant: Tenant) -> list[ListedModel]:
        """All names that requests of a tenant may give: models, adapters, routes."""
        routes = self._routes(tenant)
        models = self._catalog.listed(tenant.models)
        phase = self._catalog.phase
        named = [ListedModel(name, model, phase=phase(name)) for name, model in models.items() if name not in routes]
        return named + [self._listed(name, route) for name, route in routes.items()]

    async def look_up(self, name: str) -> None:
        """Know the route of a name that is unknown here, if another gateway has made it a moment ago."""
        known = self._table.routes.get(name) or self._catalog.knows(name) or self._catalog.expects(name)
        if name and not known:
            await self._table.look_up(name)

    async def get(self, name: str, tenant: Tenant) -> ListedModel:
        """The model of a name, without waiting for a worker; raises :class:`ApiError` 403 or 404."""
        await self.look_up(name)
        route = self._routes(tenant).get(name)
        if route is not None:
            return self._listed(name, route)
        check_permission(name, tenant)
        await self._catalog.look_up(name)
        unknown = self._catalog.expects(name) and not self._catalog.knows(name)
        served = None if unknown else self._catalog.get(name, tenant.models)
        return ListedModel(name, served, phase=self._catalog.phase(name))

    def _listed(self, name: str, route: ModelRoute) -> ListedModel:
        known = self._catalog.listed()
        served = next((model for target in route.targets if (model := known.get(target.model))), None)
        return ListedModel(name, served, tuple(target.model for target in route.targets))

    def _routes(self, tenant: Tenant) -> dict[str, ModelRoute]:
        """The routes that requests of a tenant may name: its key allows the route, or one of its targets."""
        allowed = set(tenant.models)
        return {
            name: route
            for name, route in self._table.routes.all().items()
            if not allowed or name in allowed or allowed & {target.model for target in route.targets}
        }

    async def _within(self, chain: Chain, index: int, tenant: Tenant, patience: StartPatience) -> ServedModel:
        """The model of a link, which another link does not wait for longer than the chain says; raises ApiError.

        Nor does a request that another link may answer wait for the model's start, unless its client wishes it.
        """
        link, name = chain.links[index], chain.links[index].model
        later = any("no_worker" in other.when and self._takes(other) for other in chain.links[index + 1 :])
        if not later:
            return await self._find(link, tenant, patience)
        if not patience.by_client:
            patience.until = None
        # Requests for an expected model wait first, so that the autoscaler sees the demand for its workers.
        try:
            async with asyncio.timeout(chain.wait_s):
                model = await self._find(link, tenant, patience)
        except TimeoutError as error:
            raise no_worker(name) from error
        if not self._catalog.expects(model.name) and model not in self._catalog.available():
            raise no_worker(model.name)
        return model

    async def _find(self, link: ChainLink, tenant: Tenant, patience: StartPatience) -> ServedModel:
        try:
            model = await self._catalog.find(link.model, tenant.name, tenant.models, patience)
        except ApiError as error:
            if error.code != NO_MODEL:
                raise
            if link.routed:  # the name that the client gave exists
                raise no_worker(link.model) from error
            raise unknown_model(link.model, [listed.name for listed in self.listed(tenant)]) from error
        if not link.routed:
            check_permission(model.name, tenant)
        return model

    def _takes(self, link: ChainLink) -> bool:
        """Whether a fallback can take a request over: a worker serves its model, or it is an external one."""
        return link.external is not None or any(model.name == link.model for model in self._catalog.available())

    def _last_link(self, tenant: Tenant, first: str) -> tuple[ChainLink, ...]:
        """The installation's fallback model behind the first one, if the tenant may use it."""
        name = self._fallback_model
        if name in ("", first) or (tenant.models and name not in tenant.models):
            return ()
        return (ChainLink(name, frozenset({"no_worker"})),)
