"""Structured output end to end: whatever the bundled model is asked, its text follows; wrong asks are named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.stack import RunningStack

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CODE = r"[a-f]{2,5}-[0-9]{3}"


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        yield client


def choices(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"prompt": "x = ", "max_tokens": 200, "temperature": 0.9, "seed": 5, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"])


def complete(client: httpx.Client, **fields: Any) -> str:
    (choice,) = choices(client, **fields)
    assert choice["finish_reason"] == "stop"
    return str(choice["text"])


small = st.integers(0, 4)
leaves = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": "x"}, {"enum": ["a", 1, None]}]),
    st.builds(lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n}, st.integers(-50, 50), small),
    st.builds(lambda low, n: {"type": "number", "minimum": low, "exclusiveMaximum": low + n + 1}, small, small),
    st.builds(lambda low, n: {"type": "string", "minLength": low, "maxLength": low + n}, small, small),
    st.sampled_from(["^[a-c]{1,3}$", "^x+y?$", "^(on|off)$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 8}
    ),
    st.sampled_from(["date", "time", "ipv4", "uuid"]).map(lambda kind: {"type": "string", "format": kind}),
)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(["a", "b", "long name", "é"]), inner, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from([*properties, "_"])).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required - {"_"}),
                "additionalProperties": False,
            }
        )
    )


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda items, low, n: {"type": "array", "items": items, "minItems": low, "maxItems": low + n},
                  inner, st.integers(0, 2), st.integers(0, 2)),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts}),
        st.lists(inner, min_size=1, max_size=2).map(
            lambda parts: {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
        ),
    ),
    max_leaves=5,
)  # fmt: skip


@settings(derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=schemas, seed=st.integers(0, 99))
def test_any_schema_gives_valid_json(client: httpx.Client, schema: dict[str, Any], seed: int) -> None:
    # No schema bounds the digits of a fraction: the penalty makes each further one less likely, so every text ends.
    for choice in choices(client, guided_json=schema, seed=seed, n=2, max_tokens=1500, frequency_penalty=0.5):
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["text"]), schema, jsonschema.Draft202012Validator)


def test_regex_choice_grammar_and_objects_by_all_their_names(client: httpx.Client) -> None:
    for ask in ({"guided_regex": CODE}, {"structured_outputs": {"regex": CODE}}):
        assert re.fullmatch(CODE, complete(client, **ask))
    for ask in ({"guided_choice": ['a "b"', "é\n"]}, {"structured_outputs": {"choice": ['a "b"', "é\n"]}}):
        assert complete(client, **ask) in ('a "b"', "é\n")
    lark, gbnf = 'start: "a" b\nb: /[xy]{2}/', 'root ::= "\\u0061" b\nb ::= [\\u0078-\\U00000079] [xy]'
    for grammar in (lark, gbnf):
        assert re.fullmatch("a[xy]{2}", complete(client, guided_grammar=grammar))
    assert re.fullmatch("a[xy]{2}", complete(client, structured_outputs={"grammar": lark}))
    for ask in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        assert isinstance(json.loads(complete(client, **ask)), dict)
    text = complete(client, structured_outputs={"json": json.dumps(PERSON), "disable_any_whitespace": True})
    assert msgspec.json.encode(json.loads(text)).decode() == text
    for kind in ("json", "json_object", "json_schema"):
        value = complete(client, response_format={"type": kind, "value": PERSON})
        jsonschema.validate(json.loads(value), PERSON)
    assert re.fullmatch(CODE, complete(client, response_format={"type": "regex", "value": CODE}))


def test_objects_are_closed_where_asked(client: httpx.Client) -> None:
    inner = {"type": "object", "properties": {"enum": {"const": 1}}, "required": ["enum"]}
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    for value in (schema, json.dumps(schema)):
        constraint = {"json": value, "disable_additional_properties": True}
        for seed in range(3):
            assert json.loads(complete(client, structured_outputs=constraint, seed=seed)) == {"a": {"enum": 1}}


def test_tagged_structures_follow_their_schemas_in_free_text(client: httpx.Client) -> None:
    """A trigger that matches at once: a space begins almost any word."""
    shape = {"type": "structural_tag", "triggers": [" "], "structures": [
        {"begin": " <f>", "schema": {"const": 7}, "end": "</f>"}]}  # fmt: skip
    for ask in ({"response_format": shape}, {"structured_outputs": {"structural_tag": json.dumps(shape)}}):
        (choice,) = choices(client, max_tokens=60, **ask)
        assert " " in choice["text"]
        assert " <f>7</f>".startswith(actual := re.findall(r" [^ ]*", choice["text"])[0][:9]), actual


def test_unenforced_schema_keywords_are_checked_at_the_end_of_the_text(client: httpx.Client) -> None:
    digits = {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 99}, "uniqueItems": True}
    ask = {"prompt": "x = ", "max_tokens": 100, "temperature": 1.5, "seed": 1}
    pairs = {**ask, "guided_json": {**digits, "maxItems": 2, "minItems": 2}}
    answers = [client.post("/v1/completions", json={**pairs, "seed": seed}) for seed in range(12)]
    texts = [answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200]
    assert texts
    assert all(len(set(json.loads(text))) == 2 for text in texts)
    values = {"enum": [0, 1, 2, 3, 4]}
    impossible = {**ask, "guided_json": {**digits, "items": values, "minItems": 6}}
    answer = client.post("/v1/completions", json=impossible)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "schema_failed", "guided_json")
    assert "at `/`" in error["message"]
    lines = client.post("/v1/completions", json={**impossible, "stream": True}).text.splitlines()
    last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1]
    assert last["error"]["code"] == "schema_failed"
    assert not any('"finish_reason":"stop"' in line for line in lines)
    for cut in ({"max_tokens": 3}, {"stop": ","}):
        assert client.post("/v1/completions", json={**impossible, **cut}).status_code == 200


def test_constraint_combines_with_n_seeds_stops_logprobs_and_limits(client: httpx.Client) -> None:
    one, two = choices(client, guided_regex=CODE, n=2, logprobs=3)
    assert one["text"] != two["text"]
    assert all(re.fullmatch(CODE, choice["text"]) for choice in (one, two))
    assert len(one["logprobs"]["tokens"]) == len(one["logprobs"]["token_logprobs"])
    assert choices(client, guided_regex=CODE)[0]["text"] == one["text"]
    assert complete(client, guided_regex=CODE, stop="-") == one["text"].split("-")[0]
    (cut,) = choices(client, guided_regex="[ab]{50}", max_tokens=4)
    assert cut["finish_reason"] == "length"
    assert re.fullmatch("[ab]+", cut["text"])


@pytest.mark.parametrize(
    ("ask", "param", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {
            "schema": {"properties": {"s": {"type": "array", "uniqueItems": True}}}, "strict": True}}},
         "response_format.json_schema.schema", "`uniqueItems` at `/properties/s`"),
        ({"guided_json": {"enum": [1234567890123456789]}}, "guided_json", "1234567890123456789"),
        ({"guided_json": {"$ref": "http://127.0.0.1/x"}}, "guided_json", "`$ref` to `http://127.0.0.1/x`"),
        ({"guided_json": {"$ref": "#/$defs/x"}}, "guided_json", "`/$defs/x`, which does not exist"),
        ({"guided_json": {"type": "strin"}}, "guided_json", "strin"),
        ({"guided_json": "{"}, "guided_json", "cannot be followed"),
        ({"guided_json": {"type": "integer", "multipleOf": 999983}}, "guided_json", "`/multipleOf` is 999983"),
        ({"guided_json": {"items": {"const": -(2**63)}}}, "guided_json", "`/items/const` is -9223372036854775808"),
        ({"guided_grammar": 'start: %json {"type": "integer", "multipleOf": 999983}'}, "guided_grammar", "longer than"),
        ({"guided_regex": "["}, "guided_regex", "unclosed"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "at most 65536 bytes"),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "Only one of"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
        ({"response_format": {"type": "regex"}}, "response_format.value", "Missing"),
        ({"response_format": {"type": "regex", "value": {}}}, "response_format.value", "must be a text"),
        ({"response_format": {"type": "structural_tag", "triggers": ["<g"], "structures": [
            {"begin": "<f>", "schema": {}, "end": ""}]}}, "response_format.structures", "none of `triggers`"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "missing required"),
    ],
)  # fmt: skip
def test_invalid_constraint_is_rejected_by_field(
    client: httpx.Client, ask: dict[str, Any], param: str, words: str
) -> None:
    answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 5, **ask})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]
    assert complete(client, guided_choice=["fine"]) == "fine"


texts = st.one_of(st.text(max_size=40), st.text('()[]{}|*+?.\\ab1,^$&~/" :=\n', max_size=60))
KEYWORDS = [
    *("type", "items", "anyOf", "allOf", "oneOf", "properties", "enum", "$ref", "pattern", "minItems", "maxLength"),
    *("format", "required", "const", "multipleOf", "minimum", "additionalProperties"),
]
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | texts | st.just({"$ref": "#"}),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(KEYWORDS),
        inner | st.sampled_from(["object", "array", "string", "integer", "#", "date"]),
        max_size=4,
    ),
    max_leaves=8,
)  # fmt: skip


@settings(derandomize=True, suppress_health_check=list(HealthCheck))
@given(ask=st.one_of(
    junk.filter(lambda value: isinstance(value, dict)).map(lambda schema: {"guided_json": schema}),
    texts.map(lambda text: {"guided_regex": text}),
    texts.map(lambda text: {"guided_grammar": f"start: {text}"}),
    texts.map(lambda text: {"guided_grammar": f"root ::= {text}"}),
    st.lists(texts, max_size=3).map(lambda choice: {"guided_choice": choice}),
))  # fmt: skip
def test_junk_constraint_is_followed_or_rejected_without_hurting_other_requests(
    client: httpx.Client, ask: dict[str, Any]
) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 12, "temperature": 1.5, "seed": 1, **ask}, allow_nan=True)
    answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400), (ask, answer.text)


def test_no_ranks_were_lost_and_requests_still_complete(stack: RunningStack, client: httpx.Client) -> None:
    assert not stack.resumes()["ranks_lost"]
    assert complete(client, guided_choice=["fine"]) == "fine"
