"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from array import array
from functools import partial

from msgspec.json import encode

from services.gateway.api.decode import BodyDecoder
from services.gateway.api.schema import EmbeddingBody
from services.gateway.asgi import JSON
from services.gateway.errors import invalid
from services.gateway.generation.abilities import require_embedding
from services.gateway.generation.admitted import AdmittedRequest, named_session
from services.gateway.generation.embedding import Embedder
from services.gateway.http.documentation import EXAMPLE_MODEL, Documentation
from services.gateway.http.exchange import Exchange, UntilDisconnect
from services.gateway.text.codec import ServedModel

_INLINE_FLOATS = 8_192  # up to here encoding takes at most a millisecond
DOCUMENTED = Documentation(
    summary="Embed texts or token ids",
    tag="embeddings",
    body=EmbeddingBody,
    example={"model": EXAMPLE_MODEL, "input": ["first text", "second text"]},
    answer={
        "object": "list",
        "model": EXAMPLE_MODEL,
        "data": [{"object": "embedding", "index": 0, "embedding": [0.01, -0.02]}],
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    },
)


class EmbeddingHandler:
    """POST /v1/embeddings."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.decode = BodyDecoder(EmbeddingBody).decode

    async def answer(self, exchange: Exchange, body: EmbeddingBody, request: AdmittedRequest) -> None:
        """See :class:`Handler`."""
        async with UntilDisconnect(exchange):
            model = await request.find_model(body.model)
            exchange.model = model.name
            require_embedding(model)
            if body.dimensions not in (None, model.card.hidden_size):
                message = f"`dimensions` must be the model's own size, {model.card.hidden_size}."
                raise invalid(message, "dimensions", "unsupported_field")
            inputs = await self._embedder.inputs(body.input, model, body.truncate_prompt_tokens, _prompt(body, model))
            session = named_session(exchange.header(b"x-session-id")) or body.user or ""
            caller = request.caller(session, body.priority, exchange.traceparent)
            vectors = await self._embedder.embed(request, model, inputs, caller)
            exchange.answer_headers = request.headers()
            tokens = request.used.prompt_tokens
            answer = partial(_answer, model, vectors, tokens, as_base64=body.encoding_format == "base64")
            size = len(vectors) * model.card.hidden_size
            await exchange.send_bytes(200, await model.off_loop(size, answer, _INLINE_FLOATS), [JSON])


def _prompt(body: EmbeddingBody, model: ServedModel) -> str:
    """The text before each text, by the publisher's name for it; raises :class:`ApiError` (400)."""
    known, name = model.card.prompts, body.prompt_name
    if name is not None and name not in known:
        allowed = ", ".join(f"`{one}`" for one in sorted(known)) or "none"
        raise invalid(f"`prompt_name` must be one of this model's prompts: {allowed}.", "prompt_name")
    return known[name] if name is not None else known.get(model.card.default_prompt, "")


def _answer(model: ServedModel, vectors: list[list[float]], tokens: int, *, as_base64: bool) -> bytes:
    """The answer's JSON, encoded vector by vector, since one call for all would hold the GIL for too long."""
    data = [
        encode({"object": "embedding", "index": index, "embedding": _base64(vector) if as_base64 else vector})
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    head = encode({"object": "list", "model": model.name, "usage": usage})
    return head[:-1] + b',"data":[' + b",".join(data) + b"]}"


def _base64(vector: list[float]) -> str:
    """Little-endian float32 in base64, OpenAI's format."""
    return base64.b64encode(array("f", vector).tobytes()).decode()
