"""Scores texts in process, through the ranks that a worker starts, with no server around them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ryzanstein.v1.worker_pb2 import Sampling
from tokenizers import Tokenizer

from bench.evaluation.served import TOP, Position, ScoredDocument
from bench.evaluation.text import Document
from services.worker.engine.output import TokenLogprobs
from services.worker.native.model_files import read_model_files
from services.worker.native.offline import open_offline
from services.worker.scheduling.request import Request
from services.worker.settings import WorkerSettings

_AT_ONCE = 8  # documents in the scheduler


async def score_offline(
    settings: WorkerSettings, documents: Sequence[Document], start: int, window: int
) -> list[ScoredDocument]:
    """Score the first tokens of each document, `window` of them with the token `start` before them.

    Raises StartupError, RanksFailedError.
    """
    tokenizer = Tokenizer.from_buffer(read_model_files(Path(settings.model)).tokenizer_json)
    scored = []
    async with open_offline(settings) as engine:
        for first in range(0, len(documents), _AT_ONCE):
            some = documents[first : first + _AT_ONCE]
            requests = [_request([start, *_tokens(tokenizer, document.text)][:window]) for document in some]
            await engine.run(requests)
            scored += [_scored(tokenizer, document, request) for document, request in zip(some, requests, strict=True)]
    return scored


def _tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _request(ids: list[int]) -> Request:
    return Request(ids, len(ids), Sampling(max_tokens=1, prompt_logprobs=TOP), max_tokens=1)


def _scored(tokenizer: Tokenizer, document: Document, request: Request) -> ScoredDocument:
    """Return the scores of a request's prompt, with the part of the text that was scored."""
    text = tokenizer.decode(request.token_ids[1 : request.n_prompt], skip_special_tokens=False)
    part = Document(document.path, document.group, text)
    return ScoredDocument(part, tuple(_position(row) for row in request.prompt_logprobs))


def _position(row: TokenLogprobs) -> Position:
    known = dict(zip(row.top_ids, row.top_logprobs, strict=True)) | {row.token_id: row.logprob}
    return Position(row.logprob, row.top_ids[0], known)
