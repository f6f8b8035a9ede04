"""Scores and ranks over REST."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from ryzanstein_client.rest import wire
from ryzanstein_client.rest.answers import reader_of, usage
from ryzanstein_client.rest.requests import Request, model_field, post
from ryzanstein_client.results import Ranked, Ranking, Scores
from ryzanstein_client.settings import Settings


class _Score(Struct):
    index: int
    score: float


class _Scores(Struct):
    data: list[_Score]
    usage: wire.Usage


class _Ranked(Struct):
    index: int
    relevance_score: float


class _Ranking(Struct):
    results: list[_Ranked]
    usage: wire.Usage


def score(
    settings: Settings,
    text: str | Sequence[str],
    others: str | Sequence[str],
    truncate_prompt_tokens: int | None,
    model: str | None,
) -> Request[Scores]:
    """POST /v1/score."""
    body = {"text_1": text, "text_2": others, "truncate_prompt_tokens": truncate_prompt_tokens}
    return post("/v1/score", body | model_field(settings, model), _read_scores)


def rerank(
    settings: Settings,
    query: str,
    documents: Sequence[str],
    bounds: Mapping[str, int | None],
    model: str | None,
) -> Request[Ranking]:
    """POST /v1/rerank. `bounds` by the API's names."""
    body = {"query": query, "documents": documents, "return_documents": False, **bounds}
    return post("/v1/rerank", body | model_field(settings, model), _read_ranking)


def _read_scores(data: bytes) -> Scores:
    sent = _scores(data)
    rows = sorted(sent.data, key=lambda row: row.index)
    return Scores(tuple(row.score for row in rows), usage(sent.usage))


def _read_ranking(data: bytes) -> Ranking:
    sent = _ranking(data)
    return Ranking(tuple(Ranked(row.index, row.relevance_score) for row in sent.results), usage(sent.usage))


_scores = reader_of(_Scores)
_ranking = reader_of(_Ranking)
