"""POST /v1/score and /v1/rerank, in vLLM's and Cohere's shapes.

A score is the cosine of two texts' embeddings, or what a cross-encoder with one label says of both together.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import Any, Generic, Protocol, TypeVar

from services.gateway.api.decode import BodyDecoder
from services.gateway.api.schema import RerankBody, ScoreBody, TextsBody
from services.gateway.errors import invalid
from services.gateway.generation.abilities import require_score
from services.gateway.generation.admitted import AdmittedRequest, named_session
from services.gateway.generation.embedding import Embedder, TextInput
from services.gateway.generation.labels import label_scores
from services.gateway.generation.pipeline import check_prompt
from services.gateway.generation.prompts import truncation_limit
from services.gateway.http.documentation import EXAMPLE_MODEL, Documentation
from services.gateway.http.exchange import Exchange, UntilDisconnect
from services.gateway.ids import new_id
from services.gateway.text.codec import ServedModel

Body = TypeVar("Body", bound=TextsBody)
_INLINE_FLOATS = 8_192  # up to here the products take at most a millisecond
SCORE = Documentation(
    summary="Likeness of texts, one with many or pair by pair; also at /score",
    tag="embeddings",
    body=ScoreBody,
    example={"model": EXAMPLE_MODEL, "text_1": "a list", "text_2": ["a tuple", "a file"]},
    answer={
        "id": "score-0d6f8f2c9b1e4a57a3c1d2e4",
        "object": "list",
        "created": 1767225600,
        "model": EXAMPLE_MODEL,
        "data": [{"index": 0, "object": "score", "score": 0.9}, {"index": 1, "object": "score", "score": 0.4}],
        "usage": {"prompt_tokens": 6, "total_tokens": 6},
    },
)
RERANK = Documentation(
    summary="Documents in the order of their likeness to a query; also at /rerank and /v2/rerank",
    tag="embeddings",
    body=RerankBody,
    example={"model": EXAMPLE_MODEL, "query": "a list", "documents": ["a file", "a tuple"], "top_n": 1},
    answer={
        "id": "rerank-0d6f8f2c9b1e4a57a3c1d2e4",
        "object": "list",
        "model": EXAMPLE_MODEL,
        "results": [{"index": 1, "relevance_score": 0.9, "document": {"text": "a tuple"}}],
        "usage": {"prompt_tokens": 6, "total_tokens": 6},
        "meta": {"tokens": {"input_tokens": 6, "output_tokens": 0}},
    },
)


@dataclass(frozen=True, slots=True)
class Text:
    """A text to embed."""

    value: str
    field: str  # its place in the body
    limit: int | None  # only its first tokens count; None: all


@dataclass(frozen=True, slots=True)
class Comparison:
    """Texts, the pairs of them to compare, and the most tokens that count of a pair and of its second text."""

    texts: list[Text]
    pairs: list[tuple[int, int]]
    limit: int | None
    second_limit: int | None = None


class Form(Protocol[Body]):
    """The parts in which the two endpoints differ."""

    @property
    def kind(self) -> type[Body]:
        """The type of the body."""

    def comparison(self, body: Body, max_len: int) -> Comparison:
        """The texts and pairs of a body; raises :class:`ApiError` (400)."""

    def answer(self, body: Body, model: str, scores: list[float], tokens: int) -> dict[str, Any]:
        """The answer's JSON."""


class ScoreForm:
    """/v1/score: scores in the order of the texts."""

    kind = ScoreBody

    def comparison(self, body: ScoreBody, max_len: int) -> Comparison:
        """See :class:`Form`."""
        limit = truncation_limit(body.truncate_prompt_tokens, max_len)
        first, second = _texts(body.text_1, "text_1", limit), _texts(body.text_2, "text_2", limit)
        if len(first) not in (1, len(second)):
            message = f"`text_1` must hold one text, or as many as `text_2` ({len(second)}), got {len(first)}."
            raise invalid(message, "text_1", "invalid_value")
        starts = range(len(first)) if len(first) > 1 else [0] * len(second)
        return Comparison(first + second, [(start, len(first) + index) for index, start in enumerate(starts)], limit)

    def answer(self, body: ScoreBody, model: str, scores: list[float], tokens: int) -> dict[str, Any]:
        """See :class:`Form`."""
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        head = {"id": new_id("score"), "object": "list", "created": int(time.time()), "model": model}
        return head | {"data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


class RerankForm:
    """/v1/rerank: documents in the order of their similarity to a query."""

    kind = RerankBody

    def comparison(self, body: RerankBody, max_len: int) -> Comparison:
        """See :class:`Form`."""
        limit = truncation_limit(body.truncate_prompt_tokens, max_len)
        bounds = [bound for bound in (limit, body.max_tokens_per_doc) if bound is not None]
        per_document = min([*bounds, max_len]) if bounds else None
        documents = [document if isinstance(document, str) else document.text for document in body.documents]
        texts = [Text(body.query, "query", limit), *_texts(documents, "documents", per_document)]
        return Comparison(texts, [(0, index) for index in range(1, len(texts))], limit, body.max_tokens_per_doc)

    def answer(self, body: RerankBody, model: str, scores: list[float], tokens: int) -> dict[str, Any]:
        """See :class:`Form`."""
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
        if body.return_documents is not False:
            for result in results:
                document = body.documents[result["index"]]
                result["document"] = {"text": document if isinstance(document, str) else document.text}
        return {
            "id": new_id("rerank"),
            "object": "list",
            "model": model,
            "results": results,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "meta": {"tokens": {"input_tokens": tokens, "output_tokens": 0}},  # Cohere's clients read it here
        }


class ComparisonHandler(Generic[Body]):
    """Serves /v1/score or /v1/rerank."""

    def __init__(self, form: Form[Body], embedder: Embedder) -> None:
        self._form = form
        self._embedder = embedder
        self.decode = BodyDecoder(form.kind).decode

    async def answer(self, exchange: Exchange, body: Body, request: AdmittedRequest) -> None:
        """See :class:`Handler`."""
        async with UntilDisconnect(exchange):
            model = await request.find_model(body.model)
            exchange.model = model.name
            compared = self._form.comparison(body, model.max_len)
            require_score(model)
            inputs = await (_joined(model, compared) if model.classifies else _encoded(model, compared.texts))
            session = named_session(exchange.header(b"x-session-id")) or body.user or ""
            caller = request.caller(session, body.priority, exchange.traceparent)
            vectors = await self._embedder.embed(request, model, inputs, caller)
            exchange.answer_headers = request.headers()
            if model.classifies:
                scores = [label_scores(model.card.classes, numbers)[0] for numbers in vectors]
            else:
                size = len(compared.pairs) * model.card.hidden_size
                scores = await model.off_loop(size, partial(_cosines, vectors, compared.pairs), _INLINE_FLOATS)
            tokens = request.used.prompt_tokens
            await exchange.send_json(200, self._form.answer(body, model.name, scores, tokens))


def _texts(value: str | Sequence[str], field: str, limit: int | None) -> list[Text]:
    if isinstance(value, str):
        return [Text(value, field, limit)]
    return [Text(text, f"{field}[{index}]", limit) for index, text in enumerate(value)]


async def _joined(model: ServedModel, compared: Comparison) -> list[TextInput]:
    """Both texts of every pair, as a cross-encoder reads them."""
    inputs = []
    for one, other in compared.pairs:
        first, second = compared.texts[one], compared.texts[other]
        for text in (first, second):
            model.check_length(len(text.value), text.field)
            if not text.value:
                raise invalid(f"`{text.field}` is empty: at least one token is needed.", text.field)
        pair = TextInput(*await model.encode_pair(first.value, second.value, compared.limit, compared.second_limit))
        check_prompt(model, pair.ids, second.field)
        inputs.append(pair)
        await asyncio.sleep(0)  # let other tasks run after each pair
    return inputs


async def _encoded(model: ServedModel, texts: Sequence[Text]) -> list[TextInput]:
    inputs = []
    for text in texts:
        if text.limit is None:
            ids = await model.encode(text.value, text.field, add_special_tokens=True)
        else:
            ids = await model.encode_start(text.value, text.limit)
        check_prompt(model, ids, text.field)
        inputs.append(TextInput(ids))
        await asyncio.sleep(0)  # let other tasks run after each text
    return inputs


def _cosines(vectors: list[list[float]], pairs: list[tuple[int, int]]) -> list[float]:
    lengths = [math.hypot(*vector) for vector in vectors]
    return [
        max(-1.0, min(1.0, sum(map(mul, vectors[one], vectors[other])) / (lengths[one] * lengths[other] or 1.0)))
        for one, other in pairs
    ]
