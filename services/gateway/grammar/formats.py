"""From the fields that ask for structured output to one grammar, in the form that workers follow."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from llguidance import LLMatcher, StructTag

from services.gateway.api.schema import ResponseFormat, SamplingBody, StructuredOutputs
from services.gateway.errors import ApiError, invalid

# Compact, on one line or indented, as models write it; never blanks without end.
_WHITESPACE = r"(?:\n {0,24}| )?"
_NO_WHITESPACE = ""
_VALUES = frozenset({"const", "default", "enum", "examples"})  # keywords that hold JSON and no schema

Schema = dict[str, Any] | bool | str


@dataclass(frozen=True, slots=True)
class Asked:
    """Structured output that a request asks for, and by which field."""

    field: str
    grammar: str
    foreign: bool = False  # perhaps in GBNF's form: it is converted where it is compiled


def wants_grammar(body: SamplingBody) -> bool:
    """Whether a body has any field that asks for structured output."""
    return not (
        body.response_format is None
        and body.structured_outputs is None
        and body.guided_json is None
        and body.guided_regex is None
        and body.guided_choice is None
        and body.guided_grammar is None
    )


def asked_for(body: SamplingBody) -> Asked | None:
    """The one grammar of a body; raises :class:`ApiError` (400) naming the field when it asks for several."""
    found = [*_response_format(body), *_structured_outputs(body), *_guided(body)]
    if not found:
        return None
    fields = [field for field, _ in found]
    if len(found) > 1:
        message = f"Only one of {', '.join(f'`{field}`' for field in fields)} may be given."
        raise invalid(message, fields[1], "invalid_value")
    field, build = found[0]
    try:
        grammar = build()
    except ApiError:
        raise
    except RecursionError as error:
        raise invalid(f"`{field}` is nested too deeply.", field, "invalid_grammar") from error
    except (ValueError, OverflowError) as error:
        raise invalid(f"`{field}` cannot be followed: {error}", field, "invalid_grammar") from error
    return Asked(field, grammar, foreign=field.endswith("grammar") and "::=" in grammar)


Build = tuple[str, Callable[[], str]]


def _response_format(body: SamplingBody) -> list[Build]:
    asked = body.response_format
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object" and asked.value is None:
        return [("response_format", lambda: of_schema({"type": "object"}))]
    if asked.type == "structural_tag":
        return [("response_format.structures", lambda: of_structural_tag(asked))]
    if asked.type == "json_schema" and asked.json_schema is not None:
        schema = asked.json_schema.schema
        return [("response_format.json_schema.schema", lambda: of_schema({} if schema is None else schema))]
    if asked.value is None:
        field = "response_format.json_schema" if asked.type == "json_schema" else "response_format.value"
        raise invalid(f"Missing required field `{field}`.", field, "missing_field")
    value = asked.value
    if asked.type == "regex":
        return [("response_format.value", lambda: of_regex(value))]
    return [("response_format.value", lambda: of_schema(value))]


def _structured_outputs(body: SamplingBody) -> list[Build]:
    asked = body.structured_outputs
    if asked is None:
        return []
    schema, whitespace = asked.json, _whitespace(asked)
    found = _kinds("structured_outputs.", schema, asked.regex, asked.choice, asked.grammar, whitespace)
    if schema is not None and asked.disable_additional_properties:
        found[0] = (found[0][0], lambda: of_schema(closed(_decoded(schema)), whitespace))
    if asked.structural_tag is not None:
        found.append(("structured_outputs.structural_tag", lambda: _of_tag_text(asked.structural_tag or "")))
    if asked.json_object:
        found.append(("structured_outputs.json_object", lambda: of_schema({"type": "object"}, whitespace)))
    if not found:
        message = "`structured_outputs` needs one of json, regex, choice, grammar, json_object, structural_tag."
        raise invalid(message, "structured_outputs", "missing_field")
    return found


def _whitespace(asked: StructuredOutputs) -> str:
    if asked.disable_any_whitespace:
        return _NO_WHITESPACE
    return _WHITESPACE if asked.whitespace_pattern is None else asked.whitespace_pattern


def _guided(body: SamplingBody) -> list[Build]:
    whitespace = _WHITESPACE if body.guided_whitespace_pattern is None else body.guided_whitespace_pattern
    return _kinds("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar, whitespace)


def _kinds(
    prefix: str,
    schema: Schema | None,
    regex: str | None,
    choice: Sequence[str] | None,
    grammar: str | None,
    whitespace: str,
) -> list[Build]:
    found: list[Build] = []
    if schema is not None:
        found.append((f"{prefix}json", lambda: of_schema(schema, whitespace)))
    if regex is not None:
        found.append((f"{prefix}regex", lambda: of_regex(regex)))
    if choice is not None:
        found.append((f"{prefix}choice", lambda: of_choice(choice)))
    if grammar is not None:
        found.append((f"{prefix}grammar", lambda: grammar))
    return found


def of_schema(schema: Schema, whitespace: str = _WHITESPACE) -> str:
    """JSON that a JSON Schema describes; the schema may be JSON text. Raises ValueError."""
    schema = _decoded(schema)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object")
    if whitespace == _NO_WHITESPACE:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": whitespace})


def _decoded(schema: Schema) -> Any:
    return msgspec.json.decode(schema) if isinstance(schema, str) else schema


def of_regex(pattern: object) -> str:
    """Text that matches a regex. Raises ValueError."""
    if not isinstance(pattern, str):
        raise ValueError("a regex must be a text")
    return LLMatcher.grammar_from_regex(pattern)


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in every object that does not say it itself."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key in _VALUES else closed(value) for key, value in schema.items()}
    return {"additionalProperties": False, **found} if schema.get("type") == "object" else found


def _of_tag_text(text: str) -> str:
    asked = msgspec.json.decode(text, type=ResponseFormat)
    if asked.type != "structural_tag":
        raise ValueError("its `type` must be `structural_tag`")
    return of_structural_tag(asked)


def of_structural_tag(asked: ResponseFormat) -> str:
    """Free text in which each `begin` is followed by JSON by its schema and by `end`. Raises ValueError."""
    triggers, tags = asked.triggers or (), []
    for structure in asked.structures or ():
        trigger = next((trigger for trigger in triggers if structure.begin.startswith(trigger)), None)
        if trigger is None:
            raise ValueError(f"`{structure.begin}` begins with none of `triggers`")
        schema = json.loads(of_schema(structure.schema))["grammars"][0]["json_schema"]
        tags.append(StructTag(trigger=trigger, begin=structure.begin, grammar=schema, end=structure.end))
    if not tags:
        raise ValueError("`structures` must hold at least one")
    return str(StructTag.to_grammar(tags, assume_special=False))


def of_choice(choice: Sequence[str]) -> str:
    """One of some texts. Raises ValueError."""
    if not choice or "" in choice:
        raise ValueError("at least one text is needed, and none may be empty")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choice)
