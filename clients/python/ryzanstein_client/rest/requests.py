"""The REST API's requests as values, each with the function that reads its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from ryzanstein_client.results import Chunk
from ryzanstein_client.settings import Settings

Answer = TypeVar("Answer")


class ChunkReader(Protocol):
    """Reads one stream: `feed` what arrives, `last` when the connection has nothing more."""

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """The chunks that are complete now; raises the stream's error behind the chunks before it."""

    def last(self) -> Chunk:
        """The end of the generation; raises :class:`Unavailable` when the stream was cut off before it."""


@dataclass(frozen=True, slots=True)
class Request(Generic[Answer]):
    """A request with one answer."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    body: bytes
    read: Callable[[bytes], Answer]
    content_type: str = "application/json"
    repeatable: bool = True  # else it is not tried again where the server may have heard it


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A request whose answer is a stream."""

    path: str
    body: bytes
    new_reader: Callable[[], ChunkReader]


def get(path: str, read: Callable[[bytes], Answer]) -> Request[Answer]:
    """A request without a body."""
    return Request("GET", path, b"", read)


def get_page(path: str, query: Mapping[str, str | int | None], read: Callable[[bytes], Answer]) -> Request[Answer]:
    """A request for a part of a list; what is None in its query is left to the server."""
    encoded = urlencode({name: value for name, value in query.items() if value is not None})
    return get(f"{path}?{encoded}", read)


def delete(path: str, read: Callable[[bytes], Answer]) -> Request[Answer]:
    """A request that removes something."""
    return Request("DELETE", path, b"", read)


def post(path: str, body: Mapping[str, Any], read: Callable[[bytes], Answer]) -> Request[Answer]:
    """A request with a JSON body."""
    return Request("POST", path, msgspec.json.encode(body), read)


def post_stream(path: str, body: Mapping[str, Any], new_reader: Callable[[], ChunkReader]) -> StreamRequest:
    """A request with a JSON body whose answer is a stream."""
    return StreamRequest(path, msgspec.json.encode(body), new_reader)


def model_field(settings: Settings, model: str | None) -> dict[str, str]:
    """The field that names the model, if one is named."""
    name = settings.model_of(model)
    return {"model": name} if name else {}


def path_of(folder: str, name: str) -> str:
    """The path of an object; its id is no path of its own."""
    return f"{folder}/{quote(name, safe='')}"


def headers(settings: Settings) -> dict[str, str]:
    """Headers of every request."""
    key = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    return {"content-type": "application/json", **key}


def check_url(url: str, schemes: Sequence[str]) -> str:
    """The URL without a slash at its end; raises ValueError when it is none of these schemes."""
    parts = urlsplit(url)
    if parts.scheme not in schemes or not parts.netloc:
        allowed = " or ".join(f"{scheme}://host:port" for scheme in schemes)
        raise ValueError(f"{url!r} must be {allowed}")
    return url.rstrip("/")
