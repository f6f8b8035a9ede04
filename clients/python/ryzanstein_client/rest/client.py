"""The REST client that blocks."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import httpx

from ryzanstein_client.attempts import persist
from ryzanstein_client.rest import batches, comparisons, responses, transport
from ryzanstein_client.rest.frames import FrameReader
from ryzanstein_client.rest.requests import Request, Requests, StreamRequest
from ryzanstein_client.results import (
    Batch,
    Chunk,
    Completion,
    Embeddings,
    File,
    Model,
    Ranking,
    Response,
    Scores,
)
from ryzanstein_client.retries import Call, RetryBudget
from ryzanstein_client.settings import Message, Options, Settings
from ryzanstein_client.streams import Stream

Answer = TypeVar("Answer")


class Client:
    """Ryzanstein over REST. Safe to share between threads; close it, or use it as a context manager.

    Every call takes `model` and `timeout_s` in place of the settings' own, and raises
    :class:`ryzanstein_client.errors.RyzansteinError`. `timeout_s` bounds the whole call, retries and stream included;
    it is looked at between reads, so a server that falls silent can take a call to twice the time at most.
    """

    def __init__(self, base_url: str = "http://127.0.0.1:8000", settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._requests = Requests(self._settings)
        self._budget = RetryBudget(self._settings.retries)
        self._http = httpx.Client(**transport.client_options(base_url, self._settings))

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Continue a text or token ids."""
        return self._persist(self._requests.complete(prompt, model, options), timeout_s)

    def stream_completion(
        self,
        prompt: str | Sequence[int],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Continue a text or token ids; chunks as they come."""
        return self._stream(self._requests.stream_completion(prompt, model, options), timeout_s)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Answer a conversation."""
        return self._persist(self._requests.chat(messages, model, options), timeout_s)

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Answer a conversation; chunks as they come."""
        return self._stream(self._requests.stream_chat(messages, model, options), timeout_s)

    def embed(
        self, inputs: str | Sequence[str], *, model: str | None = None, timeout_s: float | None = None
    ) -> Embeddings:
        """Vectors of texts."""
        return self._persist(self._requests.embed(inputs, model), timeout_s)

    def tokenize(
        self, text: str, *, model: str | None = None, add_special_tokens: bool = True, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Token ids of a text."""
        request = self._requests.tokenize(text, model, add_special_tokens=add_special_tokens)
        return self._persist(request, timeout_s)

    def detokenize(self, token_ids: Sequence[int], *, model: str | None = None, timeout_s: float | None = None) -> str:
        """The text of token ids, special tokens included."""
        return self._persist(self._requests.detokenize(token_ids, model), timeout_s)

    def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """The models that are served now."""
        return self._persist(self._requests.models(), timeout_s)

    def score(
        self,
        text: str | Sequence[str],
        others: str | Sequence[str],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> Scores:
        """How alike a text and others are, or pair by pair."""
        return self._persist(comparisons.score(self._requests.model(model), text, others), timeout_s)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> Ranking:
        """Documents in the order of their likeness to a query."""
        request = comparisons.rerank(self._requests.model(model), query, documents, top_n)
        return self._persist(request, timeout_s)

    def respond(
        self,
        said: str | Sequence[Message],
        *,
        instructions: str | None = None,
        previous_response_id: str | None = None,
        store: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Response:
        """Answer, and keep the conversation: the next turn names this response. `store`: True keeps or fails."""
        request = responses.create(
            self._requests.model(model),
            said,
            instructions,
            previous_response_id,
            store,
            self._settings.chat_options(options),
        )
        return self._persist(request, timeout_s)

    def response(self, response_id: str, *, timeout_s: float | None = None) -> Response:
        """A kept response."""
        return self._persist(responses.kept(response_id), timeout_s)

    def delete_response(self, response_id: str, *, timeout_s: float | None = None) -> bool:
        """Forget a response."""
        return self._persist(responses.delete(response_id), timeout_s)

    def upload_file(self, content: bytes, filename: str = "requests.jsonl", *, timeout_s: float | None = None) -> File:
        """Store a file of requests, one a line, for batches."""
        return self._persist(batches.upload(content, filename), timeout_s)

    def file(self, file_id: str, *, timeout_s: float | None = None) -> File:
        """What is known of a file."""
        return self._persist(batches.file(file_id), timeout_s)

    def download_file(self, file_id: str, *, timeout_s: float | None = None) -> bytes:
        """What a file holds."""
        return self._persist(batches.download(file_id), timeout_s)

    def delete_file(self, file_id: str, *, timeout_s: float | None = None) -> bool:
        """Remove a file."""
        return self._persist(batches.delete_file(file_id), timeout_s)

    def create_batch(
        self,
        input_file_id: str,
        endpoint: str,
        *,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Batch:
        """Answer a file's requests, all for one endpoint such as `/v1/chat/completions`."""
        request = batches.create(input_file_id, endpoint, completion_window, metadata)
        return self._persist(request, timeout_s)

    def batch(self, batch_id: str, *, timeout_s: float | None = None) -> Batch:
        """How far a batch has come."""
        return self._persist(batches.batch(batch_id), timeout_s)

    def cancel_batch(self, batch_id: str, *, timeout_s: float | None = None) -> Batch:
        """Stop a batch; what is answered stays."""
        return self._persist(batches.cancel(batch_id), timeout_s)

    def close(self) -> None:
        """Close all connections; what still runs on them is cancelled."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, timeout_s: float | None) -> Call:
        limit = self._settings.timeout_s if timeout_s is None else timeout_s
        return Call(self._settings.retries, self._budget, limit)

    def _persist(self, request: Request[Answer], timeout_s: float | None) -> Answer:
        def attempt(left_s: float) -> Answer:
            with transport.httpx_errors():
                response = self._http.request(
                    request.method,
                    request.path,
                    content=request.body,
                    headers={"content-type": request.content_type},
                    timeout=transport.timeout(self._settings, left_s),
                )
            transport.check(response)
            return request.read(response.content)

        return persist(attempt, self._call(timeout_s), repeatable=request.repeatable)

    def _stream(self, request: StreamRequest, timeout_s: float | None) -> Stream:
        def source(call: Call) -> Generator[Chunk, None, None]:
            limits = transport.timeout(self._settings, call.remaining())
            sent = self._http.stream("POST", request.path, content=request.body, timeout=limits)
            reader = FrameReader(request.read)
            with transport.httpx_errors(), sent as response:
                if not response.is_success:
                    response.read()
                    transport.check(response)
                for data in response.iter_bytes():
                    yield from reader.feed(data)
            yield reader.last()

        return Stream(source, lambda: self._call(timeout_s))
