"""What gateways send becomes vLLM's parameters."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, StructTag
from ryzanstein.v1 import worker_pb2 as pb

from services.worker.engine.errors import InvalidRequestError
from services.worker.engine.request import EngineRequest
from services.worker.vllm.sampling import sampling_arguments, structured_outputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def arguments(generated: tuple[int, ...] = (), **sampling: object):
    return sampling_arguments(EngineRequest("r", [1, 2, 3], pb.Sampling(**sampling), generated_ids=generated), 100)


def test_every_parameter_is_translated() -> None:
    found = arguments(
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
    assert found == {
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
    found = arguments()
    assert (found["temperature"], found["seed"], found["top_p"], found["repetition_penalty"]) == (0.0, None, 1.0, 1.0)
    assert (found["max_tokens"], found["logprobs"], found["logit_bias"]) == (97, None, None)
    assert arguments(max_tokens=1000, min_tokens=999)["min_tokens"] == 97


def test_a_resumed_request_draws_with_a_new_seed() -> None:
    seeds = {arguments(tuple(range(at)), temperature=1.0, seed=3)["seed"] for at in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_grammars_of_one_part_are_accepted_by_vllm() -> None:
    schema = structured_outputs(LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)))
    assert json.loads(schema["grammar"].removeprefix("start: %json ")).items() >= SCHEMA.items()
    for text in ("start: /a+/", LLMatcher.grammar_from_regex("a+"), LLMatcher.grammar_from_lark("start: /a+/")):
        assert "a+" in structured_outputs(text)["grammar"]
    tags = [StructTag(trigger="<f", begin="<f=x>", grammar=LLMatcher.grammar_from_json_schema("{}"), end="</f>")]
    tools = str(StructTag.to_grammar(tags, assume_special=False))
    assert structured_outputs(tools) == {"grammar": tools}
    with pytest.raises(InvalidRequestError) as refused:
        structured_outputs(json.dumps({"grammars": [{"json_schema": {}}, {"lark_grammar": "start: /a/"}]}))
    assert refused.value.field == "sampling.grammar"
