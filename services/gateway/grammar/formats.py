"""Converts the fields for structured output to one grammar in the workers' form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from llguidance import LLMatcher, StructTag

from services.gateway.api.chat import CHAT_COMPLETIONS, FieldNames
from services.gateway.api.options import ResponseFormat, StructuredOutputs, TextOptions
from services.gateway.errors import ApiError, invalid
from services.gateway.grammar.properties import is_open
from services.gateway.grammar.schemas import Check, Schema, SchemaRules, ready
from services.gateway.grammar.subschemas import walk

# JSON that is compact, on one line, or indented; blanks are limited.
_WHITESPACE = r"(?:\n {0,24}| )?"
_NO_WHITESPACE = ""

# Escapes in JSON texts without `\\u`, by which a further name could be spelled as one that the schema describes.
_ESCAPES = 'nrbtf\\"'

_JSON_OBJECT = {"type": "object"}
_JSON_TYPES = ("json_object", "json_schema", "json")


@dataclass(frozen=True, slots=True)
class Checks:
    """Checks of a finished answer in addition to its grammar: of its text, and of each function's arguments."""

    text: Check | None = None
    arguments: Mapping[str, Check] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.text is not None or bool(self.arguments)


@dataclass(frozen=True, slots=True)
class Constraint:
    """The structured output that a request asks for, and the field that asks."""

    field: str
    grammar: str
    foreign: bool = False  # maybe in GBNF; the compiler's process converts it
    checks: Checks = Checks()


def wants_grammar(body: TextOptions) -> bool:
    """Whether a body has any field that asks for structured output."""
    return not (
        body.response_format is None
        and body.structured_outputs is None
        and body.guided_json is None
        and body.guided_regex is None
        and body.guided_choice is None
        and body.guided_grammar is None
    )


def constraint_of(body: TextOptions, names: FieldNames = CHAT_COMPLETIONS, *, closed: bool = True) -> Constraint | None:
    """The one grammar of a body; raises :class:`ApiError` (400) naming the field when the body asks for several.

    `closed`: an object without `additionalProperties` allows only the properties that its schema names.
    """
    builds = [*_response_format(body, names, closed), *_structured_outputs(body, closed), *_guided(body, closed)]
    if not builds:
        return None
    fields = [field for field, _ in builds]
    if len(builds) > 1:
        message = f"Only one of {', '.join(f'`{field}`' for field in fields)} may be given."
        raise invalid(message, fields[1], "invalid_value")
    field, build = builds[0]
    try:
        grammar, check = build()
    except ApiError:
        raise
    except RecursionError as error:
        raise invalid(f"`{field}` is nested too deeply.", field, "invalid_grammar") from error
    except (ValueError, OverflowError) as error:
        raise invalid(f"`{field}` cannot be followed: {error}", field, "invalid_grammar") from error
    return Constraint(field, grammar, foreign=field.endswith("grammar") and "::=" in grammar, checks=Checks(check))


Build = tuple[str, Callable[[], tuple[str, Check | None]]]


def _response_format(body: TextOptions, names: FieldNames, closed: bool) -> list[Build]:
    form = body.response_format
    if form is None or form.type == "text":
        return []
    if (given := form.schema) is not None and form.type in _JSON_TYPES and form.json_schema is None:
        direct = SchemaRules("response_format.schema", closed, form.strict is True)
        return [(direct.field, lambda: of_client_schema(given, direct))]
    if form.type == "json_object" and form.value is None:
        return [(names.format, lambda: (of_schema(_JSON_OBJECT), None))]
    if form.type == "structural_tag":
        return [("response_format.structures", lambda: (of_structural_tag(form, closed=closed), None))]
    if form.type == "json_schema" and form.json_schema is not None:
        schema, strict = form.json_schema.schema, form.json_schema.strict is True
        rules = SchemaRules(names.schema, closed, strict)
        return [(rules.field, lambda: of_client_schema({} if schema is None else schema, rules))]
    if form.value is None:
        field = "response_format.json_schema" if form.type == "json_schema" else "response_format.value"
        raise invalid(f"Missing required field `{field}`.", field, "missing_field")
    value = form.value
    if form.type == "regex":
        return [("response_format.value", lambda: (of_regex(value), None))]
    return [("response_format.value", lambda: of_client_schema(value, SchemaRules("response_format.value", closed)))]


def _structured_outputs(body: TextOptions, closed: bool) -> list[Build]:
    outputs = body.structured_outputs
    if outputs is None:
        return []
    builds = _kinds("structured_outputs.", outputs.regex, outputs.choice, outputs.grammar)
    if (schema := outputs.json) is not None:
        rules = SchemaRules("structured_outputs.json", closed or outputs.disable_additional_properties is True)
        builds.append((rules.field, lambda: of_client_schema(schema, rules, _whitespace(outputs))))
    if (tag := outputs.structural_tag) is not None:
        builds.append(("structured_outputs.structural_tag", lambda: (_of_tag_text(tag, closed=closed), None)))
    if outputs.json_object:
        builds.append(("structured_outputs.json_object", lambda: (of_schema(_JSON_OBJECT, _whitespace(outputs)), None)))
    if not builds:
        message = "`structured_outputs` needs one of json, regex, choice, grammar, json_object, structural_tag."
        raise invalid(message, "structured_outputs", "missing_field")
    return builds


def _whitespace(outputs: StructuredOutputs) -> str:
    if outputs.disable_any_whitespace:
        return _NO_WHITESPACE
    return _WHITESPACE if outputs.whitespace_pattern is None else outputs.whitespace_pattern


def _guided(body: TextOptions, closed: bool) -> list[Build]:
    builds = _kinds("guided_", body.guided_regex, body.guided_choice, body.guided_grammar)
    if (schema := body.guided_json) is not None:
        whitespace = _WHITESPACE if body.guided_whitespace_pattern is None else body.guided_whitespace_pattern
        rules = SchemaRules("guided_json", closed)
        builds.append((rules.field, lambda: of_client_schema(schema, rules, whitespace)))
    return builds


def _kinds(prefix: str, regex: str | None, choice: Sequence[str] | None, grammar: str | None) -> list[Build]:
    builds: list[Build] = []
    if regex is not None:
        builds.append((f"{prefix}regex", lambda: (of_regex(regex), None)))
    if choice is not None:
        builds.append((f"{prefix}choice", lambda: (of_choice(choice), None)))
    if grammar is not None:
        builds.append((f"{prefix}grammar", lambda: (grammar, None)))
    return builds


def of_client_schema(schema: Schema, rules: SchemaRules, whitespace: str = _WHITESPACE) -> tuple[str, Check | None]:
    """The grammar of JSON by a client's schema, and the check that it needs. Raises ValueError, :class:`ApiError`."""
    made_ready = ready(schema, rules)
    return of_schema(made_ready.schema, whitespace), made_ready.check


def of_schema(schema: dict[str, Any], whitespace: str = _WHITESPACE) -> str:
    """The grammar of JSON by a schema that needs no rewriting. Raises ValueError."""
    escapes = _ESCAPES if any(is_open(node) for _, node in walk(schema)) else f"{_ESCAPES}u"
    text = json.dumps(schema)
    if whitespace == _NO_WHITESPACE:
        return LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_flexible": False, "json_allowed_escapes": escapes}
        )
    return LLMatcher.grammar_from_json_schema(
        text, overrides={"whitespace_pattern": whitespace, "json_allowed_escapes": escapes}
    )


def of_regex(pattern: object) -> str:
    """The grammar of text that matches a regex. Raises ValueError."""
    if not isinstance(pattern, str):
        raise ValueError("a regex must be a text")
    return LLMatcher.grammar_from_regex(pattern)


def _of_tag_text(text: str, *, closed: bool) -> str:
    form = msgspec.json.decode(text, type=ResponseFormat)
    if form.type != "structural_tag":
        raise ValueError("its `type` must be `structural_tag`")
    return of_structural_tag(form, closed=closed)


def of_structural_tag(form: ResponseFormat, *, closed: bool) -> str:
    """The grammar of free text in which JSON and `end` follow each `begin`. Raises ValueError."""
    triggers, tags = form.triggers or (), []
    for structure in form.structures or ():
        trigger = next((trigger for trigger in triggers if structure.begin.startswith(trigger)), None)
        if trigger is None:
            raise ValueError(f"`{structure.begin}` begins with none of `triggers`")
        rules = SchemaRules("structures", closed, checkable=False)
        grammar, _ = of_client_schema(structure.schema, rules)
        schema = json.loads(grammar)["grammars"][0]["json_schema"]
        tags.append(StructTag(trigger=trigger, begin=structure.begin, grammar=schema, end=structure.end))
    if not tags:
        raise ValueError("`structures` must hold at least one")
    return str(StructTag.to_grammar(tags, assume_special=False))


def of_choice(choice: Sequence[str]) -> str:
    """The grammar of a choice between texts. Raises ValueError."""
    if not choice or "" in choice:
        raise ValueError("at least one text is needed, and none may be empty")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choice)
