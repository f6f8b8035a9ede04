"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Sequence
from functools import partial

from msgspec.json import encode

from services.gateway.api.completions import encode_prompts, split_prompts
from services.gateway.api.decode import BodyDecoder
from services.gateway.api.http import JSON, Exchange, UntilDisconnect
from services.gateway.api.schema import MAX_TEXTS, EmbeddingBody
from services.gateway.errors import interrupted, invalid, too_long
from services.gateway.generation.entrance import AdmittedRequest
from services.gateway.generation.output import Generation, Usage
from services.gateway.generation.parts import Parts
from services.gateway.generation.pipeline import Pipeline
from services.gateway.generation.request import Caller, SamplingOptions, new_id
from services.gateway.text.codec import ServedModel

_INLINE_FLOATS = 8_192  # written within a millisecond
_AT_ONCE = 64  # more would only queue at the workers and hold memory here


class Embedder:
    """Texts or ids to vectors, for REST and gRPC."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def inputs(self, value: str | Sequence[str | int | list[int]], model: ServedModel) -> list[list[int]]:
        """Token ids of each input; raises :class:`ApiError` (400)."""
        pieces = split_prompts(value, "input")
        if len(pieces) > MAX_TEXTS:
            raise invalid(f"`input` may hold at most {MAX_TEXTS} entries.", "input", "invalid_value")
        inputs = [prompt.ids for prompt in await encode_prompts(model, pieces, "input")]
        longest = max(map(len, inputs))
        if longest > model.max_len:
            raise too_long(model.max_len, longest, 0, "input")
        return inputs

    async def embed(
        self, request: AdmittedRequest, model: ServedModel, inputs: Sequence[list[int]], caller: Caller
    ) -> list[list[float]]:
        """One vector per input, for a request that was let in; raises :class:`ApiError`."""
        tokens = sum(map(len, inputs))
        await request.admission.reserve(tokens)
        request.used = Usage(tokens)
        request_id, slots, parts = new_id("embd"), asyncio.Semaphore(_AT_ONCE), Parts()

        async def one(index: int, ids: list[int]) -> list[float]:
            options = SamplingOptions(max_tokens=1, temperature=0)
            async with slots:
                sequence = await self._pipeline.prepare(
                    f"{request_id}-{index}", model, ids, options, caller, embed=True, parts=parts
                )
                return await _vector(self._pipeline.generate(sequence))

        tasks = [asyncio.create_task(one(index, ids)) for index, ids in enumerate(inputs)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


class EmbeddingHandler:
    """POST /v1/embeddings."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.decode = BodyDecoder(EmbeddingBody).decode

    async def answer(self, exchange: Exchange, body: EmbeddingBody, request: AdmittedRequest) -> None:
        """See :class:`Handler`."""
        model = await request.model(body.model)
        exchange.model = model.name
        if body.dimensions not in (None, model.card.hidden_size):
            message = f"`dimensions` must be the model's own size, {model.card.hidden_size}."
            raise invalid(message, "dimensions", "unsupported_field")
        inputs = await self._embedder.inputs(body.input, model)
        caller = request.caller(body.user or "", None, exchange.traceparent)
        async with UntilDisconnect(exchange):
            vectors = await self._embedder.embed(request, model, inputs, caller)
            exchange.answer_headers = list(request.admission.headers)
            tokens = request.used.prompt_tokens
            answer = partial(_answer, model, vectors, tokens, as_base64=body.encoding_format == "base64")
            size = len(vectors) * model.card.hidden_size
            await exchange.send_bytes(200, await model.off_loop(size, answer, _INLINE_FLOATS), [JSON])


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


def _answer(model: ServedModel, vectors: list[list[float]], tokens: int, *, as_base64: bool) -> bytes:
    """The answer's JSON, written vector by vector: one call for all would hold the interpreter for too long."""
    data = [
        encode({"object": "embedding", "index": index, "embedding": _base64(vector) if as_base64 else vector})
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    head = encode({"object": "list", "model": model.name, "usage": usage})
    return head[:-1] + b',"data":[' + b",".join(data) + b"]}"


def _base64(vector: list[float]) -> str:
    """Little-endian float32, as OpenAI's clients read it."""
    return base64.b64encode(array("f", vector).tobytes()).decode()
