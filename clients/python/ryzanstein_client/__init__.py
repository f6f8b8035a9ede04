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
from ryzanstein_client.options import ChatOptions, CompletionOptions, ResponseFormat, ResponseOptions, Tool
from ryzanstein_client.rest.aio import AsyncClient
from ryzanstein_client.rest.client import Client
from ryzanstein_client.results import (
    Batch,
    BatchError,
    Chunk,
    Completion,
    Embeddings,
    File,
    Model,
    Page,
    Ranked,
    Ranking,
    Response,
    Scores,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from ryzanstein_client.retries import RetryPolicy
from ryzanstein_client.settings import Message, Settings
from ryzanstein_client.streams import AsyncResponseStream, AsyncStream, ResponseStream, Stream

__all__ = [
    "ApiError",
    "AsyncClient",
    "AsyncResponseStream",
    "AsyncStream",
    "BadRequest",
    "Batch",
    "BatchError",
    "ChatOptions",
    "Chunk",
    "Client",
    "Completion",
    "CompletionOptions",
    "Embeddings",
    "File",
    "Forbidden",
    "Message",
    "Model",
    "NotFound",
    "Page",
    "ProtocolError",
    "Ranked",
    "Ranking",
    "RateLimited",
    "Response",
    "ResponseFormat",
    "ResponseOptions",
    "ResponseStream",
    "RetryPolicy",
    "RyzansteinError",
    "Scores",
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
