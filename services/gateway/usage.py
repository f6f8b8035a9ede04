"""The tokens that a request used, and the unit of their cost."""

from __future__ import annotations

from msgspec import Struct

NANOS = 10**9  # costs are counted in billionths of the currency, as integers, so that sums are exact


class PredictionUsage(Struct, frozen=True):
    """Tokens that workers drafted from the prediction of a request."""

    accepted_tokens: int = 0  # those in the text
    rejected_tokens: int = 0  # the others; they are no tokens of the completion

    def __add__(self, other: PredictionUsage) -> PredictionUsage:
        return PredictionUsage(
            self.accepted_tokens + other.accepted_tokens, self.rejected_tokens + other.rejected_tokens
        )


class Usage(Struct, frozen=True):
    """Tokens that a request used."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    prediction: PredictionUsage | None = None  # None: the client sent no prediction
    cost: float | None = None  # cost of the whole request, in the prices' currency; None: not known yet, or no price

    def __add__(self, other: Usage) -> Usage:
        predictions = [one.prediction for one in (self, other) if one.prediction is not None]
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            sum(predictions, PredictionUsage()) if predictions else None,
        )


def usage_json(usage: Usage) -> dict[str, object]:
    """OpenAI's usage object."""
    written: dict[str, object] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.prediction is not None:
        written["completion_tokens_details"] = {
            "accepted_prediction_tokens": usage.prediction.accepted_tokens,
            "rejected_prediction_tokens": usage.prediction.rejected_tokens,
        }
    return written
