"""Numbers in schemas, of any size and spelling: answers are valid, or a 400 names the place in the schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from services.gateway.grammar.formats import of_schema
from services.gateway.grammar.schemas import SchemaRules, ready
from tests.unit.gateway.grammar.writing import accepts, error_of, write

RULES = SchemaRules("f", strict=True)  # no check of the finished text helps

_AROUND = [0, 1, 1000, 2**53, 10**17, 10**18, 2**60, 2**62, 2**63, 2**64, 10**20, 10**22, 2**100, 10**30]
integers = st.builds(
    lambda size, off, sign: sign * (size + off),
    st.sampled_from(_AROUND),
    st.sampled_from([0, 0, 1, -1, 2, 1024, 2048, -2048]),
    st.sampled_from([1, -1]),
)
fractions = st.sampled_from(
    [0.1, 0.5, 3.5, 1e-7, 1e-60, 5e-324, 1e15, 1e17, 1e22, 1e23, 1.5e300, 1.7976931348623157e308]
)
numbers = integers | fractions | fractions.map(lambda number: -number) | st.integers(-20, 20)
spelled = st.builds(
    lambda number, spelling: spelling(number), integers, st.sampled_from([str, "{}.0".format, "{}e0".format])
)


def grammar_of(schema: str) -> str | None:
    """The schema's grammar; None if the schema is refused with the place in it."""
    try:
        grammar = of_schema(ready(schema, RULES).schema)
    except ValueError as error:
        if "`/" in str(error):
            return None
        raise
    if "nsatisfiable" in error_of(grammar):
        return None  # the schema contradicts itself
    assert not error_of(grammar), (schema, error_of(grammar))
    return grammar


def assert_valid(schema: str, texts: list[str | None]) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(schema))
    for text in texts:
        assert text is None or validator.is_valid(json.loads(text)), (schema, text)


@settings(suppress_health_check=list(HealthCheck))
@given(number=spelled, kind=st.sampled_from(["", '"type": "integer", ', '"type": "number", ']), deep=st.booleans())
@example(number=str(-(2**63)), kind="", deep=False)
@example(number=str(-(2**63) - 2048), kind="", deep=True)
@example(number="1e20", kind='"type": "integer", ', deep=False)
@example(number="1.152921504606847e18", kind="", deep=False)
@example(number="-0", kind='"type": "integer", ', deep=False)
@example(number="-0.0", kind="", deep=True)
@example(number="1E400", kind="", deep=True)
def test_a_value_is_written_exactly_or_refused(number: str, kind: str, deep: bool) -> None:
    for schema in (
        (f'{{{kind}"const": {number}}}', f'{{"enum": ["a", {{"b": [{number}]}}]}}')
        if deep
        else (f'{{{kind}"const": {number}}}',)
    ):
        grammar = grammar_of(schema)
        if grammar is None:
            assert abs(float(number)) > 2**53
            continue
        assert_valid(schema, [write(grammar, seed) for seed in range(2)])


@settings(suppress_health_check=list(HealthCheck))
@given(
    bounds=st.dictionaries(
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), numbers, min_size=1, max_size=3
    ),
    kind=st.sampled_from(["integer", "number", None, ["integer", "null"]]),
    split=st.booleans(),
    probes=st.lists(numbers, max_size=4),
)
@example(bounds={"exclusiveMinimum": 0, "maximum": 0.5}, kind="number", split=True, probes=[0])
@example(bounds={"exclusiveMinimum": 2**53}, kind="integer", split=True, probes=[2**53])
@example(bounds={"maximum": 2**60}, kind="number", split=False, probes=[2**60 + 1])
@example(bounds={"minimum": -(2**63), "maximum": 2**63 - 1}, kind="integer", split=False, probes=[2**63 - 1, 2**63])
@example(bounds={"minimum": 3, "exclusiveMinimum": 3, "maximum": 3.5}, kind="number", split=False, probes=[3])
def test_only_numbers_in_bounds_are_written(bounds: dict[str, Any], kind: Any, split: bool, probes: list[Any]) -> None:
    types = {} if kind is None else {"type": kind}
    schema = json.dumps({"allOf": [types, bounds]} if split else types | bounds)
    grammar = grammar_of(schema)
    if grammar is None:
        return
    assert_valid(schema, [write(grammar, seed) for seed in range(3)])
    near = [bound + off for bound in bounds.values() if abs(bound) < 2**62 for off in (-1, 0, 1)]
    texts = [format(number, ".60f").rstrip("0").rstrip(".") for number in (*near, *probes) if abs(number) < 1e20]
    assert_valid(schema, [text for text in texts if accepts(grammar, text)])


@pytest.mark.parametrize(
    ("bounds", "written", "narrowed"),
    [
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, [-(2**63) + 1024, -1, 0, 2**63 - 1], [-(2**63)]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, 2**63 - 1], [2**64 - 1]),
        ({"minimum": 10**18}, [10**18, 2**63 - 1], [2**63]),
        ({"maximum": -(10**18)}, [-(10**18), -(2**63) + 1024], [-(2**63)]),
        ({"minimum": -(2**53) - 1, "maximum": 2**53 + 1}, [-(2**53), 2**53], [2**53 + 1]),
        ({"minimum": 2**60, "maximum": 2**62}, [2**60, 2**62], []),
        ({"exclusiveMinimum": 2**53 - 1, "exclusiveMaximum": 1e300}, [2**53, 2**63 - 1], [2**63]),
        ({"minimum": 1.5, "exclusiveMinimum": True}, [2], []),
    ],
)
def test_bounds_beyond_doubles_are_narrowed_far_from_zero_alone(
    bounds: dict[str, Any], written: list[int], narrowed: list[int]
) -> None:
    grammar = grammar_of(json.dumps({"type": "integer"} | bounds))
    assert grammar is not None
    assert [number for number in written if not accepts(grammar, str(number))] == []
    assert [number for number in narrowed if accepts(grammar, str(number))] == []


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"const": 2**63}}}, "/properties/a/const"),
        ({"enum": [1, {"x/y": [2**64]}]}, "/enum/1/x~1y/0"),
        ({"const": -(2**63)}, "/const"),
        ({"minimum": 2**53 + 1}, "/minimum"),
        ({"type": "integer", "minimum": 10**30, "maximum": 10**30}, "/minimum"),
        ({"type": "integer", "minimum": 2**53, "maximum": 2**53 + 1}, "/minimum"),
        ({"items": {"exclusiveMaximum": -(2**60) - 1}}, "/items/exclusiveMaximum"),
        ({"minimum": 1e-60}, "/minimum"),
        ({"multipleOf": 2**32}, "/multipleOf"),
        ({"multipleOf": 9973}, "/multipleOf"),
        ({"multipleOf": 0.07}, "/multipleOf"),
        ({"allOf": [{"multipleOf": 1021}, {"multipleOf": 1019}]}, "/multipleOf"),
    ],
)
def test_a_number_that_no_grammar_follows_is_refused_with_its_path(schema: Any, path: str) -> None:
    with pytest.raises(ValueError, match=f"^`{path}` is ") as refused:
        ready(schema, RULES)
    assert "nested" not in str(refused.value)


@pytest.mark.parametrize(
    "schema", ['{"maximum": 1E400}', '{"multipleOf": 0}', '{"minimum": "1"}', '{"maxLength": 1e400}']
)
def test_a_keyword_without_a_number_is_refused_with_its_path(schema: str) -> None:
    with pytest.raises(ValueError, match=r"^`[a-zA-Z]+` at `/` must be a number"):
        ready(schema, RULES)


@pytest.mark.parametrize("step", [1, 3, 0.5, 0.01, 1e-7, 1e3, 3600, 1021, 0.125, "2.0"])
def test_multiples_are_written_alone_and_between_bounds(step: Any) -> None:
    for bounds in ({}, {"minimum": -(10**15), "maximum": 10**15}):
        schema = json.dumps({"type": "number", "multipleOf": float(step)} | bounds)
        grammar = grammar_of(schema)
        assert grammar is not None
        for text in filter(None, [write(grammar, seed) for seed in range(4)]):
            times = float(text) / float(step)
            assert abs(times - round(times)) < 1e-6 * max(abs(times), 1), (schema, text)


@pytest.mark.parametrize("count", [2**31 - 1, 2**32, 2**53, 2**64, 1e300])
@pytest.mark.parametrize(
    ("kind", "keyword"), [("string", "maxLength"), ("array", "maxItems"), ("object", "maxProperties")]
)
def test_a_count_beyond_all_answers_is_no_limit(kind: str, keyword: str, count: float) -> None:
    assert grammar_of(json.dumps({"type": kind, keyword: count})) is not None
