"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from msgspec import UNSET

from services.gateway.api.chat import template_message
from services.gateway.api.decode import BodyDecoder
from services.gateway.api.generate import permitted_model
from services.gateway.api.http import BodyLimits, Exchange
from services.gateway.api.schema import DetokenizeBody, TokenizeBody
from services.gateway.errors import invalid
from services.gateway.generation.pipeline import check_prompt
from services.gateway.tenants.tenant import Gate
from services.gateway.text.codec import ServedModel
from services.gateway.upstream.catalog import Catalog


class TokenizeEndpoint:
    """Text or messages to ids."""

    def __init__(self, catalog: Catalog, gate: Gate, limits: BodyLimits) -> None:
        self._catalog = catalog
        self._gate = gate
        self._limits = limits
        self._decoder = BodyDecoder(TokenizeBody)

    async def serve(self, exchange: Exchange) -> None:
        """See :class:`Endpoint`."""
        tenant = await self._gate.identify(exchange.header(b"authorization"))
        body = self._decoder.decode(await exchange.body(self._limits))
        model = await permitted_model(self._catalog, body.model, tenant)
        ids = await self._encode(body, model)
        strings = [model.tokenizer.id_to_token(token_id) for token_id in ids] if body.return_token_strs else None
        answer = {"count": len(ids), "max_model_len": model.max_len, "tokens": ids, "token_strs": strings}
        await exchange.send_json(200, answer)

    async def _encode(self, body: TokenizeBody, model: ServedModel) -> list[int]:
        if (body.prompt is UNSET) == (body.messages is UNSET):
            raise invalid("Exactly one of `prompt` and `messages` is needed.", "prompt", "invalid_value")
        if isinstance(body.prompt, str):
            special = True if body.add_special_tokens is None else body.add_special_tokens
            return await model.encode(body.prompt, add_special_tokens=special)
        if model.template is None:
            raise invalid(f"The model `{model.name}` has no chat template.", "messages", "no_chat_template")
        turns = [template_message(message) for message in body.messages or ()]
        text = model.template.render(turns, add_generation_prompt=body.add_generation_prompt)
        return await model.encode(text, add_special_tokens=bool(body.add_special_tokens))


class DetokenizeEndpoint:
    """Ids to text."""

    def __init__(self, catalog: Catalog, gate: Gate, limits: BodyLimits) -> None:
        self._catalog = catalog
        self._gate = gate
        self._limits = limits
        self._decoder = BodyDecoder(DetokenizeBody)

    async def serve(self, exchange: Exchange) -> None:
        """See :class:`Endpoint`."""
        tenant = await self._gate.identify(exchange.header(b"authorization"))
        body = self._decoder.decode(await exchange.body(self._limits))
        model = await permitted_model(self._catalog, body.model, tenant)
        if body.tokens:
            check_prompt(model, body.tokens, "tokens")
        await exchange.send_json(200, {"prompt": model.decode(body.tokens, skip_special_tokens=False)})
