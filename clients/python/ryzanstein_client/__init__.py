"""Clients of Ryzanstein. gRPC and WebSocket live in :mod:`ryzanstein_client.grpc` and
:mod:`ryzanstein_client.websocket`, and need the extras of these names.
"""

from ryzanstein_client.errors import (
    ApiError,
    BadRequest,
    Forbidden,
    NotFound,
    ProtocolError,
    RateLimited,
    RyzansteinError,
    ServerError,
    StreamInterrupted,
    TimedOut,
    Unauthorized,
    Unavailable,
)
from ryzanstein_client.rest.aio import AsyncClient
from ryzanstein_client.rest.client import Client
from ryzanstein_client.results import Chunk, Completion, Embeddings, Model, TokenLogprob, ToolCall, ToolCallDelta, Usage
from ryzanstein_client.retries import RetryPolicy
from ryzanstein_client.settings import Message, Options, ResponseFormat, Settings, Tool
from ryzanstein_client.streams import AsyncStream, Stream

__all__ = [
    "ApiError",
    "AsyncClient",
    "AsyncStream",
    "BadRequest",
    "Chunk",
    "Client",
    "Completion",
    "Embeddings",
    "Forbidden",
    "Message",
    "Model",
    "NotFound",
    "Options",
    "ProtocolError",
    "RateLimited",
    "ResponseFormat",
    "RetryPolicy",
    "RyzansteinError",
    "ServerError",
    "Settings",
    "Stream",
    "StreamInterrupted",
    "TimedOut",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Unauthorized",
    "Unavailable",
    "Usage",
]
