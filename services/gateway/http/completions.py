"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.json import encode

from services.gateway.api.schema import CompletionBody, StreamOptions
from services.gateway.generation.choice import Choice
from services.gateway.generation.completions import CompletionPreparer, billed_prompt
from services.gateway.generation.logprobs import LogprobWriter
from services.gateway.generation.output import Generation, OutputChunk, ScoredToken
from services.gateway.generation.prepared import Prepared
from services.gateway.generation.prompts import split_prompts
from services.gateway.generation.request import Caller
from services.gateway.http.chunks import ChunkSerializer
from services.gateway.http.documentation import EXAMPLE_MODEL, Documentation
from services.gateway.text.codec import ServedModel
from services.gateway.usage import Usage

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


class CompletionSerializer(ChunkSerializer[CompletionBody]):
    """Writes text completions."""

    def __init__(self, preparer: CompletionPreparer) -> None:
        self._preparer = preparer

    async def prepare(self, body: CompletionBody, model: ServedModel, caller: Caller) -> Prepared:
        """See :class:`Serializer`."""
        prepared = await self._preparer.prepare(body, model, caller)
        self._begin("text_completion", prepared.request_id, model.name, body)
        self._model = model
        self._prompts = split_prompts(body.prompt, "prompt")
        self._prepared = prepared
        self._echo = bool(body.echo)
        self._silent = body.max_tokens == 0  # only the prompt is scored: what was generated is not shown
        self._scored = body.logprobs is not None
        self._prompt_scored = body.prompt_logprobs is not None
        self._writer = LogprobWriter(model, max(body.logprobs or 0, body.prompt_logprobs or 0))
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
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return self._frame(choice | extra, generation)

    def _logprobs(self, index: int, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        return self._writer.completion(tokens, self._shift(index)) if self._scored else None

    def frame(self, index: int, chunk: OutputChunk, generation: Generation) -> bytes:
        """See :class:`Serializer`."""
        if self._silent:
            silence = {"index": index, "text": "", "logprobs": None, "finish_reason": "length"}
            return b"" if chunk.finish is None else self._frame(silence, generation)
        if self._is_text(chunk):
            if not chunk.ids:
                return b""
            return b'%b%d,"text":%b%b' % (self._head, index, encode(chunk.text), self._tail)
        logprobs = self._logprobs(index, chunk.tokens) if chunk.tokens else None
        choice = {"index": index, "text": chunk.text, "logprobs": logprobs, "finish_reason": chunk.finish}
        return self._frame(choice | self._extra(chunk), generation)

    def _usage(self, generation: Generation) -> Usage:
        return billed_prompt(generation) if self._silent else generation.usage

    async def body(self, choices: Sequence[Choice], generations: Sequence[Generation], usage: Usage) -> dict[str, Any]:
        """See :class:`Serializer`."""
        written = [
            self._choice(index, choice, generation)
            for index, (choice, generation) in enumerate(zip(choices, generations, strict=True))
        ]
        return {**self._common, "choices": written, "usage": self._used(usage)}

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
