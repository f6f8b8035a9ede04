"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from services.gateway.api.chat import template_message
from services.gateway.api.decode import BodyDecoder
from services.gateway.api.generate import permitted_model
from services.gateway.api.http import BodyLimits, Exchange
from services.gateway.api.schema import DetokenizeBody, TokenizeBody
from services.gateway.errors import invalid
from services.gateway.generation.output import Usage
from services.gateway.generation.pipeline import check_prompt
from services.gateway.tenants.tenant import Gate
from services.gateway.text.codec import ServedModel
from services.gateway.text.conversation import Conversation, encode_conversation
from services.gateway.upstream.catalog import Catalog


class TokenizeEndpoint:
    """Text or messages to ids."""

    def __init__(self, catalog: Catalog, gate: Gate, limits: BodyLimits, *, control_tokens: bool) -> None:
        self._catalog = catalog
        self._gate = gate
        self._limits = limits
        self._control_tokens = control_tokens
        self._decoder = BodyDecoder(TokenizeBody)

    async def serve(self, exchange: Exchange) -> None:
        """See :class:`Endpoint`."""
        tenant = await self._gate.identify(exchange.authorization)
        data = await exchange.body(self._limits)
        admission = await self._gate.enter(tenant)
        try:
            body = await self._decoder.decode(data)
            model = await permitted_model(self._catalog, body.model or "", tenant)
            ids = await self._encode(body, model)
            answer = {"count": len(ids), "max_model_len": model.max_len, "tokens": ids, "token_strs": None}
            if body.return_token_strs:
                answer["token_strs"] = await model.off_loop(len(ids), lambda: model.spellings(ids))
            await exchange.send_json(200, answer)
        finally:
            await admission.settle(Usage())

    async def _encode(self, body: TokenizeBody, model: ServedModel) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise invalid("Exactly one of `prompt` and `messages` is needed.", "prompt", "invalid_value")
        if body.prompt is not None:
            if body.add_generation_prompt is not None:
                raise invalid("`add_generation_prompt` needs `messages`.", "add_generation_prompt")
            special = body.add_special_tokens is not False
            return await model.encode(body.prompt, "prompt", add_special_tokens=special)
        turns = [template_message(message) for message in body.messages or ()]
        conversation = Conversation(turns, body.add_generation_prompt is not False, control_tokens=self._control_tokens)
        return await encode_conversation(model, conversation, add_special_tokens=bool(body.add_special_tokens))


class DetokenizeEndpoint:
    """Ids to text."""

    def __init__(self, catalog: Catalog, gate: Gate, limits: BodyLimits) -> None:
        self._catalog = catalog
        self._gate = gate
        self._limits = limits
        self._decoder = BodyDecoder(DetokenizeBody)

    async def serve(self, exchange: Exchange) -> None:
        """See :class:`Endpoint`."""
        tenant = await self._gate.identify(exchange.authorization)
        data = await exchange.body(self._limits)
        admission = await self._gate.enter(tenant)
        try:
            body = await self._decoder.decode(data)
            model = await permitted_model(self._catalog, body.model or "", tenant)
            if body.tokens:
                check_prompt(model, body.tokens, "tokens")
            await exchange.send_json(200, {"prompt": await model.text_of(body.tokens, skip_special_tokens=False)})
        finally:
            await admission.settle(Usage())
