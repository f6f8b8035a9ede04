"""Completions: from a body to sequences."""

from __future__ import annotations

from msgspec.structs import replace

from services.gateway.api.schema import CompletionBody
from services.gateway.errors import invalid
from services.gateway.generation.group import SequenceGroup
from services.gateway.generation.output import Generation
from services.gateway.generation.pipeline import Pipeline, fit_max_tokens
from services.gateway.generation.prepared import MAX_CHOICES, Prepared
from services.gateway.generation.prompts import Prompt, encode_prediction, encode_prompts, split_prompts
from services.gateway.generation.request import Caller, SamplingOptions
from services.gateway.generation.sampling import check_token_ids, sampling_options
from services.gateway.grammar.admission import GrammarCompiler
from services.gateway.ids import new_id
from services.gateway.text.codec import ServedModel
from services.gateway.usage import Usage

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


def billed_prompt(generation: Generation) -> Usage:
    """Return the usage of a request that asks for its prompt alone."""
    return replace(generation.usage, completion_tokens=0)


class CompletionPreparer:
    """Turns bodies into sequences."""

    def __init__(self, pipeline: Pipeline, grammars: GrammarCompiler) -> None:
        self._pipeline = pipeline
        self._grammars = grammars

    async def prepare(self, body: CompletionBody, model: ServedModel, caller: Caller) -> Prepared:
        """The sequences of a body; raises :class:`ApiError`."""
        n = body.n or 1
        _check(body, n)
        check_token_ids(body, model.card.vocab_size)
        pieces = split_prompts(body.prompt, "prompt")
        if n * len(pieces) > MAX_CHOICES:
            message = f"The request asks for {n * len(pieces)} sequences; at most {MAX_CHOICES} are allowed."
            raise invalid(message, "n" if n > 1 else "prompt", "invalid_value")
        prompts = await encode_prompts(model, pieces, "prompt", add_special_tokens=body.add_special_tokens is not False)
        prediction_ids = await encode_prediction(model, body.prediction)
        constraint = await self._grammars.constraint(body)
        grammar = await self._grammars.admit(constraint, model) if constraint else ""
        checks = constraint.checks if constraint else None
        request_id = new_id("cmpl")
        generations, group = [], SequenceGroup() if n * len(prompts) > 1 else None
        for position, prompt in enumerate(prompts):
            options = self._options(body, model, prompt, grammar)
            own_id = request_id if len(prompts) == 1 else f"{request_id}-p{position}"
            request = await self._pipeline.prepare(
                own_id, model, prompt.ids, options, caller, group=group, prediction_ids=prediction_ids
            )
            generations += [self._pipeline.generate(request.choice(index), checks=checks) for index in range(n)]
        return Prepared(
            request_id,
            model,
            generations=generations,
            include_workers=body.stream_options is not None and bool(body.stream_options.include_workers),
            billed=billed_prompt if body.max_tokens == 0 else lambda generation: generation.usage,
            per_prompt=n,
        )

    def _options(self, body: CompletionBody, model: ServedModel, prompt: Prompt, grammar: str) -> SamplingOptions:
        max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        if body.max_tokens is None:
            max_tokens = fit_max_tokens(model, len(prompt.ids), None, "prompt", _DEFAULT_MAX_TOKENS)
        prompt_logprobs = body.prompt_logprobs
        if prompt_logprobs is None and body.echo:
            prompt_logprobs = body.logprobs
        return sampling_options(
            body,
            model,
            # A worker generates at least one token: with max_tokens=0 it is thrown away.
            max_tokens=fit_max_tokens(model, len(prompt.ids), max_tokens, "prompt", None),
            logprobs=body.logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        )


def _check(body: CompletionBody, n: int) -> None:
    if body.best_of is not None and body.best_of != n:
        raise invalid(f"`best_of` is only supported with the value of `n` ({n}).", "best_of", "unsupported_field")
    if body.stream and body.prompt_logprobs is not None:
        message = "`prompt_logprobs` are not available with `stream`; use `echo` with `logprobs`."
        raise invalid(message, "prompt_logprobs", "unsupported_field")
    if body.max_tokens == 0 and not (body.echo or body.prompt_logprobs is not None):
        message = "`max_tokens` must be at least 1, or 0 together with `echo` or `prompt_logprobs`."
        raise invalid(message, "max_tokens", "invalid_value")
