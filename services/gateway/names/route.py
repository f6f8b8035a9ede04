"""A route: the models behind a name, their shares, and the models that answer when these cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.common.adapters import MAX_NAME, check_name

Condition = Literal["no_worker", "overloaded", "context_too_long", "error"]
Sticky = Literal["session", "tenant", "none"]
ModelName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
CONDITIONS: tuple[Condition, ...] = ("no_worker", "overloaded", "context_too_long", "error")
MAX_WEIGHT = 1_000_000


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A model and its part of a route's requests: its weight over the sum of all weights."""

    model: ModelName
    weight: Annotated[int, Meta(ge=0, le=MAX_WEIGHT)] = 1


class Fallback(msgspec.Struct, frozen=True, kw_only=True):
    """A model that answers when those before it fail before their first token, on one of its conditions."""

    model: ModelName
    when: Annotated[tuple[Condition, ...], Meta(min_length=1, max_length=len(CONDITIONS))] = CONDITIONS


class Mirror(msgspec.Struct, frozen=True, kw_only=True):
    """A model that answers a part of the requests once more, for comparison; clients see nothing of it."""

    model: ModelName
    share: Annotated[float, Meta(gt=0, le=1)]
    # Mirrored requests of a gateway at a time; others are dropped.
    max_running: Annotated[int, Meta(ge=1, le=1000)] = 4


class ModelRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A route. Its targets and fallbacks are models or adapters, never routes."""

    targets: Annotated[tuple[Target, ...], Meta(min_length=1, max_length=16)]
    sticky: Sticky = "session"  # requests of one session, or of one tenant, have one target
    fallbacks: Annotated[tuple[Fallback, ...], Meta(max_length=8)] = ()
    mirror: Mirror | None = None
    # Longest search for a worker in seconds where a fallback takes over on `no_worker` or `overloaded`.
    wait_s: Annotated[float, Meta(ge=0.05, le=60)] = 0.5

    def __post_init__(self) -> None:
        if not any(target.weight for target in self.targets):
            raise ValueError("one of the `targets` needs a `weight` above 0")
        check_names("targets", [target.model for target in self.targets])
        check_names("mirror", [self.mirror.model] if self.mirror else [])
        check_names("fallbacks", [fallback.model for fallback in self.fallbacks])


def check_names(place: str, names: Iterable[str]) -> None:
    """Raise ValueError for a name that is none, or that `place` has twice."""
    for name, count in Counter(names).items():
        try:
            check_name(name)
        except ValueError as error:
            raise ValueError(f"a `model` of `{place}`: {error}") from error
        if count > 1:
            raise ValueError(f"`{place}` has the model `{name}` twice")


def read_route(raw: object) -> ModelRoute:
    """The route that a decoded JSON value describes; raises :class:`msgspec.ValidationError`, also for unknown fields.

    Routes in Redis are decoded without this check: a newer gateway may have written them.
    """
    route = msgspec.convert(raw, ModelRoute)
    refuse_unknown(raw, msgspec.to_builtins(route), "$")
    return route


def refuse_unknown(raw: object, known: object, path: str) -> None:
    """Raise :class:`msgspec.ValidationError` for a field of `raw` that its decoded form `known` does not have."""
    if isinstance(raw, Mapping) and isinstance(known, Mapping):
        for name, value in raw.items():
            if name not in known:
                place = "" if path == "$" else f" - at `{path}`"
                raise msgspec.ValidationError(f"Object contains unknown field `{name}`{place}")
            refuse_unknown(value, known[name], f"{path}.{name}")
    elif isinstance(raw, list) and isinstance(known, (list, tuple)):
        for index, (value, decoded) in enumerate(zip(raw, known, strict=True)):
            refuse_unknown(value, decoded, f"{path}[{index}]")


class RoutesFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON of an installation's file of routes."""

    routes: dict[str, dict[str, Any]] = {}


def read_routes(text: bytes) -> dict[str, ModelRoute]:
    """The routes of a file by name; raises :class:`msgspec.MsgspecError` (ValueError) that names the route."""
    routes: dict[str, ModelRoute] = {}
    for name, raw in msgspec.json.decode(text, type=RoutesFile).routes.items():
        try:
            check_name(name)
            routes[name] = read_route(raw)
        except ValueError as error:
            raise ValueError(f"route `{name}`: {error}") from error
    return routes
