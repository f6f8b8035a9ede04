"""The prompts of a body: texts or token ids, one or many."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.api.options import PredictedContent
from services.gateway.errors import ApiError, invalid
from services.gateway.generation.pipeline import check_prompt
from services.gateway.text.codec import ServedModel
from services.gateway.text.guard import PromptPart


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; a prompt of text also keeps its text."""

    ids: list[int]
    text: str | None


def split_prompts(value: str | Sequence[str | int | list[int]], field: str) -> list[str | list[int]]:
    """Texts and token-id lists of a body's prompt or input; raises :class:`ApiError` (400)."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise invalid(f"`{field}` is empty.", field, "invalid_value")
    if all(isinstance(item, int) for item in value):
        return [[item for item in value if isinstance(item, int)]]
    prompts = [item for item in value if not isinstance(item, int)]
    if len(prompts) != len(value):
        raise invalid(f"`{field}` mixes token ids with texts or lists.", field, "invalid_value")
    return prompts


def truncation_limit(limit: int | None, max_len: int) -> int | None:
    """The first tokens that count by `truncate_prompt_tokens`; None: all. Raises :class:`ApiError` (400)."""
    if limit is None or limit == -1:
        return limit and max_len
    if not 0 < limit <= max_len:
        message = f"`truncate_prompt_tokens` must be 1 to {max_len} for this model, or -1, got {limit}."
        raise invalid(message, "truncate_prompt_tokens", "invalid_value")
    return limit


async def encode_prediction(model: ServedModel, prediction: str | PredictedContent | None) -> list[int] | None:
    """Token ids of an expected answer, None without one; raises :class:`ApiError` (400) beyond the model's context."""
    if prediction is None:
        return None
    text = prediction if isinstance(prediction, str) else prediction.text
    part = PromptPart(text, literal=model.control_tokens.in_text(text))  # answers hold no control tokens
    try:
        model.check_length(len(text), "prediction")
        ids = await model.off_loop(len(text), lambda: model.encode_parts([part], "prediction"))
    except ApiError as error:
        raise _long_prediction(model) from error
    if len(ids) > model.max_len:
        raise _long_prediction(model)
    return ids


def _long_prediction(model: ServedModel) -> ApiError:
    message = f"`prediction` has more than {model.max_len} tokens, the context of this model."
    return invalid(message, "prediction", "context_length_exceeded")


async def encode_prompts(
    model: ServedModel,
    prompts: Sequence[str | list[int]],
    field: str,
    *,
    add_special_tokens: bool = True,
    limit: int | None = None,
) -> list[Prompt]:
    """Tokenize, at most the first `limit` tokens of each; raises :class:`ApiError` (400)."""
    encoded = []
    for prompt in prompts:
        if limit is not None:
            read = Prompt(await model.encode_start(prompt, limit) if isinstance(prompt, str) else prompt[:limit], None)
        elif isinstance(prompt, str):
            read = Prompt(await model.encode(prompt, field, add_special_tokens=add_special_tokens), prompt)
        else:
            read = Prompt(prompt, None)
        check_prompt(model, read.ids, field)
        encoded.append(read)
        await asyncio.sleep(0)  # a batch gives way after each prompt
    return encoded
