"""From a validated request to a running sequence; the same for REST, WebSocket and gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ryzanstein.v1 import worker_pb2

from services.common.blockhash import wire_chain
from services.gateway.errors import invalid, too_long
from services.gateway.generation.group import SequenceGroup
from services.gateway.generation.held import HeldAnswer
from services.gateway.generation.message import MessageReader
from services.gateway.generation.output import Generation
from services.gateway.generation.request import Caller, GenerationRequest, SamplingOptions, spans_of
from services.gateway.generation.request_log import RequestLog
from services.gateway.generation.resume import ResumableStream, Upstream
from services.gateway.generation.tokens import TokenSource
from services.gateway.grammar.formats import Checks
from services.gateway.telemetry import GatewayMetrics
from services.gateway.text.codec import ServedModel
from services.gateway.upstream.catalog import Catalog

# Hashing takes about 0.1 µs a token: beyond this many it leaves the event loop (1 ms).
_INLINE_HASH_TOKENS = 8_192


log = logging.getLogger(__name__)

Wrapper = Callable[[GenerationRequest, TokenSource], TokenSource]


class Pipeline:
    """Prepares and runs sequences."""

    def __init__(
        self,
        catalog: Catalog,
        upstream: Upstream,
        metrics: GatewayMetrics,
        wrap: Wrapper = lambda request, live: live,
        *,
        log_prompts: bool = False,
        request_log: RequestLog | None = None,
    ) -> None:
        """`wrap` may put a cache in front of the workers."""
        self._request_log = request_log
        self.catalog = catalog
        self._upstream = upstream
        self._metrics = metrics
        self._wrap = wrap
        self._log_prompts = log_prompts

    async def prepare(
        self,
        request_id: str,
        model: ServedModel,
        prompt_ids: list[int],
        options: SamplingOptions,
        caller: Caller,
        *,
        embed: bool = False,
        second_from: int = 0,
        group: SequenceGroup | None = None,
        prediction_ids: list[int] | None = None,
        images: Sequence[worker_pb2.Image] = (),
    ) -> GenerationRequest:
        """Check the prompt against the model and hash its blocks."""
        if self._log_prompts:
            text = await model.text_of(prompt_ids, skip_special_tokens=False)
            log.info("prompt", extra={"generation_id": request_id, "model": model.name, "prompt": text})
        if len(prompt_ids) <= _INLINE_HASH_TOKENS:
            hashes = wire_chain(model.card.hash_root, caller.tenant, prompt_ids, spans_of(images))
        else:
            spans = spans_of(images)
            hashes = await asyncio.to_thread(wire_chain, model.card.hash_root, caller.tenant, prompt_ids, spans)
        return GenerationRequest(
            request_id, model, prompt_ids, options, caller, hashes, embed, second_from, group, prediction_ids, images
        )

    def generate(
        self, request: GenerationRequest, reader: MessageReader | None = None, checks: Checks | None = None
    ) -> Generation:
        """Start a sequence, read by `reader` and held to `checks`; nothing runs before its first `next`."""
        source = self._wrap(request, ResumableStream(request, self._upstream))
        held = HeldAnswer(checks) if checks else None
        return Generation(request, source, self._metrics, reader, held, self._request_log)


def check_prompt(model: ServedModel, prompt_ids: list[int], param: str) -> None:
    """Refuse prompts that no worker could take; raises :class:`ApiError` (400)."""
    if not prompt_ids:
        raise invalid(f"`{param}` is empty: at least one token is needed.", param)
    if len(prompt_ids) > model.max_len:
        raise too_long(model.max_len, len(prompt_ids), 0, param)
    worst = max(prompt_ids)
    if worst >= model.card.vocab_size or min(prompt_ids) < 0:
        limit = model.card.vocab_size
        raise invalid(f"`{param}` holds token id {worst}; ids of this model are 0 to {limit - 1}.", param)


def fit_max_tokens(
    model: ServedModel, prompt_tokens: int, max_tokens: int | None, param: str, default: int | None
) -> int:
    """How many tokens to generate: as asked, else `default`, else what fits; raises :class:`ApiError` (400)."""
    room = model.max_len - prompt_tokens
    if room < 1 or (max_tokens is not None and max_tokens > room):
        raise too_long(model.max_len, prompt_tokens, 1 if max_tokens is None else max_tokens, param)
    if max_tokens is not None:
        return max_tokens
    return room if default is None else min(default, room)
