"""Which model answers: the one asked for, or the fallback model where that has no worker."""

from __future__ import annotations

from services.gateway.errors import NO_WORKERS, ApiError, model_not_allowed
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.tenant import Tenant
from services.gateway.text.codec import ServedModel
from services.gateway.upstream.catalog import Catalog


def check_permission(name: str, tenant: Tenant) -> None:
    """Raises :class:`ApiError` (403) when the tenant may not use the model."""
    if name and tenant.models and name not in tenant.models:
        raise model_not_allowed(name, tenant.models)


class Models:
    """The models of the catalog, as tenants may use them."""

    def __init__(self, catalog: Catalog, fallback_model: str, metrics: GatewayMetrics) -> None:
        self._catalog = catalog
        self._fallback_model = fallback_model
        self._fallbacks = metrics.fallbacks

    async def find(self, name: str, tenant: Tenant) -> ServedModel:
        """The model if the tenant may use it; raises :class:`ApiError` (403) otherwise."""
        check_permission(name, tenant)
        model = await self._catalog.find(name, tenant.name, tenant.models)
        check_permission(model.name, tenant)
        return model

    async def choose(self, name: str, tenant: Tenant) -> tuple[str, ServedModel]:
        """The name of the model asked for, and the model that answers; raises :class:`ApiError`."""
        catalog, fallback = self._catalog, self._fallback(tenant)
        try:
            model = await self.find(name, tenant)
        except ApiError as error:
            if error.code != NO_WORKERS or fallback is None:
                raise
            return name, fallback
        # Requests for an expected model wait first, so that the autoscaler sees the demand for its workers.
        if fallback is None or catalog.expects(model.name) or model in catalog.available():
            return model.name, model
        return model.name, fallback

    def after(self, model: ServedModel, error: ApiError, tenant: Tenant) -> ServedModel:
        """The model that answers after `model` has failed with `error` before its first token.

        Raises the error when it is not for want of workers, or there is no other model to fall back to.
        """
        fallback = self._fallback(tenant)
        if error.code != NO_WORKERS or fallback is None or fallback is model:
            raise error
        return fallback

    def count_fallback(self, requested: str) -> None:
        """Another model answers than the one asked for."""
        self._fallbacks.labels(requested).inc()

    def _fallback(self, tenant: Tenant) -> ServedModel | None:
        """The fallback model, if there is one with a worker that the tenant may use."""
        if not self._fallback_model or (tenant.models and self._fallback_model not in tenant.models):
            return None
        return next((model for model in self._catalog.available() if model.name == self._fallback_model), None)
