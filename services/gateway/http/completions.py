"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.api.schema import CompletionBody, StreamOptions
from services.gateway.errors import ApiError
from services.gateway.generation.choice import Choice
from services.gateway.generation.completions import CompletionPreparer, billed_prompt
from services.gateway.generation.logprobs import LogprobWriter
from services.gateway.generation.output import Generation, OutputChunk, ScoredToken
from services.gateway.generation.prepared import Prepared
from services.gateway.generation.prompts import split_prompts
from services.gateway.generation.request import Caller
from services.gateway.http.documentation import EXAMPLE_MODEL, Documentation
from services.gateway.http.exchange import DONE, OPENAI_ERRORS
from services.gateway.http.serializer import Serializer
from services.gateway.text.codec import ServedModel
from services.gateway.usage import Usage, usage_json

_encode = msgspec.json.encode
DOCUMENTED = Documentation(
    summary="Continue a text; server-sent events with `stream`",
    tag="generation",
    body=CompletionBody,
    example={"model": EXAMPLE_MODEL, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0},
    answer={
        "id": "cmpl-0d6f8f2c9b1e4a57a3c1d2e4",
        "object": "text_completion",
        "created": 1767225600,
        "model": EXAMPLE_MODEL,
        "choices": [{"index": 0, "text": " there was", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 16, "total_tokens": 20},
    },
    parts={"`stream_options` of completions and chat completions": StreamOptions},
)


class CompletionSerializer(Serializer[CompletionBody]):
    """Writes text completions."""

    def __init__(self, preparer: CompletionPreparer) -> None:
        self._preparer = preparer

    async def prepare(self, body: CompletionBody, model: ServedModel, caller: Caller) -> Prepared:
        """See :class:`Serializer`."""
        prepared, options = await self._preparer.prepare(body, model, caller), body.stream_options
        self._common = {
            "id": prepared.request_id, "object": "text_completion", "created": int(time.time()), "model": model.name,
        }  # fmt: skip
        self._model = model
        self._prompts = split_prompts(body.prompt, "prompt")
        self._prepared = prepared
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
        return prepared

    def opening(self, index: int, generation: Generation) -> bytes:
        """See :class:`Serializer`."""
        if not self._echo and not self._with_ids:
            return b""
        logprobs = self._echo_logprobs(index, generation) if self._echo and self._scored else None
        text = self._prompt_text(index) if self._echo else ""
        extra: dict[str, Any] = {}
        if self._with_ids:
            extra = {"token_ids": [], "prompt_token_ids": self._prompt_ids(index)}
        return self._frame(index, text, logprobs, None, extra, generation)

    def _logprobs(self, index: int, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        return self._writer.completion(tokens, self._shift(index)) if self._scored else None

    def frame(self, index: int, chunk: OutputChunk, generation: Generation) -> bytes:
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
        logprobs = self._logprobs(index, chunk.tokens) if chunk.tokens else None
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
            usage = {"usage": usage_json(billed_prompt(generation) if self._silent else generation.usage)}
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
        logprobs = self._logprobs(index, [] if self._silent else choice.tokens)
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
            written["prompt_token_ids"] = self._prompt_ids(index)
        return written

    def _prompt_ids(self, index: int) -> list[int]:
        return self._prepared.generations[index].request.prompt_ids

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompts[index // self._prepared.per_prompt]
        return prompt if isinstance(prompt, str) else self._model.decode(prompt)

    def _shift(self, index: int) -> int:
        return len(self._prompt_text(index)) if self._echo else 0

    def _echo_logprobs(self, index: int, generation: Generation) -> dict[str, Any]:
        return self._writer.echo(self._prompt_ids(index), generation.prompt_logprobs)
