"""Log-probabilities of a token, and the mark of none. Free of torch, since engines and servers pass them on."""

from __future__ import annotations

from dataclasses import dataclass

NO_TOKEN = -1  # drawn in place of a token where logits are not finite


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, natural log, of the distribution before sampling filters."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
