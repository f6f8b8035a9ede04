"""Sampling parameters of gateways become vLLM's."""

from __future__ import annotations

import json
import random
import re

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from
from ryzanstein.v1 import worker_pb2 as pb

from services.gateway.api.options import ResponseFormat, TagStructure
from services.gateway.grammar.compiler import as_lark
from services.gateway.grammar.formats import of_choice, of_regex, of_schema, of_structural_tag
from services.gateway.tools.grammars import CallForm, of_answer_or_calls, of_named, of_required, of_strict
from services.worker.engine.errors import InvalidRequestError
from services.worker.engine.request import EngineRequest
from services.worker.vllm.sampling import sampling_arguments, structured_outputs
from tests.models import BUNDLED_MODEL

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def arguments(generated: tuple[int, ...] = (), **sampling: object):
    return sampling_arguments(EngineRequest("r", [1, 2, 3], pb.Sampling(**sampling), generated_ids=generated), 100)


def test_every_parameter_is_translated() -> None:
    actual = arguments(
        temperature=0.5,
        top_k=4,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias={7: -3.0},
        seed=2**63 + 5,
        max_tokens=50,
        min_tokens=3,
        stop_token_ids=[9, 8],
        logprobs=0,
        prompt_logprobs=2,
    )
    assert actual == {
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "logit_bias": {7: -3.0},
        "seed": 5,
        "max_tokens": 50,
        "min_tokens": 3,
        "stop_token_ids": [9, 8],
        "ignore_eos": True,
        "logprobs": 0,
        "prompt_logprobs": 2,
        "structured_outputs": None,
    }


def test_unset_parameters_have_our_defaults_and_end_with_the_context() -> None:
    actual = arguments()
    assert (actual["temperature"], actual["seed"], actual["top_p"], actual["repetition_penalty"]) == (
        0.0,
        None,
        1.0,
        1.0,
    )
    assert (actual["max_tokens"], actual["logprobs"], actual["logit_bias"]) == (97, None, None)
    assert arguments(max_tokens=1000, min_tokens=999)["min_tokens"] == 97


def test_a_resumed_request_draws_with_a_new_seed() -> None:
    seeds = {arguments(tuple(range(at)), temperature=1.0, seed=3)["seed"] for at in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)


PERSON = CallForm("look", {**SCHEMA, "required": ["a"]})
TAGS = ResponseFormat(type="structural_tag", triggers=["<f"], structures=[TagStructure("<f=x>", SCHEMA, "</f>")])
GRAMMARS = {
    "json_schema": of_schema(SCHEMA),
    "json_object": of_schema({"type": "object"}),
    "no whitespace": of_schema(SCHEMA, ""),
    "regex": of_regex(r"[a-f]{2}(-|::=)[0-9]+"),
    "choice": of_choice(['a "b"', "\n::= é"]),
    "lark": 'start: "a" b\nb: /[xy]{2}/',
    "lark with options": "start[max_tokens=3]: /[a-z]*/",
    "lark with a schema": 'start: "<" s ">"\ns: %json {"type": "integer"}',
    "gbnf": as_lark('root ::= "\\u0061" b\nb ::= [x-y]'),
    "lark with escapes": r'start: "\x61\\x" /[\x62-\x63]/',
    "structural tag": of_structural_tag(TAGS, closed=True),
    "named call": of_named(PERSON),
    "required calls": of_required([PERSON, CallForm("see", SCHEMA)], parallel=True),
    "strict tools": of_strict([PERSON]),
    "answer or calls": of_answer_or_calls([PERSON], SCHEMA),
}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer((BUNDLED_MODEL / "tokenizer.json").read_text())


@pytest.mark.parametrize("kind", GRAMMARS)
def test_vllm_allows_the_tokens_that_ours_allows_with_a_grammar(tokenizer: LLTokenizer, kind: str) -> None:
    """Along a text that takes any of the allowed tokens; vLLM's backend calls `grammar_from`."""
    given = structured_outputs(GRAMMARS[kind])["grammar"]
    assert not re.search(r"(?<!\\)\\x", given), "an escape that the library of vLLM lacks"
    theirs = grammar_from("grammar", given)
    both = [LLMatcher(tokenizer, grammar) for grammar in (GRAMMARS[kind], theirs)]
    choice = random.Random(3)
    for _ in range(30):
        masks = [matcher.compute_bitmask() for matcher in both]
        assert masks[0] == masks[1]
        allowed = [at for at in range(8 * len(masks[0])) if masks[0][at // 8] >> at % 8 & 1]
        token = choice.choice(allowed)
        assert [matcher.consume_token(token) for matcher in both] == [True, True]
        if both[0].is_stopped():
            break
    assert [matcher.get_error() for matcher in both] == ["", ""]


def test_grammar_of_several_parts_is_refused_by_field() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        structured_outputs(json.dumps({"grammars": [{"json_schema": {}}, {"lark_grammar": "start: /a/"}]}))
    assert refused.value.field == "sampling.grammar"
