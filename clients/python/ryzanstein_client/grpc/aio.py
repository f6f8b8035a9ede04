"""The gRPC client for asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
import grpc.aio
from ryzanstein.v1 import inference_pb2, inference_pb2_grpc

from ryzanstein_client.attempts import persist_async
from ryzanstein_client.grpc import transport
from ryzanstein_client.grpc.messages import Messages, chunk_of, embeddings_of, models_of
from ryzanstein_client.results import Chunk, Completion, Embeddings, Model
from ryzanstein_client.retries import Call, RetryBudget
from ryzanstein_client.settings import Message, Options, Settings
from ryzanstein_client.streams import AsyncSource, AsyncStream, collect_async

Query = TypeVar("Query")
Answer = TypeVar("Answer")


class AsyncGrpcClient:
    """:class:`ryzanstein_client.grpc.GrpcClient` for asyncio."""

    def __init__(
        self,
        address: str,
        settings: Settings | None = None,
        *,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._settings = settings or Settings()
        self._messages = Messages(self._settings)
        self._metadata = transport.metadata(self._settings)
        self._budget = RetryBudget(self._settings.retries)
        options = transport.channel_options(self._settings)
        self._channel = (
            grpc.aio.insecure_channel(address, options)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options)
        )
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Continue a text or token ids."""
        chunks = self._source(self._stub.Generate, self._messages.generate(prompt, model, options))
        return await self._collect(chunks, timeout_s)

    def stream_completion(
        self,
        prompt: str | Sequence[int],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Continue a text or token ids; chunks as they come."""
        chunks = self._source(self._stub.Generate, self._messages.generate(prompt, model, options))
        return AsyncStream(chunks, lambda: self._call(timeout_s))

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Answer a conversation."""
        chunks = self._source(self._stub.Chat, self._messages.chat(messages, model, options))
        return await self._collect(chunks, timeout_s)

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Answer a conversation; chunks as they come."""
        chunks = self._source(self._stub.Chat, self._messages.chat(messages, model, options))
        return AsyncStream(chunks, lambda: self._call(timeout_s))

    async def embed(
        self, inputs: str | Sequence[str], *, model: str | None = None, timeout_s: float | None = None
    ) -> Embeddings:
        """Vectors of texts."""
        answer = await self._persist(self._stub.Embed, self._messages.embed(inputs, model), timeout_s)
        return embeddings_of(answer)

    async def tokenize(
        self, text: str, *, model: str | None = None, add_special_tokens: bool = True, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Token ids of a text."""
        request = self._messages.tokenize(text, model, add_special_tokens=add_special_tokens)
        return tuple((await self._persist(self._stub.Tokenize, request, timeout_s)).ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str | None = None, timeout_s: float | None = None
    ) -> str:
        """The text of token ids, special tokens included."""
        request = self._messages.detokenize(token_ids, model)
        return (await self._persist(self._stub.Detokenize, request, timeout_s)).text

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """The models that are served now."""
        return models_of(await self._persist(self._stub.ListModels, inference_pb2.ListModelsRequest(), timeout_s))

    async def aclose(self) -> None:
        """Close the channel; what still runs on it is cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _call(self, timeout_s: float | None) -> Call:
        limit = self._settings.timeout_s if timeout_s is None else timeout_s
        return Call(self._settings.retries, self._budget, limit)

    async def _persist(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Query, Answer], query: Query, timeout_s: float | None
    ) -> Answer:
        async def attempt(left_s: float) -> Answer:
            with transport.grpc_errors():
                return await method(query, timeout=left_s, metadata=self._metadata)

        return await persist_async(attempt, self._call(timeout_s))

    def _source(
        self, method: grpc.aio.UnaryStreamMultiCallable[Query, inference_pb2.GenerateResponse], query: Query
    ) -> AsyncSource:
        async def chunks(call: Call) -> AsyncGenerator[Chunk, None]:
            responses = method(query, timeout=call.remaining(), metadata=self._metadata)
            try:
                with transport.grpc_errors():
                    async for response in responses:
                        yield chunk_of(response)
            finally:
                responses.cancel()

        return chunks

    async def _collect(self, source: AsyncSource, timeout_s: float | None) -> Completion:
        """Nobody has seen a token before the last one is there: any failure may be retried."""
        call = self._call(timeout_s)

        async def attempt(_left_s: float) -> Completion:
            async with aclosing(source(call)) as chunks:
                return await collect_async(chunks)

        return await persist_async(attempt, call)
