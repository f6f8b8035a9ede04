"""GET /v1/organization/usage/KIND and /v1/organization/costs, in OpenAI's shape: a project is a tenant."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import FastAPI, Request
from msgspec import Meta, Struct

from services.common.patterns import END
from services.gateway.api.decode import explain
from services.gateway.billing.account import Account, Counts, Kind
from services.gateway.billing.buckets import WIDTHS, Retention, Width, starts
from services.gateway.billing.report import Bucket, Selection, UsageReader, grouped
from services.gateway.errors import ApiError, invalid
from services.gateway.http.identified import CallingTenant
from services.gateway.tenants.redis_guard import RedisAwayError
from services.gateway.tenants.tenant import Tenant
from services.gateway.usage import NANOS

_PAGE = "page_"
_DEFAULT_LIMIT: dict[Width, int] = {"1m": 60, "1h": 24, "1d": 7}
_MAX_LIMIT: dict[Width, int] = {"1m": 1440, "1h": 168, "1d": 180}
_LAST_TIME = 253_402_300_799  # end of the year 9999

Time = Annotated[int, Meta(ge=0, le=_LAST_TIME)]


class _Query(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    start_time: Time
    end_time: Time | None = None
    bucket_width: Width = "1d"
    project_ids: list[str] = []
    api_key_ids: list[str] = []
    models: list[str] = []
    batch: bool | None = None
    limit: Annotated[int, Meta(ge=1)] | None = None
    page: Annotated[str, Meta(pattern=rf"^{_PAGE}[0-9]{{1,12}}{END}")] | None = None


class UsageQuery(_Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of a usage report."""

    group_by: list[Literal["project_id", "api_key_id", "model", "batch"]] = []


class CostsQuery(_Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of a report of costs."""

    line_items: list[str] = []
    group_by: list[Literal["project_id", "api_key_id", "model", "batch", "line_item"]] = []


Query = UsageQuery | CostsQuery
AnyQuery = TypeVar("AnyQuery", UsageQuery, CostsQuery)
Results = Callable[[Bucket, AnyQuery, Selection], Iterable[object]]
_LISTS = {"project_ids", "api_key_ids", "models", "group_by", "line_items"}
_GROUPS: dict[str, Callable[[Account], object]] = {
    "project_id": lambda account: account.tenant or None,
    "api_key_id": lambda account: account.key or None,
    "model": lambda account: account.model,
    "batch": lambda account: account.batch,
}


@dataclass(frozen=True, slots=True)
class UsageReports:
    """Writes the pages of reports."""

    reader: UsageReader
    retention: Retention
    currency: str
    now: Callable[[], float] = time.time

    async def page(self, query: AnyQuery, selection: Selection, results: Results[AnyQuery]) -> dict[str, Any]:
        """A page of buckets, each with its results; raises :class:`ApiError`."""
        width = query.bucket_width
        limit = _DEFAULT_LIMIT[width] if query.limit is None else query.limit
        if limit > _MAX_LIMIT[width]:
            raise invalid(f"`limit` may be at most {_MAX_LIMIT[width]} with `bucket_width={width}`.", "limit")
        begin = query.start_time if query.page is None else int(query.page.removeprefix(_PAGE))
        self._check_kept(begin, width)
        now = int(self.now()) + 1
        end = now if query.end_time is None else min(query.end_time, now)
        shown, following = starts(begin, end, width, limit)
        try:
            buckets = await self.reader.read(width, shown)
        except RedisAwayError as error:
            message = "The usage cannot be read at the moment."
            raise ApiError(503, message, "server_error", code="usage_unavailable", retry_after_s=2) from error
        return {
            "object": "page",
            "data": [
                {
                    "object": "bucket",
                    "start_time": start,
                    "end_time": start + WIDTHS[width],
                    "results": list(results(bucket, query, selection)),
                }
                for start, bucket in zip(shown, buckets, strict=True)
            ],
            "has_more": following is not None,
            "next_page": None if following is None else f"{_PAGE}{following}",
        }

    def _check_kept(self, begin: int, width: Width) -> None:
        """Refuse times of which nothing is known any more, since their sums would be too small."""
        oldest = self.retention.oldest(width, self.now())
        if begin < oldest:
            message = (
                f"`start_time` must be at least {oldest} with `bucket_width={width}`: older buckets of this width are "
                "not kept. Wider ones are kept for longer."
            )
            raise invalid(message, "start_time", "usage_not_kept")

    def costs(self, bucket: Bucket, query: CostsQuery, selection: Selection) -> Iterable[object]:
        """The costs of a bucket."""
        names: list[str] = [*query.group_by]
        sums: dict[tuple[object, ...], tuple[int, int]] = {}
        for account, counts in bucket.items():
            for item, cost, tokens in _line_items(account.model, counts) if selection.holds(account) else ():
                if not query.line_items or item in query.line_items:
                    group = tuple(item if name == "line_item" else _GROUPS[name](account) for name in names)
                    total, quantity = sums.get(group, (0, 0))
                    sums[group] = total + cost, quantity + tokens
        for group, (cost, tokens) in sums.items():
            of_item = {"quantity": tokens, "quantity_unit": "tokens"} if "line_item" in names else {}
            yield {
                "object": "organization.costs.result",
                "amount": {"value": cost / NANOS, "currency": self.currency},
                "line_item": None,
                "project_id": None,
                "api_key_id": None,
                **dict(zip(names, group, strict=True)),
                **of_item,
            }


def add_usage(app: FastAPI, reports: UsageReports) -> None:
    """Give the app the routes of usage and costs."""

    def add(kind: Kind, results: Results[UsageQuery]) -> None:
        @app.get(
            f"/v1/organization/usage/{kind}",
            summary=f"Tokens of {kind} by minute, hour or day: all for administrators, else those of the key's tenant",
            tags=["usage"],
            openapi_extra={"parameters": _parameters(UsageQuery)},
            operation_id=f"usage_{kind}",
        )
        async def usage(request: Request, tenant: CallingTenant) -> dict[str, Any]:
            query = _read(request, UsageQuery)
            return await reports.page(query, _selection(query, tenant, {kind}), results)

    add("completions", _completions)
    add("embeddings", _embeddings)

    @app.get(
        "/v1/organization/costs",
        summary="Costs by minute, hour or day: all for administrators, else those of the key's tenant",
        tags=["usage"],
        openapi_extra={"parameters": _parameters(CostsQuery)},
    )
    async def costs(request: Request, tenant: CallingTenant) -> dict[str, Any]:
        query = _read(request, CostsQuery)
        return await reports.page(query, _selection(query, tenant, None), reports.costs)


def _completions(bucket: Bucket, query: UsageQuery, selection: Selection) -> Iterable[object]:
    for group, counts in _grouped(bucket, query, selection):
        yield {
            "object": "organization.usage.completions.result",
            "input_tokens": counts.input_tokens,
            "input_cached_tokens": counts.cached_tokens,
            "input_uncached_tokens": counts.input_tokens - counts.cached_tokens,
            "output_tokens": counts.output_tokens,
            "input_audio_tokens": 0,
            "output_audio_tokens": 0,
            "accepted_prediction_tokens": counts.accepted_tokens,
            "rejected_prediction_tokens": counts.rejected_tokens,
            "num_model_requests": counts.requests,
            **_dimensions(group),
            "batch": group.get("batch"),
            "service_tier": None,
        }


def _embeddings(bucket: Bucket, query: UsageQuery, selection: Selection) -> Iterable[object]:
    for group, counts in _grouped(bucket, query, selection):
        yield {
            "object": "organization.usage.embeddings.result",
            "input_tokens": counts.input_tokens,
            "num_model_requests": counts.requests,
            **_dimensions(group),
            **({"batch": group["batch"]} if "batch" in group else {}),
        }


def _dimensions(group: Mapping[str, object]) -> dict[str, object]:
    return {
        "project_id": group.get("project_id"),
        "user_id": None,
        "api_key_id": group.get("api_key_id"),
        "model": group.get("model"),
    }


def _grouped(bucket: Bucket, query: UsageQuery, selection: Selection) -> Iterable[tuple[dict[str, Any], Counts]]:
    names = query.group_by
    groups = grouped(bucket, selection, lambda account: tuple((name, _GROUPS[name](account)) for name in names))
    return ((dict(group), counts) for group, counts in groups)


def _line_items(model: str, counts: Counts) -> list[tuple[str, int, int]]:
    """Name, cost and tokens of each kind of token that was used."""
    uncached = counts.input_tokens - counts.cached_tokens
    every = (
        (f"{model}, input_tokens", counts.input_cost, uncached),
        (f"{model}, input_cached_tokens", counts.cached_cost, counts.cached_tokens),
        (f"{model}, output_tokens", counts.output_cost, counts.output_tokens),
        (f"{model}, training_tokens", counts.training_cost, counts.trained_tokens),
    )
    return [item for item in every if item[2]]


def _selection(query: Query, tenant: Tenant, kinds: set[Kind] | None) -> Selection:
    """The selection of a query; only administrators select the usage of others. Raises :class:`ApiError` (403)."""
    projects: list[str] | None = query.project_ids or None
    if not tenant.admin:
        if projects not in (None, [tenant.name]):
            message = f"This key may read the usage of `{tenant.name}` only; others need an administrator's key."
            raise ApiError(403, message, "permission_error", "project_ids", "forbidden")
        projects = [tenant.name]
    return Selection(kinds, projects, query.api_key_ids or None, query.models or None, query.batch)


def _read(request: Request, kind: type[AnyQuery]) -> AnyQuery:
    """The query of a request; lists are repeated, with or without brackets. Raises :class:`ApiError` (400)."""
    values: dict[str, Any] = {}
    for given, value in request.query_params.multi_items():
        name = given.removesuffix("[]")
        if name in _LISTS:
            values.setdefault(name, []).append(value)
        elif name in values:
            raise invalid(f"`{name}` may be given once only.", name)
        else:
            values[name] = value
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise explain(error, kind) from error


def _parameters(query: type[Query]) -> list[dict[str, Any]]:
    """The parameters of a query, for the OpenAPI document."""
    (_, components) = msgspec.json.schema_components([query], ref_template="{name}")
    schema = components[query.__name__]
    required = set(schema["required"])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _plain(of)}
        for name, of in schema["properties"].items()
    ]


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a parameter, which is left out rather than null."""
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    some = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    return rest | (some[0] if some else {})
