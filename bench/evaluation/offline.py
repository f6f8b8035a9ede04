"""Scores texts in process, through the ranks that a worker starts, with no server around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ryzanstein.v1.worker_pb2 import Sampling
from tokenizers import Tokenizer

from bench.evaluation.served import TOP, Position, ScoredDocument
from bench.evaluation.text import Document
from services.compute.token_logprobs import TokenLogprobs
from services.worker.native.offline import open_offline
from services.worker.native.startup import read_model
from services.worker.scheduling.request import Request
from services.worker.settings import WorkerSettings

_AT_ONCE = 8  # documents in the scheduler


@dataclass(frozen=True)
class Prompt:
    """The tokens of the beginning of a document."""

    document: Document  # with the text of these tokens alone
    ids: tuple[int, ...]  # the start token first, which is not scored


def cut_prompts(model: Path, documents: Sequence[Document], start: int, window: int) -> list[Prompt]:
    """Return the first `window` tokens of each document, by the tokenizer of `model`, the token `start` included."""
    tokenizer = Tokenizer.from_buffer(read_model(model).tokenizer.json)
    prompts = []
    for document in documents:
        ids = tokenizer.encode(document.text, add_special_tokens=False).ids[: window - 1]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        prompts.append(Prompt(Document(document.path, document.group, text), (start, *ids)))
    return prompts


async def score_offline(settings: WorkerSettings, prompts: Sequence[Prompt]) -> list[ScoredDocument]:
    """Score prompts with a model that has the tokens of their tokenizer. Raises StartupError, RanksFailedError."""
    scored = []
    async with open_offline(settings) as engine:
        for first in range(0, len(prompts), _AT_ONCE):
            some = prompts[first : first + _AT_ONCE]
            requests = [_request(prompt.ids) for prompt in some]
            await engine.run(requests)
            scored += [
                ScoredDocument(prompt.document, tuple(map(_position, request.prompt_logprobs)))
                for prompt, request in zip(some, requests, strict=True)
            ]
    return scored


def _request(ids: Sequence[int]) -> Request:
    return Request(list(ids), len(ids), Sampling(max_tokens=1, prompt_logprobs=TOP), max_tokens=1)


def _position(row: TokenLogprobs) -> Position:
    known = dict(zip(row.top_ids, row.top_logprobs, strict=True)) | {row.token_id: row.logprob}
    return Position(row.logprob, row.top_ids[0], known)
