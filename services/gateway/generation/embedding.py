"""Texts or ids to vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.api.schema import MAX_TEXTS
from services.gateway.errors import interrupted, invalid, too_long
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.generation.group import SequenceGroup
from services.gateway.generation.output import Generation
from services.gateway.generation.pipeline import Pipeline
from services.gateway.generation.prompts import encode_prompts, split_prompts, truncation_limit
from services.gateway.generation.request import Caller, SamplingOptions
from services.gateway.ids import new_id
from services.gateway.text.codec import ServedModel
from services.gateway.usage import Usage

_AT_ONCE = 64  # more would only queue at the workers and hold memory here


@dataclass(frozen=True, slots=True)
class TextInput:
    """The tokens of a text, or of two."""

    ids: list[int]
    second_from: int = 0  # position of the second text's first token; 0: one text


class Embedder:
    """Texts or ids to vectors, for REST and gRPC."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def inputs(
        self,
        value: str | Sequence[str | int | list[int]],
        model: ServedModel,
        truncate: int | None = None,
        prompt: str = "",
    ) -> list[TextInput]:
        """The tokens of each input, cut by `truncate` as in `truncate_prompt_tokens`; raises :class:`ApiError` (400).

        `prompt` is a text before each text.
        """
        pieces = [prompt + piece if isinstance(piece, str) else piece for piece in split_prompts(value, "input")]
        if len(pieces) > MAX_TEXTS:
            raise invalid(f"`input` may hold at most {MAX_TEXTS} entries.", "input", "invalid_value")
        limit = truncation_limit(truncate, model.max_len)
        inputs = [prompt.ids for prompt in await encode_prompts(model, pieces, "input", limit=limit)]
        longest = max(map(len, inputs))
        if longest > model.max_len:
            raise too_long(model.max_len, longest, 0, "input")
        return [TextInput(ids) for ids in inputs]

    async def embed(
        self, request: AdmittedRequest, model: ServedModel, inputs: Sequence[TextInput], caller: Caller
    ) -> list[list[float]]:
        """One vector per input, or a classifier's numbers, for a request that was let in; raises :class:`ApiError`."""
        tokens = sum(len(text.ids) for text in inputs)
        await request.admission.reserve(tokens)
        request_id, slots, group = new_id("embd"), asyncio.Semaphore(_AT_ONCE), SequenceGroup()

        async def one(index: int, text: TextInput) -> list[float]:
            options = SamplingOptions(max_tokens=1, temperature=0)
            async with slots:
                sequence = await self._pipeline.prepare(
                    f"{request_id}-{index}",
                    model,
                    text.ids,
                    options,
                    caller,
                    embed=True,
                    second_from=text.second_from,
                    group=group,
                )
                return await _vector(self._pipeline.generate(sequence))

        tasks = [asyncio.create_task(one(index, text)) for index, text in enumerate(inputs)]
        try:
            vectors = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        request.used = Usage(tokens)
        await request.count("embeddings", model)
        return vectors


async def _vector(generation: Generation) -> list[float]:
    try:
        while True:
            chunk = await generation.next()
            if chunk.embedding:
                return chunk.embedding
            if chunk.finish is not None:
                raise interrupted("The worker sent no embedding.")
    finally:
        generation.close()
