"""The REST client for asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Literal, TypeVar, Unpack

import httpx

from ryzanstein_client.attempts import persist_async
from ryzanstein_client.lifetimes import AsyncClosing
from ryzanstein_client.options import ChatOptions, CompletionOptions, ResponseOptions
from ryzanstein_client.rest import batches, comparisons, generations, responses, texts, transport
from ryzanstein_client.rest.requests import Request, StreamRequest
from ryzanstein_client.results import (
    Batch,
    Chunk,
    Completion,
    Embeddings,
    File,
    Model,
    Page,
    Ranking,
    Response,
    Scores,
)
from ryzanstein_client.retries import Call, Calls
from ryzanstein_client.settings import Message, Prompt, Settings
from ryzanstein_client.streams import AsyncResponseStream, AsyncStream

Answer = TypeVar("Answer")


class AsyncClient(AsyncClosing):
    """A client over REST for asyncio. Safe to share between tasks; close it, or use it as a context manager.

    Every call takes `timeout_s` in place of the settings' own, and `model` where one answers, and raises
    :class:`ryzanstein_client.errors.RyzansteinError`. `timeout_s` bounds the whole call, retries and stream included.
    It is exact for asyncio; a blocking call checks it between reads, so a silent server can take it to twice the time.
    """

    def __init__(self, base_url: str = "http://127.0.0.1:8000", settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._calls = Calls(self._settings.retries, self._settings.timeout_s)
        self._http = httpx.AsyncClient(**transport.client_options(base_url, self._settings))

    async def complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Completion:
        """Continue a text or token ids."""
        return await self._send(generations.complete(self._settings, prompt, options), options.get("timeout_s"))

    def stream_completion(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> AsyncStream:
        """Continue a text or token ids; chunks as they come."""
        return self._stream(generations.stream_completion(self._settings, prompt, options), options.get("timeout_s"))

    async def chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Completion:
        """Answer a conversation."""
        return await self._send(generations.chat(self._settings, messages, options), options.get("timeout_s"))

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> AsyncStream:
        """Answer a conversation; chunks as they come."""
        return self._stream(generations.stream_chat(self._settings, messages, options), options.get("timeout_s"))

    async def embed(
        self, inputs: str | Sequence[str], *, model: str | None = None, timeout_s: float | None = None
    ) -> Embeddings:
        """Vectors of texts."""
        return await self._send(texts.embed(self._settings, inputs, model), timeout_s)

    async def tokenize(
        self, text: str, *, model: str | None = None, add_special_tokens: bool = True, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Token ids of a text."""
        request = texts.tokenize(self._settings, text, model, add_special_tokens=add_special_tokens)
        return await self._send(request, timeout_s)

    async def tokenize_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> tuple[int, ...]:
        """Token ids of the prompt that `chat` would have; nothing is generated."""
        return await self._send(texts.tokenize_chat(self._settings, messages, options), options.get("timeout_s"))

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str | None = None, timeout_s: float | None = None
    ) -> str:
        """The text of token ids, special tokens included."""
        return await self._send(texts.detokenize(self._settings, token_ids, model), timeout_s)

    async def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """The models that are served now."""
        return await self._send(texts.models(), timeout_s)

    async def model(self, name: str, *, timeout_s: float | None = None) -> Model:
        """One model."""
        return await self._send(texts.model(name), timeout_s)

    async def score(
        self,
        text: str | Sequence[str],
        others: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> Scores:
        """How alike a text and others are, or pair by pair. `truncate_prompt_tokens`: the first tokens that count."""
        request = comparisons.score(self._settings, text, others, truncate_prompt_tokens, model)
        return await self._send(request, timeout_s)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        max_tokens_per_doc: int | None = None,
        truncate_prompt_tokens: int | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> Ranking:
        """Documents by their likeness to a query. The two bounds say how many first tokens of a text count."""
        bounds = {"max_tokens_per_doc": max_tokens_per_doc, "truncate_prompt_tokens": truncate_prompt_tokens}
        request = comparisons.rerank(self._settings, query, documents, {"top_n": top_n, **bounds}, model)
        return await self._send(request, timeout_s)

    async def respond(self, turns: str | Sequence[Message], **options: Unpack[ResponseOptions]) -> Response:
        """Answer, and keep the conversation: the next turn names this response."""
        return await self._send(responses.create(self._settings, turns, options), options.get("timeout_s"))

    def stream_response(
        self, turns: str | Sequence[Message], **options: Unpack[ResponseOptions]
    ) -> AsyncResponseStream:
        """Answer as `respond` does; chunks as they come."""
        request = responses.stream(self._settings, turns, options)
        return AsyncResponseStream(partial(self._chunks, request), partial(self._calls.begin, options.get("timeout_s")))

    async def count_input_tokens(self, turns: str | Sequence[Message], **options: Unpack[ResponseOptions]) -> int:
        """Tokens of the prompt that `respond` would have; nothing is generated or kept."""
        return await self._send(responses.count(self._settings, turns, options), options.get("timeout_s"))

    async def response(self, response_id: str, *, timeout_s: float | None = None) -> Response:
        """A kept response."""
        return await self._send(responses.kept(response_id), timeout_s)

    async def response_input(
        self, response_id: str, *, after: str | None = None, limit: int | None = None, timeout_s: float | None = None
    ) -> Page[Message]:
        """The input of a kept response, in its order; a message for each item."""
        return await self._send(responses.given(response_id, after, limit), timeout_s)

    async def delete_response(self, response_id: str, *, timeout_s: float | None = None) -> bool:
        """Forget a response."""
        return await self._send(responses.delete(response_id), timeout_s)

    async def upload_file(
        self,
        content: bytes,
        filename: str = "requests.jsonl",
        *,
        expires_after_s: int | None = None,
        timeout_s: float | None = None,
    ) -> File:
        """Store a file of requests, one a line, for batches."""
        return await self._send(batches.upload(content, filename, expires_after_s), timeout_s)

    async def files(
        self,
        *,
        after: str | None = None,
        limit: int | None = None,
        purpose: Literal["batch", "batch_output"] | None = None,
        timeout_s: float | None = None,
    ) -> Page[File]:
        """Your files, the latest first."""
        return await self._send(batches.files(after, limit, purpose), timeout_s)

    async def file(self, file_id: str, *, timeout_s: float | None = None) -> File:
        """A file's metadata."""
        return await self._send(batches.file(file_id), timeout_s)

    async def download_file(self, file_id: str, *, timeout_s: float | None = None) -> bytes:
        """A file's contents."""
        return await self._send(batches.download(file_id), timeout_s)

    async def delete_file(self, file_id: str, *, timeout_s: float | None = None) -> bool:
        """Remove a file."""
        return await self._send(batches.delete_file(file_id), timeout_s)

    async def create_batch(
        self,
        input_file_id: str,
        endpoint: str,
        *,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Batch:
        """Answer a file's requests, all for one endpoint such as `/v1/chat/completions`."""
        return await self._send(batches.create(input_file_id, endpoint, completion_window, metadata), timeout_s)

    async def batch(self, batch_id: str, *, timeout_s: float | None = None) -> Batch:
        """How far a batch has come."""
        return await self._send(batches.batch(batch_id), timeout_s)

    async def batches(
        self, *, after: str | None = None, limit: int | None = None, timeout_s: float | None = None
    ) -> Page[Batch]:
        """Your batches, the latest first."""
        return await self._send(batches.batches(after, limit), timeout_s)

    async def cancel_batch(self, batch_id: str, *, timeout_s: float | None = None) -> Batch:
        """Stop a batch; what is answered stays."""
        return await self._send(batches.cancel(batch_id), timeout_s)

    async def aclose(self) -> None:
        """Close all connections; what still runs on them is cancelled."""
        await self._http.aclose()

    async def _send(self, request: Request[Answer], timeout_s: float | None) -> Answer:
        async def attempt(left_s: float) -> Answer:
            with transport.httpx_errors():
                response = await self._http.request(
                    request.method,
                    request.path,
                    content=request.body,
                    headers={"content-type": request.content_type},
                    timeout=transport.timeout(self._settings, left_s),
                )
            transport.check(response)
            return request.read(response.content)

        return await persist_async(attempt, self._calls.begin(timeout_s), repeatable=request.repeatable)

    def _stream(self, request: StreamRequest, timeout_s: float | None) -> AsyncStream:
        return AsyncStream(partial(self._chunks, request), partial(self._calls.begin, timeout_s))

    async def _chunks(self, request: StreamRequest, call: Call) -> AsyncGenerator[Chunk, None]:
        limits = transport.timeout(self._settings, call.remaining())
        sent = self._http.stream("POST", request.path, content=request.body, timeout=limits)
        reader = request.new_reader()
        with transport.httpx_errors():
            async with sent as response:
                if not response.is_success:
                    await response.aread()
                    transport.check(response)
                async for data in response.aiter_bytes():
                    for chunk in reader.feed(data):
                        yield chunk
        yield reader.last()
