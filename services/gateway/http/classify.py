"""POST /v1/classify, in vLLM's shape: a label for each text, and the scores of all labels."""

from __future__ import annotations

import time
from typing import Any

from services.gateway.api.decode import BodyDecoder
from services.gateway.api.schema import ClassifyBody
from services.gateway.generation.abilities import require_classes
from services.gateway.generation.admitted import AdmittedRequest, named_session
from services.gateway.generation.embedding import Embedder
from services.gateway.generation.labels import label_scores
from services.gateway.http.documentation import EXAMPLE_MODEL, Documentation
from services.gateway.http.exchange import Exchange, UntilDisconnect
from services.gateway.ids import new_id

DOCUMENTED = Documentation(
    summary="Classify texts or token ids; also at /classify",
    tag="embeddings",
    body=ClassifyBody,
    example={"model": EXAMPLE_MODEL, "input": ["what a film", "what a bore"]},
    answer={
        "id": "classify-0d6f8f2c9b1e4a57a3c1d2e4",
        "object": "list",
        "created": 1767225600,
        "model": EXAMPLE_MODEL,
        "data": [
            {"index": 0, "label": "good", "probs": [0.1, 0.9], "num_classes": 2},
            {"index": 1, "label": "bad", "probs": [0.8, 0.2], "num_classes": 2},
        ],
        "usage": {"prompt_tokens": 8, "total_tokens": 8},
    },
)


class ClassifyHandler:
    """POST /v1/classify."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.decode = BodyDecoder(ClassifyBody).decode

    async def answer(self, exchange: Exchange, body: ClassifyBody, request: AdmittedRequest) -> None:
        """See :class:`Handler`."""
        async with UntilDisconnect(exchange):
            model = await request.find_model(body.model)
            exchange.model = model.name
            require_classes(model)
            inputs = await self._embedder.inputs(body.input, model, body.truncate_prompt_tokens)
            session = named_session(exchange.header(b"x-session-id")) or body.user or ""
            caller = request.caller(session, body.priority, exchange.traceparent)
            vectors = await self._embedder.embed(request, model, inputs, caller)
            exchange.answer_headers = request.headers()
            classes, tokens = model.card.classes, request.used.prompt_tokens
            data: list[dict[str, Any]] = []
            for index, numbers in enumerate(vectors):
                scores = label_scores(classes, numbers)
                best = max(range(len(scores)), key=scores.__getitem__)
                label = {"index": index, "label": classes.labels[best]}
                data.append(label | {"probs": scores, "num_classes": len(scores)})
            head = {"id": new_id("classify"), "object": "list", "created": int(time.time()), "model": model.name}
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            await exchange.send_json(200, head | {"data": data, "usage": usage})
