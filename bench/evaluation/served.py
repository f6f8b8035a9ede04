"""Scores texts through a running server: `/tokenize` and the prompt logprobs of `/v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from bench.evaluation.text import Document, Window, cut

TOP = 20  # the most alternatives the API reports per position
_TIMEOUT_S = 300


@dataclass(frozen=True)
class Position:
    """The model's prediction at the position of one token of the text."""

    logprob: float  # log probability of the text's token, in nats
    best: int  # the most likely token
    known: dict[int, float]  # log probabilities of the `TOP` likeliest tokens and of the text's token


@dataclass(frozen=True)
class ScoredDocument:
    """A document with the positions of all its tokens except the start token."""

    document: Document
    positions: tuple[Position, ...]


@dataclass(frozen=True)
class Scorer:
    """Scores documents with a served model."""

    client: httpx.AsyncClient
    model: str
    start_token: int  # precedes a document, so that its first token also has a probability
    context: int = 1_024
    stride: int = 512

    async def score(self, document: Document) -> ScoredDocument:
        """Score one document; raises httpx.HTTPStatusError if the server refuses."""
        ids = [self.start_token, *await self._tokenize(document.text)]
        windows = [await self._window(window) for window in cut(ids, self.context, self.stride)]
        return ScoredDocument(document, tuple(position for window in windows for position in window))

    async def _tokenize(self, text: str) -> list[int]:
        answer = await self.client.post(
            "/tokenize", json={"model": self.model, "prompt": text, "add_special_tokens": False}
        )
        answer.raise_for_status()
        ids: list[int] = answer.json()["tokens"]
        return ids

    async def _window(self, window: Window) -> list[Position]:
        body = {"model": self.model, "prompt": window.ids, "max_tokens": 0, "prompt_logprobs": TOP}
        answer = await self.client.post("/v1/completions", json=body)
        answer.raise_for_status()
        reported = answer.json()["choices"][0]["prompt_logprobs"]
        return [
            read_position(token_id, entries)
            for token_id, entries in zip(window.ids[window.first :], reported[window.first :], strict=True)
        ]


def read_position(token_id: int, entries: dict[str, dict[str, float]]) -> Position:
    """Parse an entry of `prompt_logprobs`: the text's token first, then the alternatives in order."""
    known = {int(key): entry["logprob"] for key, entry in entries.items()}
    # Equally likely tokens all have rank 1; the sampler would take the last one in the list.
    best = [int(key) for key, entry in entries.items() if entry["rank"] == 1][-1]
    return Position(known[token_id], best, known)


async def score_all(
    url: str, model: str, start_token: int, documents: Sequence[Document], concurrency: int
) -> list[ScoredDocument]:
    """Score all documents, `concurrency` at a time."""
    limit = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as client:
        scorer = Scorer(client, model, start_token)

        async def one(document: Document) -> ScoredDocument:
            async with limit:
                return await scorer.score(document)

        return await asyncio.gather(*(one(document) for document in documents))
