"""Abilities of models: a decoder generates and embeds, an encoder embeds, a classifier gives numbers for labels."""

from __future__ import annotations

from services.gateway.errors import ApiError, invalid
from services.gateway.text.codec import ServedModel

_EMBEDS = "`/v1/embeddings`, `/v1/score` or `/v1/rerank`"


def require_generation(model: ServedModel) -> None:
    """Refuse a model without an output head; raises :class:`ApiError` (400)."""
    if model.card.only_embeds:
        raise _cannot(model, "generate text")


def require_embedding(model: ServedModel) -> None:
    """Refuse a classifier; raises :class:`ApiError` (400)."""
    if model.classifies:
        raise _cannot(model, "embed")


def require_classes(model: ServedModel) -> None:
    """Refuse a model without labels; raises :class:`ApiError` (400)."""
    if not model.classifies:
        raise _cannot(model, "classify")


def require_score(model: ServedModel) -> None:
    """Refuse a classifier with more than one label, which has no score of two texts; raises :class:`ApiError` (400)."""
    if model.classifies and len(model.card.classes.labels) != 1:
        raise _cannot(model, "score two texts")


def _cannot(model: ServedModel, what: str) -> ApiError:
    labels = model.card.classes.labels
    if not model.classifies:
        does, where = ("embeds", _EMBEDS) if model.card.only_embeds else ("generates and embeds", _EMBEDS)
    elif len(labels) == 1:
        does, where = "scores with one label", "`/v1/score`, `/v1/rerank` or `/v1/classify`"
    else:
        does, where = f"classifies with {len(labels)} labels", "`/v1/classify`"
    message = f"The model `{model.name}` cannot {what}: it {does}. Use {where}."
    return invalid(message, "model", "unsupported_model")
