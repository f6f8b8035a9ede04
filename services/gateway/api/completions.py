"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.gateway.api.decode import BodyDecoder
from services.gateway.api.http import DONE, OPENAI_ERRORS
from services.gateway.api.logprobs import LogprobWriter
from services.gateway.api.sampling import check_token_ids, sampling_options
from services.gateway.api.schema import CompletionBody
from services.gateway.errors import ApiError, invalid
from services.gateway.generation.output import Chunk, Generation, ScoredToken, Usage, usage_json
from services.gateway.generation.parts import Parts
from services.gateway.generation.pipeline import Pipeline, check_prompt, fit_max_tokens
from services.gateway.generation.request import Caller, SamplingOptions, new_id
from services.gateway.generation.sequences import Choice, Sequences
from services.gateway.grammar.admission import GrammarCompiler
from services.gateway.settings import GatewaySettings
from services.gateway.text.codec import ServedModel

_encode = msgspec.json.encode
_DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as text where it came as text."""

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


async def encode_prompts(
    model: ServedModel, prompts: Sequence[str | list[int]], field: str, *, add_special_tokens: bool = True
) -> list[Prompt]:
    """Tokenize; raises :class:`ApiError` (400)."""
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            found = Prompt(await model.encode(prompt, field, add_special_tokens=add_special_tokens), prompt)
        else:
            found = Prompt(prompt, None)
        check_prompt(model, found.ids, field)
        encoded.append(found)
        await asyncio.sleep(0)  # a batch gives way after each prompt
    return encoded


class CompletionSerializer:
    """Writes text completions."""

    def __init__(
        self, request_id: str, model: ServedModel, body: CompletionBody, prompts: Sequence[Prompt], per_prompt: int
    ) -> None:
        options = body.stream_options
        self._common = {
            "id": request_id, "object": "text_completion", "created": int(time.time()), "model": model.name,
        }  # fmt: skip
        self._model = model
        self._prompts = prompts
        self._per_prompt = per_prompt
        self._echo = bool(body.echo)
        self._silent = body.max_tokens == 0  # only the prompt is scored: what was generated is not shown
        self._with_ids = bool(body.return_token_ids)
        self._usage_field = options is not None and bool(options.include_usage)
        self._running_usage = options is not None and bool(options.continuous_usage_stats)
        self._with_workers = options is not None and bool(options.include_workers)
        self._scored = body.logprobs is not None
        self._prompt_scored = body.prompt_logprobs is not None
        self._writer = LogprobWriter(model, max(body.logprobs or 0, body.prompt_logprobs or 0))
        self._head = b"data: " + _encode(self._common)[:-1] + b',"choices":[{"index":'
        usage = b',"usage":null' if self._usage_field else b""
        self._tail = b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"

    def opening(self, index: int, generation: Generation) -> bytes:
        """See :class:`Serializer`."""
        if not self._echo and not self._with_ids:
            return b""
        logprobs = self._echo_logprobs(index, generation) if self._echo and self._scored else None
        text = self._prompt_text(index) if self._echo else ""
        extra: dict[str, Any] = {}
        if self._with_ids:
            extra = {"token_ids": [], "prompt_token_ids": self._prompts[index // self._per_prompt].ids}
        return self._frame(index, text, logprobs, None, extra, generation)

    def logprobs(self, index: int, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        """See :class:`Serializer`."""
        return self._writer.completion(tokens, self._shift(index)) if self._scored else None

    def frame(self, index: int, chunk: Chunk, generation: Generation) -> bytes:
        """See :class:`Serializer`."""
        if self._silent:
            return b"" if chunk.finish is None else self._frame(index, "", None, "length", {}, generation)
        takeover = chunk.takeover if self._with_workers else None
        quick = chunk.finish is None and not self._with_ids and takeover is None
        if quick and not chunk.tokens and not self._running_usage:
            if not chunk.ids:
                return b""
            return b'%b%d,"text":%b%b' % (self._head, index, _encode(chunk.text), self._tail)
        extra: dict[str, Any] = {"token_ids": chunk.ids} if self._with_ids else {}
        if takeover is not None:
            extra["worker"] = takeover.json()
        logprobs = self.logprobs(index, chunk.tokens) if chunk.tokens else None
        return self._frame(index, chunk.text, logprobs, chunk.finish, extra, generation)

    def _frame(
        self,
        index: int,
        text: str,
        logprobs: object,
        finish: str | None,
        extra: dict[str, Any],
        generation: Generation,
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, **extra}
        usage: dict[str, Any] = {"usage": None} if self._usage_field else {}
        if self._running_usage:
            usage = {"usage": usage_json(_billed_prompt(generation) if self._silent else generation.usage)}
        return b"data: " + _encode({**self._common, "choices": [choice], **usage}) + b"\n\n"

    async def ending(self, usage: Usage) -> bytes:
        """See :class:`Serializer`."""
        if not self._usage_field:
            return DONE
        return b"data: " + _encode({**self._common, "choices": [], "usage": usage_json(usage)}) + b"\n\n" + DONE

    def failure(self, error: ApiError) -> bytes:
        """See :class:`Serializer`."""
        return OPENAI_ERRORS.frames(error)

    async def body(self, choices: Sequence[Choice], generations: Sequence[Generation], usage: Usage) -> dict[str, Any]:
        """See :class:`Serializer`."""
        written = [
            self._choice(index, choice, generation)
            for index, (choice, generation) in enumerate(zip(choices, generations, strict=True))
        ]
        return {**self._common, "choices": written, "usage": usage_json(usage)}

    def _choice(self, index: int, choice: Choice, generation: Generation) -> dict[str, Any]:
        text = "" if self._silent else choice.text
        logprobs = self.logprobs(index, [] if self._silent else choice.tokens)
        if self._echo:
            text = self._prompt_text(index) + text
            if logprobs is not None:
                echoed = self._echo_logprobs(index, generation)
                logprobs = {key: echoed[key] + values for key, values in logprobs.items()}
        written: dict[str, Any] = {
            "index": index, "text": text, "logprobs": logprobs,
            "finish_reason": "length" if self._silent else choice.finish,
        }  # fmt: skip
        if self._prompt_scored:
            written["prompt_logprobs"] = self._writer.prompt(generation.prompt_logprobs)
        if self._with_ids:
            written["token_ids"] = [] if self._silent else choice.ids
            written["prompt_token_ids"] = self._prompts[index // self._per_prompt].ids
        return written

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompts[index // self._per_prompt]
        return self._model.decode(prompt.ids) if prompt.text is None else prompt.text

    def _shift(self, index: int) -> int:
        return len(self._prompt_text(index)) if self._echo else 0

    def _echo_logprobs(self, index: int, generation: Generation) -> dict[str, Any]:
        return self._writer.echo(self._prompts[index // self._per_prompt].ids, generation.prompt_logprobs)


class CompletionPreparer:
    """Turns bodies into sequences."""

    def __init__(self, pipeline: Pipeline, grammars: GrammarCompiler, settings: GatewaySettings) -> None:
        self._pipeline = pipeline
        self._grammars = grammars
        self._settings = settings
        self._decoder = BodyDecoder(CompletionBody)

    async def decode(self, data: bytes) -> CompletionBody:
        """Validate a body."""
        return await self._decoder.decode(data)

    async def prepare(self, body: CompletionBody, model: ServedModel, caller: Caller) -> Sequences:
        """The sequences of a body; raises :class:`ApiError`."""
        n = body.n or 1
        _check(body, n)
        check_token_ids(body, model.card.vocab_size)
        pieces = split_prompts(body.prompt, "prompt")
        if n * len(pieces) > self._settings.max_choices:
            message = (
                f"The request asks for {n * len(pieces)} sequences; at most {self._settings.max_choices} are allowed."
            )
            raise invalid(message, "n" if n > 1 else "prompt", "invalid_value")
        prompts = await encode_prompts(model, pieces, "prompt", add_special_tokens=body.add_special_tokens is not False)
        grammar = await self._grammars.grammar_of(body, model)
        request_id = new_id("cmpl")
        generations, parts = [], Parts() if n * len(prompts) > 1 else None
        for position, prompt in enumerate(prompts):
            options = self._options(body, model, prompt, grammar)
            own_id = request_id if len(prompts) == 1 else f"{request_id}-p{position}"
            request = await self._pipeline.prepare(own_id, model, prompt.ids, options, caller, parts=parts)
            generations += [self._pipeline.generate(request.choice(index)) for index in range(n)]
        return Sequences(
            generations=generations,
            serializer=CompletionSerializer(request_id, model, body, prompts, n),
            stream=bool(body.stream),
            include_workers=body.stream_options is not None and bool(body.stream_options.include_workers),
            billed=_billed_prompt if body.max_tokens == 0 else lambda generation: generation.usage,
            per_prompt=n,
        )

    def _options(self, body: CompletionBody, model: ServedModel, prompt: Prompt, grammar: str) -> SamplingOptions:
        asked = _DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        if body.max_tokens is None:
            asked = fit_max_tokens(model, len(prompt.ids), None, "prompt", _DEFAULT_MAX_TOKENS)
        prompt_logprobs = body.prompt_logprobs
        if prompt_logprobs is None and body.echo:
            prompt_logprobs = body.logprobs
        return sampling_options(
            body,
            model.card.sampling_defaults,
            # A worker generates at least one token: with max_tokens=0 it is thrown away.
            max_tokens=fit_max_tokens(model, len(prompt.ids), asked, "prompt", None),
            max_stops=self._settings.max_stop_strings,
            logprobs=body.logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        )


def _billed_prompt(generation: Generation) -> Usage:
    return Usage(generation.usage.prompt_tokens, 0, generation.usage.cached_tokens)


def _check(body: CompletionBody, n: int) -> None:
    if body.best_of is not None and body.best_of != n:
        raise invalid(f"`best_of` is only supported with the value of `n` ({n}).", "best_of", "unsupported_field")
    if body.stream and body.prompt_logprobs is not None:
        message = "`prompt_logprobs` are not available with `stream`; use `echo` with `logprobs`."
        raise invalid(message, "prompt_logprobs", "unsupported_field")
    if body.max_tokens == 0 and not (body.echo or body.prompt_logprobs is not None):
        message = "`max_tokens` must be at least 1, or 0 together with `echo` or `prompt_logprobs`."
        raise invalid(message, "max_tokens", "invalid_value")
