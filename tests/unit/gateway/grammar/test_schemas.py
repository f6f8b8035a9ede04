"""Schemas of clients: whatever they use, an answer is valid by them, is checked, or they are refused by name."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.errors import ApiError
from services.gateway.grammar.formats import of_schema
from services.gateway.grammar.patterns import followable
from services.gateway.grammar.schemas import SchemaRules, ready
from tests.unit.gateway.grammar.published import PYDANTIC, ZOD, ZOD_FORMATS
from tests.unit.gateway.grammar.writing import accepts, error_of, write

RULES = SchemaRules("f")


def allows(schema: Any, value: Any, rules: SchemaRules = RULES) -> bool:
    text = value if isinstance(value, str) else json.dumps(value)
    return accepts(of_schema(ready(schema, rules).schema), text)


def is_held(schema: Any, text: str) -> bool:
    """Whether the check of the finished text lets it pass; without one all do."""
    check = ready(schema, RULES).check
    try:
        if check is not None:
            check.hold(text)
    except ApiError as error:
        return (error.status, error.code, error.param) != (400, "schema_failed", "f")
    return True


def assert_answers_are_valid(schema: Any, seeds: range, *, known: bool = True) -> None:
    grammar = of_schema(ready(schema, RULES).schema)
    assert not error_of(grammar), (schema, error_of(grammar))
    validator = jsonschema.Draft202012Validator({**schema, "$schema": "https://json-schema.org/draft/2020-12/schema"})
    for seed in seeds:
        text = write(grammar, seed)
        if text is not None and known:
            assert is_held(schema, text) == validator.is_valid(json.loads(text)), (schema, text)


def _ecma(schema: Any) -> bool:
    """Whether Python's `re`, by which the oracle matches, reads the schema's patterns."""
    return r"\p{" not in json.dumps(schema)


@pytest.mark.parametrize("schema", [*PYDANTIC, *ZOD], ids=lambda schema: json.dumps(schema)[:60])
def test_schemas_of_pydantic_and_zod_are_accepted_and_answers_are_valid(schema: Any) -> None:
    assert_answers_are_valid(schema, range(6), known=_ecma(schema))


values = st.sampled_from([None, True, 0, 1, 2, "a", "b", "ab", [], [1, 1], {"a": 1}])
texts = st.sampled_from(["a", "b", "ab"])
keywords: dict[str, st.SearchStrategy[Any]] = {
    "const": values,
    "enum": st.lists(values, min_size=1, max_size=3),
    "format": st.sampled_from(["date", "path", "jwt", "uuid"]),
    "pattern": st.sampled_from(["^a", "^(?!a)", "b$", "^(?=.*b)[ab]*$", r"(a)\1", "^(?!.*b)[ab]{1,3}$"]),
    "uniqueItems": st.booleans(),
    "minItems": st.integers(0, 2),
    "maxItems": st.integers(2, 3),
    "minProperties": st.integers(0, 3),
    "maxProperties": st.integers(2, 4),
    "minimum": st.sampled_from([-1, 0, 2**53 + 1, 1e30]),
    "maximum": st.sampled_from([2, 2**60, 2**63 - 1, 1e30]),
    "required": st.lists(texts, unique=True, max_size=2),
    "propertyNames": st.sampled_from(
        [True, {"type": "string"}, {"enum": ["a", "b"]}, {"pattern": "^a"}, {"maxLength": 1}]
    ),
    "dependentRequired": st.dictionaries(texts, st.lists(texts, max_size=1, unique=True), max_size=1),
    "unevaluatedProperties": st.booleans(),
    "type": st.sampled_from(["object", "object", "array", "array", "string", "integer", "boolean", ["string", "null"]]),
}  # fmt: skip


def _with_parts(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(parts, min_size=1, max_size=2)
    return st.fixed_dictionaries(
        {},
        optional={
            **keywords,
            **dict.fromkeys(("properties", "patternProperties"), st.dictionaries(texts, parts, max_size=2)),
            **dict.fromkeys(("items", "additionalProperties", "contains", "not", "if", "then"), parts),
            **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), several),
        },
    )


schemas = st.recursive(st.fixed_dictionaries({}, optional=keywords), _with_parts, max_leaves=4)


@settings(derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=schemas)
def test_a_passing_answer_is_valid_under_any_mix_of_keywords(schema: dict[str, Any]) -> None:
    """Also that none is stopped by a check which it would have passed: the check is the schema itself."""
    try:
        grammar = of_schema(ready(schema, RULES).schema)
    except ValueError:
        return
    if not error_of(grammar):
        assert_answers_are_valid(schema, range(2))


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.floats(-1, 2) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", *keywords]), inner, max_size=2),
    max_leaves=5,
)


@settings(derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=_with_parts(junk), wrong=st.dictionaries(st.sampled_from([*keywords, "properties", "oneOf"]), junk))
def test_junk_is_made_ready_or_refused(schema: dict[str, Any], wrong: dict[str, Any]) -> None:
    for rules in (RULES, SchemaRules("f", strict=True, function="now")):
        with contextlib.suppress(ValueError, ApiError):
            ready({**schema, **wrong}, rules)


NAMED = {"type": "object", "properties": {"a": {}}}


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"properties": {"a": {}}}, {"a": 1}, {"a": 1, "b": 2}),
        ({"properties": {"a": {}}, "additionalProperties": True}, {"a": 1, "b": 2}, "{"),
        ({"type": "object"}, {"b": 2}, "{"),
        ({"type": "object", "properties": {}}, {}, {"b": 2}),
        ({"properties": {"a": {}}, "required": ["b"]}, {"b": 2}, {"b": 2, "c": 1}),
        ({"properties": {"a": {"type": "object"}}}, {"a": {"x": 1}}, {"a": {}, "b": 1}),
        ({"properties": {"a": {"properties": {"b": {}}}}}, {"a": {"b": 1}}, {"a": {"c": 1}}),
        ({"patternProperties": {"^x": {}}}, {"x1": 1}, {"y": 1}),
        ({"allOf": [NAMED, {"properties": {"b": {}}}], "type": "object"}, {"a": 1, "b": 2}, {"c": 1}),
        ({"properties": {"b": {}}, "anyOf": [NAMED, {"required": ["b"]}]}, {"b": 2, "a": 1}, {"c": 1}),
        ({"anyOf": [NAMED, {"properties": {"b": {}}}], "type": "object"}, {"b": 1}, {"a": 1, "b": 2}),
        ({"$ref": "#/$defs/A", "properties": {"b": {}}, "$defs": {"A": NAMED}}, {"a": 1, "b": 1}, {"c": 1}),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": NAMED}}, {"a": 1}, {"c": 1}),
        ({"type": "object", "allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, {"a": 1}, {"c": 1}),
        ({"minProperties": 3, "properties": {"a": {}}, "required": ["a"]}, {"a": 1, "b": 1, "c": 1}, "{"),
        ({"maxProperties": 1, **NAMED}, {"a": 1}, {"a": 1, "b": 1}),
        ({"properties": {"a": {}}, "if": NAMED, "then": {"properties": {"b": {}}}}, {"a": 1, "b": 2}, {"c": 1}),
        ({"properties": {"b": {}}, "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}], "$defs": {"A": NAMED}},
         {"b": 1, "a": 1}, {"c": 1}),
        ({"properties": {"a": {"$ref": "#/$defs/A/anyOf/1"}}, "$defs": {"A": {"anyOf": [{}, {"type": "null"}]}}},
         {"a": None}, {"a": 1}),
    ],
)  # fmt: skip
def test_objects_have_the_properties_that_their_schemas_name(schema: Any, allowed: Any, refused: Any) -> None:
    assert allows(schema, allowed)
    assert not allows(schema, refused)


def test_objects_are_open_where_a_schema_or_the_setting_says_so() -> None:
    rules = SchemaRules("f", closed=False)
    assert allows(NAMED, {"b": 1}, rules)
    assert not allows({**NAMED, "unevaluatedProperties": False}, {"b": 1}, rules)
    assert not allows({**NAMED, "additionalProperties": False}, {"b": 1}, rules)


@pytest.mark.parametrize("parameters", [{}, {"type": "object"}, {"type": "object", "properties": {}}])
def test_a_function_without_parameters_has_no_arguments(parameters: Any) -> None:
    rules = SchemaRules("f", function="now")
    assert allows(parameters, {}, rules)
    assert not allows(parameters, {"a": 1}, rules)
    assert not allows(parameters, "1", rules)
    assert allows({**parameters, "additionalProperties": True}, {"a": 1}, rules)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ["a", "b"], ["a", "a"]),
        ({"type": "object", "minProperties": 2}, {"f": 1, "g": 1}, '{"f": 1, "f": 1}'),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, 1.5, 1),
        ({"type": "string", "pattern": r"^(.)\1$"}, "aa", "ab"),
        ({"properties": {"a": {"not": {"const": 1}}}}, {"a": 2}, {"a": 1}),
        ({"if": {"const": 1}, "then": False}, 2, 1),
        ({"type": "string", "pattern": "^(?!ab)..$"}, "cd", "ab"),
        ({"type": "string", "pattern": "^(?=a)a|^b$"}, "ab", "c"),
        ({"type": "object", "propertyNames": {"type": "integer"}}, {}, {"a": 1}),
        ({"type": "array", "contains": {"const": 1}}, [2, 1], [2]),
        ({"type": "object", "propertyNames": {"enum": ["a"]}, "patternProperties": {"b": {}},
          "additionalProperties": True}, {"a": 1}, {"b": 1}),
    ],
)  # fmt: skip
def test_keywords_beyond_grammars_are_checked_or_rejected_in_strict_mode(schema: Any, valid: Any, invalid: Any) -> None:
    texts = [value if isinstance(value, str) and value[0] == "{" else json.dumps(value) for value in (valid, invalid)]
    assert accepts(of_schema(ready(schema, RULES).schema), texts[0])
    passes = [accepts(of_schema(ready(schema, RULES).schema), text) and is_held(schema, text) for text in texts]
    assert passes == [True, False]
    with pytest.raises(ApiError, match=r"uses `\w+` at `/[^`]*`") as refused:
        ready(schema, SchemaRules("f", strict=True))
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "unsupported_keyword", "f")


@pytest.mark.parametrize(
    ("schema", "checked"),
    [
        ({"oneOf": [{"const": n} for n in range(128)]}, False),
        ({"oneOf": [{"const": n} for n in range(129)]}, True),
        ({"oneOf": [{"type": ["string", "null"]}, {"type": "array"}]}, False),
        ({"oneOf": [{"type": ["string", "null"]}, {"type": "string", "minLength": 1}]}, True),
        (
            {"oneOf": [{"properties": {"k": {"const": n}}} for n in (1, 2)], "discriminator": {"propertyName": "k"}},
            True,
        ),
        ({"oneOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "$defs": {"A": {"$ref": "#/$defs/A"}}}, True),
    ],
)
def test_alternatives_are_checked_unless_mutually_exclusive(schema: Any, checked: bool) -> None:
    assert (ready(schema, RULES).check is not None) is checked


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": 10**400}, "a grammar writes 15 digits"),
        ({"description": "x" * 65_536}, "at most 65536 bytes"),
        ([], "must be an object"),
    ],
)
def test_a_schema_that_can_not_be_followed_is_refused_with_the_reason(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ready(schema, RULES)


def test_a_text_that_was_cut_off_is_not_checked() -> None:
    assert is_held({"not": {"const": {"a": 1}}}, '{"a": 1')
    assert not is_held({"not": {"const": {"a": 1}}}, '{"a": 1}')


@pytest.mark.parametrize("values", [["a", "b", "c"], [True, False], [1, 1.5]])
def test_sets_of_few_values_are_enforced(values: list[Any]) -> None:
    schema = {"type": "array", "items": {"enum": values}, "uniqueItems": True, "minItems": 1}
    assert ready(schema, SchemaRules("f", strict=True)).check is None
    assert allows(schema, values[::-1])
    assert not allows(schema, [values[0], values[0]])
    assert not allows(schema, [])


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (ZOD_FORMATS["email"], ["a.b@c.de", ".a@b.co", "a..b@c.de", "a@b.c", "a.@b.co"]),
        (ZOD_FORMATS["duration"], ["P1W", "P1Y2M3D", "P1DT2H", "P", "PT", "PT1.5S", "P1YT", "P2D"]),
        (ZOD_FORMATS["hostname"], ["a.b", "a-b.c.", "-a", "a" * 250 + ".bc", "a" * 63 + ".b", "a..b"]),
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ["1", "-1.5", ".", "+", "", "00.1", "+.2"]),
        ("^(?!.*[xy])(?=..)(?!a)", ["bb", "a", "ab", "bx", "b"]),
    ],
)
@settings(derandomize=True)
@given(data=st.data())
def test_patterns_without_look_ahead_mean_the_same(pattern: str, texts: list[str], data: st.DataObject) -> None:
    patterns = followable(pattern)
    assert patterns is not None
    text, at = data.draw(st.sampled_from(texts)), data.draw(st.integers(0, 12))
    for changed in (
        text,
        text[:at] + text[at + 1 :],
        text[:at] + data.draw(st.sampled_from("a.@-+xPTWDS1")) + text[at:],
    ):
        same = all(re.search(part, changed, re.ASCII) for part in patterns)
        assert same == bool(re.search(pattern, changed, re.ASCII)), changed


@pytest.mark.parametrize("dialect", ["https://example.com/mine.json", "http://json-schema.org/schema#", "x y", 1])
def test_an_unknown_dialect_changes_no_rule(dialect: Any) -> None:
    assert allows({"$schema": dialect, "$id": "my schema", "type": "boolean"}, "true")
    assert ready({"$schema": dialect, "not": {"$schema": dialect}}, RULES).check is not None


def test_no_other_document_is_fetched() -> None:
    with pytest.raises(ValueError, match="another document"):
        ready({"not": {"$ref": "http://127.0.0.1:9/schema.json"}}, RULES)


def test_a_pattern_that_backtracks_without_end_is_given_up() -> None:
    assert not is_held({"type": "string", "pattern": r"^(?:(a+)+\1)+$"}, json.dumps("a" * 60 + "b"))
