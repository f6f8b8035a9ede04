"""Converts parts of vLLM's outputs to ours. They are read by name, so that this needs no vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.compute.token_logprobs import TokenLogprobs
from services.worker.engine.output import Finish
from services.worker.vllm.core import RequestFailedError

_FINISH = {None: None, "stop": Finish.STOP, "length": Finish.LENGTH}


def finish_of(reason: str | None) -> Finish | None:
    """The finish for vLLM's finish reason; None while the request runs. Raises RequestFailedError for a fault."""
    if reason not in _FINISH:
        raise RequestFailedError(f"vLLM ended the request: {reason}")
    return _FINISH[reason]


def to_logprobs(ids: Sequence[int], rows: Iterable[Mapping[int, Any]], n_top: int) -> tuple[TokenLogprobs, ...]:
    """Our rows for tokens and vLLM's rows, each of which maps the token and the `n_top` likeliest ones to values."""
    return tuple(_row(token_id, row, n_top) for token_id, row in zip(ids, rows, strict=True))


def _row(token_id: int, row: Mapping[int, Any], n_top: int) -> TokenLogprobs:
    top = sorted(row, key=lambda other: row[other].rank)[:n_top]
    chosen = row[token_id]
    return TokenLogprobs(token_id, chosen.logprob, chosen.rank, tuple(top), tuple(row[other].logprob for other in top))
