"""The gRPC client for asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeAlias, TypeVar, Unpack

import grpc
import grpc.aio
from ryzanstein.v1 import inference_pb2, inference_pb2_grpc

from ryzanstein_client.attempts import persist_async
from ryzanstein_client.grpc import requests, transport
from ryzanstein_client.grpc.answers import chunk_of, embeddings_of, models_of
from ryzanstein_client.lifetimes import AsyncClosing
from ryzanstein_client.options import ChatOptions, CompletionOptions
from ryzanstein_client.results import Chunk, Completion, Embeddings, Model
from ryzanstein_client.retries import Call, Calls
from ryzanstein_client.settings import Message, Prompt, Settings
from ryzanstein_client.streams import AsyncStream, collect_async

Query = TypeVar("Query")
Answer = TypeVar("Answer")
Prompted = TypeVar("Prompted", inference_pb2.GenerateRequest, inference_pb2.ChatRequest)
Streaming: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[Prompted, inference_pb2.GenerateResponse]"


class AsyncGrpcClient(AsyncClosing):
    """A client over gRPC for asyncio, with the calls of the client over REST. Safe to share between tasks.

    `address` is ``host:port``. Give `credentials` (``grpc.ssl_channel_credentials()``) for TLS. `timeout_s` is exact.
    """

    def __init__(
        self,
        address: str,
        settings: Settings | None = None,
        *,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._settings = settings or Settings()
        self._metadata = transport.metadata(self._settings)
        self._calls = Calls(self._settings.retries, self._settings.timeout_s)
        address, options = transport.check_address(address), transport.channel_options(self._settings)
        self._channel = (
            grpc.aio.insecure_channel(address, options)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options)
        )
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Completion:
        """Continue a text or token ids."""
        request = requests.generate(self._settings, prompt, options)
        return await self._collect(self._stub.Generate, request, options.get("timeout_s"))

    def stream_completion(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> AsyncStream:
        """Continue a text or token ids; chunks as they come."""
        request = requests.generate(self._settings, prompt, options)
        return self._stream(self._stub.Generate, request, options.get("timeout_s"))

    async def chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Completion:
        """Answer a conversation."""
        return await self._collect(
            self._stub.Chat, requests.chat(self._settings, messages, options), options.get("timeout_s")
        )

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> AsyncStream:
        """Answer a conversation; chunks as they come."""
        return self._stream(self._stub.Chat, requests.chat(self._settings, messages, options), options.get("timeout_s"))

    async def embed(
        self, inputs: str | Sequence[str], *, model: str | None = None, timeout_s: float | None = None
    ) -> Embeddings:
        """Vectors of texts."""
        return embeddings_of(
            await self._send(self._stub.Embed, requests.embed(self._settings, inputs, model), timeout_s)
        )

    async def tokenize(
        self, text: str, *, model: str | None = None, add_special_tokens: bool = True, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Token ids of a text."""
        request = requests.tokenize(self._settings, text, model, add_special_tokens=add_special_tokens)
        return tuple((await self._send(self._stub.Tokenize, request, timeout_s)).ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str | None = None, timeout_s: float | None = None
    ) -> str:
        """The text of token ids, special tokens included."""
        request = requests.detokenize(self._settings, token_ids, model)
        return (await self._send(self._stub.Detokenize, request, timeout_s)).text

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """The models that are served now."""
        return models_of(await self._send(self._stub.ListModels, inference_pb2.ListModelsRequest(), timeout_s))

    async def aclose(self) -> None:
        """Close the channel; what still runs on it is cancelled."""
        await self._channel.close()

    async def _send(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Query, Answer], query: Query, timeout_s: float | None
    ) -> Answer:
        async def attempt(left_s: float) -> Answer:
            with transport.grpc_errors():
                return await method(query, timeout=left_s, metadata=self._metadata)

        return await persist_async(attempt, self._calls.begin(timeout_s))

    def _stream(self, method: Streaming[Prompted], query: Prompted, timeout_s: float | None) -> AsyncStream:
        return AsyncStream(partial(self._chunks, method, query), partial(self._calls.begin, timeout_s))

    async def _collect(self, method: Streaming[Prompted], query: Prompted, timeout_s: float | None) -> Completion:
        """Nobody has seen a token before the last one is there: any failure may be retried."""
        call = self._calls.begin(timeout_s)

        async def attempt(_left_s: float) -> Completion:
            async with aclosing(self._chunks(method, query, call)) as chunks:
                return await collect_async(chunks)

        return await persist_async(attempt, call)

    async def _chunks(self, method: Streaming[Prompted], query: Prompted, call: Call) -> AsyncGenerator[Chunk, None]:
        responses = method(query, timeout=call.remaining(), metadata=self._metadata)
        try:
            with transport.grpc_errors():
                model: str | None = None
                async for response in responses:
                    if model is None:
                        model = transport.fallback_model(await responses.initial_metadata()) or query.model
                    yield chunk_of(response, model)
        finally:
            responses.cancel()
