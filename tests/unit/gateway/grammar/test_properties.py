"""Names and counts of properties: answers are valid and end, or a 400 names the place in the schema."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.grammar.formats import of_schema
from services.gateway.grammar.names import names_of
from services.gateway.grammar.schemas import SchemaRules, ready
from tests.unit.gateway.grammar.writing import accepts, error_of, matcher_of, vocabulary, write

RULES = SchemaRules("f")

names = st.sampled_from(["a", "b", "x1"])
patterns = st.sampled_from(
    ["^a$", "^(a|b)$", "^[ab]$", "^x", "1$", ".*", "^.*$", "^[^\\s\\S]$", "^(?!a)", "^(?!a)x", r"\bx", "x^"]
)
parts = st.sampled_from([True, {}, {"type": "null"}, {"enum": [1, 2]}, False])
objects = st.fixed_dictionaries(
    {"type": st.just("object")},
    optional={
        "properties": st.dictionaries(names, parts, max_size=3),
        "patternProperties": st.dictionaries(patterns, parts, min_size=1, max_size=2),
        "additionalProperties": parts,
        "required": st.lists(names, unique=True, max_size=2),
        "minProperties": st.sampled_from([0, 1, 2.0, 3]),
        "maxProperties": st.sampled_from([0, 1, 2, 4]),
    },
)


def objects_with_few_names() -> list[str]:
    """Texts of objects, some with a name twice or with an escaped letter."""
    entries = [f'"{name}": {value}' for name in ("a", "b", "x1", "z", r"\u0061", r"\u0078") for value in ("1", "null")]
    pairs = [f"{{{one}, {other}}}" for one in entries for other in entries]
    return ["{}", *(f"{{{entry}}}" for entry in entries), *pairs]


@settings(suppress_health_check=list(HealthCheck))
@given(schema=objects)
def test_an_object_of_a_grammar_is_valid_or_its_schema_is_refused(schema: dict[str, Any]) -> None:
    try:
        made = ready(schema, RULES)
    except ValueError:
        return
    grammar = of_schema(made.schema)
    if error_of(grammar):
        return
    validator = jsonschema.Draft202012Validator(schema)
    texts = [text for text in objects_with_few_names() if accepts(grammar, text)] + [
        write(grammar, seed) for seed in range(2)
    ]
    for text in texts:
        if text is not None and not validator.is_valid(json.loads(text)):
            assert made.check is not None, (schema, text)
            assert len(re.findall(r'"[^"]*"\s*:', text)) > len(json.loads(text)), (schema, text)  # a name is repeated


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"properties": {"a": {"type": "null"}}, "patternProperties": {"^a$": {}}},
         ['{"a": null}'], ['{"a": 1}', '{"a": null,', '{"b": 1}']),
        ({"patternProperties": {"^a$": {"type": "null"}}}, ["{}", '{"a": null}'], ['{"a": null,', '{"b": 1}']),
        ({"patternProperties": {"^(a|b)$": {}}}, ['{"a": 1, "b": 2}'], ['{"a": 1, "a":']),
        ({"properties": {"a": {"enum": [1, 2]}}, "patternProperties": {"^[a-c]$": {"enum": [2, 3]}}},
         ['{"a": 2}', '{"c": 3}'], ['{"a": 1}', '{"a": 3}']),
        ({"patternProperties": {"": False}, "additionalProperties": True}, ["{}"], ['{"']),
        ({"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
         ['{"a": null, "c": 1}'], ['{"\\u0061": 1}']),
        ({"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": True},
         ['{"b": 1}'], ['{"\\u0061b": 1}']),
        ({"additionalProperties": False, "anyOf": [{"required": ["xa"]}, {}], "patternProperties": {"^x": {}}},
         ['{"xa": 1}', "{}"], ['{"b": 1}']),
        ({"patternProperties": {"^(?!a)": {"type": "null"}}, "additionalProperties": True},
         ['{"b": null}', '{"a": 1}'], ['{"b": 1}']),
        ({"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
         ['{"a": 1, "c": 1}', '{"a": 1, "b": 1, "c": 1}'], ["{}", '{"b": 1}']),
        ({"properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2, "required": ["a"]},
         ['{"a": 1}', '{"a": 1, "c": 1}'], ['{"a": 1, "b": 1, "c": 1}', '{"b": 1}']),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 1, "additionalProperties": True},
         ['{"b": 1}', '{"z": 1}', '{"a": 1, "z": 1}'], ["{}"]),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1, "additionalProperties": True},
         ["{}", '{"b": 1}', '{"z": 1}'], ['{"a": 1, "z": 1}', '{"y": 1, "z": 1}']),
        ({"properties": {"a": {}}, "patternProperties": {"^x": {}}, "minProperties": 1, "maxProperties": 2},
         ['{"a": 1}', '{"x1": 1, "x2": 1}'], ["{}", '{"a": 1, "x1": 1, "x2": 1}']),
    ],
)  # fmt: skip
def test_names_and_counts_are_enforced_while_the_text_is_written(
    schema: Any, allowed: list[str], refused: list[str]
) -> None:
    grammar = of_schema(ready({"type": "object"} | schema, SchemaRules("f", strict=True)).schema)
    assert [text for text in allowed if not accepts(grammar, text)] == []
    assert [text for text in refused if begins(grammar, text)] == []


def begins(grammar: str, text: str) -> bool:
    """Whether the grammar allows the text, or as the beginning of one if it has no end."""
    if text.endswith("}"):
        return accepts(grammar, text)
    tokens = vocabulary().tokenize_str(text)
    return matcher_of(grammar).try_consume_tokens(tokens) == len(tokens)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"patternProperties": {r"\bx": {}}, "additionalProperties": False}, r"/patternProperties/\\bx"),
        ({"items": {"patternProperties": {"^(?!a)x/y": {}}}}, r"/items/patternProperties/\^\(\?!a\)x~1y"),
        ({"patternProperties": {r"(.)\1": {"type": "null"}}, "additionalProperties": True}, "/patternProperties/"),
        ({"properties": {"a": {}, "b": {}}, "additionalProperties": True, "minProperties": 2}, "/minProperties"),
        ({"properties": dict.fromkeys("abcdefgh", True), "maxProperties": 4}, "/maxProperties"),
        ({"allOf": [{"properties": {"a": {}}}], "minProperties": 1, "properties": {"b": {}}}, "/minProperties"),
    ],
)
def test_an_object_that_no_grammar_follows_is_refused_with_the_path(schema: Any, path: str) -> None:
    with pytest.raises(ValueError, match=f"^`{path}"):
        ready(schema, RULES)


@pytest.mark.parametrize(
    ("pattern", "actual"),
    [
        ("^a$", ["a"]),
        ("^a$|^b$", ["a", "b"]),
        ("^(?:a|(b))c?$", ["a", "ac", "b", "bc"]),
        (r"^v\d$", [f"v{digit}" for digit in range(10)]),
        (r"^a\.b\x2d\u00e9[\]^-]$", ["a.b-é]", "a.b-é^", "a.b-é-"]),
        ("^[a-c]{1,2}$", [*"abc", *(one + other for one in "abc" for other in "abc")]),
        ("^$", [""]),
        ("a^|^b$", ["b"]),
        *(
            (pattern, None)
            for pattern in ("a", "^a", "a$", "^a*$", "^a+$", "^.$", "^[^a]$", "^[a-z]{2}$", "^a{2,}$", r"^\w$")
        ),
        *((pattern, None) for pattern in ("^(a$", "^a)$", "^[a$", "^(?=a)a$", "^(?i:a)$", "^a{300}$", "^?$")),
    ],
)
def test_few_names_of_a_pattern_are_listed(pattern: str, actual: list[str] | None) -> None:
    assert names_of(pattern) == actual
    assert all(re.search(pattern, name) for name in actual or ())
