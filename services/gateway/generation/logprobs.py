"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ryzanstein.v1 import worker_pb2

from services.gateway.generation.output import ScoredToken
from services.gateway.text.codec import ServedModel

# JSON has no infinities; a token that cannot be sampled is reported like this (as OpenAI and vLLM do).
_LOWEST = -9999.0


def _finite(value: float) -> float:
    return max(_LOWEST, value)


class LogprobWriter:
    """Writes one model's logprobs; `top` alternatives are shown."""

    def __init__(self, model: ServedModel, top: int) -> None:
        self._model = model
        self._top = top

    def chat(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """The chat shape."""
        return {"content": [self._chat_token(token.logprobs) for token in tokens], "refusal": None}

    def _chat_token(self, scored: worker_pb2.TokenLogprobs) -> dict[str, Any]:
        top = [self._chat_entry(token_id, logprob) for token_id, logprob in self._alternatives(scored)]
        return {**self._chat_entry(scored.token_id, scored.logprob), "top_logprobs": top}

    def _chat_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, piece = self._model.token_text(token_id), self._model.vocabulary.token_bytes(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(piece)}

    def _alternatives(self, scored: worker_pb2.TokenLogprobs) -> list[tuple[int, float]]:
        return list(zip(scored.top_ids, scored.top_logprobs, strict=True))[: self._top]

    def completion(self, tokens: Sequence[ScoredToken], shift: int = 0) -> dict[str, Any]:
        """The completions shape; `shift` is added to text offsets."""
        return {
            "tokens": [self._model.token_text(token.logprobs.token_id) for token in tokens],
            "token_logprobs": [_finite(token.logprobs.logprob) for token in tokens],
            "top_logprobs": [self._top_by_text(token.logprobs) for token in tokens],
            "text_offset": [token.offset + shift for token in tokens],
        }

    def _top_by_text(self, scored: worker_pb2.TokenLogprobs) -> dict[str, float]:
        """Alternatives by text, the token itself among them; of two with the same text the likelier stays."""
        by_text: dict[str, float] = {}
        for token_id, logprob in [*self._alternatives(scored), (scored.token_id, scored.logprob)]:
            by_text.setdefault(self._model.token_text(token_id), _finite(logprob))
        return by_text

    def echo(self, prompt_ids: Sequence[int], scored: Sequence[worker_pb2.TokenLogprobs]) -> dict[str, Any]:
        """The completions shape for a prompt, whose first token has no logprob."""
        texts = [self._model.token_text(token_id) for token_id in prompt_ids]
        return {
            "tokens": texts,
            "token_logprobs": [None, *(_finite(token.logprob) for token in scored)],
            "top_logprobs": [None, *(self._top_by_text(token) for token in scored)],
            "text_offset": _offsets(self._model, prompt_ids),
        }

    def prompt(self, scored: Sequence[worker_pb2.TokenLogprobs]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: one dictionary by token id for each position, null for the first."""
        return [None, *(self._by_id(token) for token in scored)]

    def _by_id(self, scored: worker_pb2.TokenLogprobs) -> dict[str, Any]:
        entries = [(scored.token_id, scored.logprob, scored.rank)]
        entries += [
            (token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(self._alternatives(scored), start=1)
            if token_id != scored.token_id
        ]
        return {
            str(token_id): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": self._model.token_text(token_id),
            }
            for token_id, logprob, rank in entries
        }


def _offsets(model: ServedModel, ids: Sequence[int]) -> list[int]:
    """Return the position at which the text of each prompt token begins."""
    detokenizer, offsets, position = model.new_detokenizer(), [], 0
    for token_id in ids:
        offsets.append(position)
        position += len(detokenizer.push(token_id))
    return offsets
