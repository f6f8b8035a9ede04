"""Translates a request's sampling to vLLM's parameters, field by field; refuses by name what vLLM cannot compute."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance.gbnf_to_lark import is_lark_syntax
from ryzanstein.v1 import worker_pb2 as pb

from services.worker.engine.errors import InvalidRequestError, TooLongError
from services.worker.engine.request import EngineRequest

# vLLM's own bounds where they are narrower than ours.
_BOUNDS = {
    "temperature": (0.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_GREEDY = 1e-5  # lower temperatures are greedy, for us as for vLLM
_SEED_BITS = 2**63 - 1  # vLLM's seeds are signed
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|.)", re.DOTALL)
_STRIDE = 0x9E3779B97F4A7C15  # odd, from the golden ratio: seeds of neighbouring indices share no low bits


def check_length(request: EngineRequest, max_request_tokens: int) -> None:
    """Raise TooLongError for a request that leaves no room for a token, or for an embedding that does not fit."""
    known = len(request.prompt_ids) + len(request.generated_ids)
    most = max_request_tokens if request.embed else max_request_tokens - 1
    if known > most:
        raise TooLongError("prompt_ids", f"{known} tokens; at most {most} fit vLLM's max_model_len")


def sampling_arguments(request: EngineRequest, max_request_tokens: int) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for what is left of a request. Raises InvalidRequestError.

    vLLM knows a resumed request as a longer prompt, so its limits lose what is generated already; a replayed one begins
    anew.
    """
    sampling = request.sampling
    n_generated = 0 if replays(request) else len(request.generated_ids)
    _check_bounds(sampling)
    room = max_request_tokens - len(request.prompt_ids) - n_generated
    max_tokens = min(sampling.max_tokens - n_generated, room) if sampling.max_tokens else room
    greedy = sampling.temperature < _GREEDY
    return {
        "temperature": 0.0 if greedy else sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p or 1.0,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty or 1.0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "seed": None if greedy else _seed(sampling.seed, n_generated),
        "max_tokens": max_tokens,
        "min_tokens": min(max(sampling.min_tokens - n_generated, 0), max_tokens),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # stop_token_ids names every token that ends the text
        "logprobs": sampling.logprobs if sampling.HasField("logprobs") else None,
        # An earlier attempt has sent them with its first token.
        "prompt_logprobs": sampling.prompt_logprobs
        if sampling.HasField("prompt_logprobs") and not request.generated_ids
        else None,
        "structured_outputs": structured_outputs(sampling.grammar) if sampling.grammar else None,
    }


def replays(request: EngineRequest) -> str:
    """The field because of which vLLM must generate the tokens of earlier attempts again; empty: they join the prompt.

    What depends on generated tokens alone needs them generated. Repetition penalties treat a prompt's tokens alike.
    """
    if not request.generated_ids:
        return ""
    fields = ("grammar", "presence_penalty", "frequency_penalty")
    return next((field for field in fields if getattr(request.sampling, field)), "")


def structured_outputs(grammar: str) -> dict[str, Any]:
    """Return the arguments of vLLM's StructuredOutputsParams for a grammar. Raises InvalidRequestError.

    vLLM's `guidance` backend uses the same library as our ranks, but takes one Lark grammar. A schema is a rule of one:
    as `json`, vLLM would bound its depth.
    """
    if not grammar.lstrip().startswith("{"):
        return {"grammar": _as_lark(grammar)}
    match json.loads(grammar)["grammars"]:
        case [{"json_schema": dict() as schema, **other}] if not other.get("lark_grammar"):
            return {"grammar": f"start: %json {json.dumps(schema)}"}
        case [{"lark_grammar": str() as text, **other}] if not other.get("json_schema"):
            return {"grammar": _as_lark(text)}
    raise InvalidRequestError(
        "sampling.grammar", "vLLM follows one JSON schema or one Lark grammar; this grammar consists of several"
    )


def _as_lark(grammar: str) -> str:
    """The Lark grammar for vLLM, which takes it for GBNF if `start` has options, and whose library knows no `\\x`."""
    grammar = _ESCAPE.sub(lambda escape: f"\\u00{escape[1]}" if escape[1] else escape[0], grammar)
    return grammar if is_lark_syntax(grammar) else f"%llguidance {{}}\n{grammar}"


def _check_bounds(sampling: pb.Sampling) -> None:
    for field, (low, high) in _BOUNDS.items():
        value = getattr(sampling, field)
        if not low <= value <= high:
            raise InvalidRequestError(f"sampling.{field}", f"{value:g} is not in [{low:g}, {high:g}], as vLLM requires")


def _seed(seed: int, index: int) -> int:
    """The seed of a draw that begins at `index`: vLLM's generator starts anew with each attempt."""
    return (seed + index * _STRIDE) & _SEED_BITS
