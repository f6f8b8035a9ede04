"""A route: the models behind a name, their shares, and the models that answer when these cannot."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.common.adapters import MAX_NAME, check_name
from services.common.patterns import END

Condition = Literal["no_worker", "overloaded", "context_too_long", "error"]
Sticky = Literal["session", "tenant", "none"]
ModelName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
CONDITIONS: tuple[Condition, ...] = ("no_worker", "overloaded", "context_too_long", "error")
MAX_WEIGHT = 1_000_000
WAIT_S = 0.5  # wait of a route, and for the fallback of a model without a route


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A model and its part of a route's requests: its weight over the sum of all weights."""

    model: ModelName
    weight: Annotated[int, Meta(ge=0, le=MAX_WEIGHT)] = 1


class Fallback(msgspec.Struct, frozen=True, kw_only=True):
    """A model that answers when those before it fail before their first token, on one of its conditions."""

    model: ModelName
    external: Annotated[str, Meta(max_length=MAX_NAME)] = ""  # name of the external API that has the model
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
    wait_s: Annotated[float, Meta(ge=0.05, le=60)] = WAIT_S
    # Longest wait in seconds for a model that starts, unless the client names one; None: by the gateway's settings.
    patience_s: Annotated[float, Meta(ge=0, le=86_400)] | None = None

    def __post_init__(self) -> None:
        if not any(target.weight for target in self.targets):
            raise ValueError("one of the `targets` needs a `weight` above 0")
        check_names("targets", [target.model for target in self.targets])
        check_names("mirror", [self.mirror.model] if self.mirror else [])
        check_names("fallbacks", [fallback.model for fallback in self.fallbacks if not fallback.external])
        places = [bool(fallback.external) for fallback in self.fallbacks]
        if places != sorted(places):
            raise ValueError("`fallbacks` with `external` come after all others")


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


class External(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An OpenAI-compatible API elsewhere. Only the file of routes names one, so that no live route chooses a host."""

    base_url: Annotated[str, Meta(pattern=r"^https?://[^/?#@\s]+(/[^?#\s]*)?" + END)]  # /v1 included
    key_file: str = ""  # file with the key, read for each request; empty: none
    key_env: str = ""  # environment variable with the key instead
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 60  # longest silence

    def __post_init__(self) -> None:
        if self.key_file and self.key_env:
            raise ValueError("`key_file` and `key_env`: give one of them")

    def headers(self) -> dict[str, str]:
        """The header with the key; raises OSError or KeyError when it cannot be read."""
        if not (self.key_file or self.key_env):
            return {}
        key = Path(self.key_file).read_text().strip() if self.key_file else os.environ[self.key_env]
        return {"authorization": f"Bearer {key}"}


class RoutesFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON of an installation's file of routes."""

    routes: dict[str, dict[str, Any]] = {}
    externals: dict[str, External] = {}


@dataclass(frozen=True, slots=True)
class FixedRoutes:
    """The routes of a file and the external APIs that routes may name."""

    routes: Mapping[str, ModelRoute] = field(default_factory=dict)
    externals: Mapping[str, External] = field(default_factory=dict)

    def check(self, route: ModelRoute) -> None:
        """Raise ValueError for an external API that the file does not have."""
        for name in (fallback.external for fallback in route.fallbacks if fallback.external):
            if name not in self.externals:
                known = ", ".join(f"`{each}`" for each in self.externals) or "none"
                raise ValueError(f"`fallbacks`: the external API `{name}` is not configured; configured: {known}")


def read_routes(text: bytes) -> FixedRoutes:
    """The content of a file; raises ValueError that names the route."""
    file, routes = msgspec.json.decode(text, type=RoutesFile), dict[str, ModelRoute]()
    fixed = FixedRoutes(routes, file.externals)
    for name, raw in file.routes.items():
        try:
            check_name(name)
            routes[name] = read_route(raw)
            fixed.check(routes[name])
        except ValueError as error:
            raise ValueError(f"route `{name}`: {error}") from error
    return fixed
