"""Converts parts of vLLM's outputs and configuration to ours. They are read by name, so that this needs no vLLM."""

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


def n_blocks(config: Any) -> int:
    """KV blocks; none for an encoder, for which vLLM counts one."""
    encodes = config.model_config.attn_type == "encoder_only"
    return 0 if encodes else int(config.cache_config.num_gpu_blocks)


def vector_size(model: Any) -> int:
    """Numbers of an embedding, or of a hidden state."""
    return int(model.embedding_size if model.runner_type == "pooling" else model.get_hidden_size())


def _row(token_id: int, row: Mapping[int, Any], n_top: int) -> TokenLogprobs:
    top = sorted(row, key=lambda other: row[other].rank)[:n_top]
    chosen = row[token_id]
    return TokenLogprobs(token_id, chosen.logprob, chosen.rank, tuple(top), tuple(row[other].logprob for other in top))
