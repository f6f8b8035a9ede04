"""Prepares clients' JSON Schemas for a grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from jsonschema_rs import FancyRegexOptions, ValidationError, Validator, validator_for

from services.common.grammar import MAX_GRAMMAR_BYTES
from services.gateway.errors import ApiError, invalid
from services.gateway.grammar.closing import close_arguments
from services.gateway.grammar.enforcing import Unenforced, enforce, forget_dialects
from services.gateway.grammar.numbers import make_whole
from services.gateway.grammar.shapes import check_shapes

Schema = dict[str, Any] | bool | str

_BACKTRACKS = 100_000  # limit of a pattern's steps, about 1 ms; beyond it the pattern counts as not matching
_NAMED = 4  # most keywords that an error message lists
_MESSAGE_CHARS = 300


@dataclass(frozen=True, slots=True)
class Check:
    """Checks a finished JSON text against a schema that its grammar enforces only in part."""

    rules: SchemaRules
    validator: Validator

    def hold(self, text: str) -> None:
        """Raises :class:`ApiError` (400) for an invalid text; a text that was cut off is not checked."""
        try:
            answer = json.loads(text)
        except ValueError:
            return
        try:
            self.validator.validate(answer)
        except ValidationError as error:
            where = "".join(f"/{token}" for token in error.instance_path) or "/"
            message = (
                f"The text does not follow {self.rules.subject}, which no grammar enforces as a whole: at `{where}`, "
                f"{error.message[:_MESSAGE_CHARS]}."
            )
            raise invalid(message, self.rules.field, "schema_failed") from error


@dataclass(frozen=True, slots=True)
class ReadySchema:
    """The part of a schema that the grammar enforces, and a check for the rest."""

    schema: dict[str, Any]
    check: Check | None


@dataclass(frozen=True, slots=True)
class SchemaRules:
    """Rules for the schemas of a field."""

    field: str
    closed: bool = True  # an object without `additionalProperties` allows only named properties
    strict: bool = False  # refuse what the grammar cannot enforce
    function: str = ""  # the function whose arguments the schema describes
    checkable: bool = True  # the whole finished text is JSON by this schema

    @property
    def subject(self) -> str:
        """The schema's name in messages."""
        return f"`parameters` of `{self.function}`" if self.function else f"`{self.field}`"


def ready(schema: Schema, rules: SchemaRules) -> ReadySchema:
    """Prepare a schema, given as JSON text or value. Raises ValueError, or :class:`ApiError` (400)."""
    if isinstance(schema, str):
        schema = json.loads(schema, parse_constant=_refuse_constant)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object")
    text = json.dumps(schema)
    if len(text) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"a schema may have at most {MAX_GRAMMAR_BYTES} bytes, got {len(text)}")
    root: dict[str, Any] = json.loads(text)
    check_shapes(root)
    make_whole(root)
    forget_dialects(root)
    original = json.dumps(root)
    if rules.function:
        close_arguments(root)
    unenforced = enforce(root, closed=rules.closed)
    if not unenforced:
        return ReadySchema(root, None)
    if rules.strict or not rules.checkable:
        raise _refused(rules, unenforced)
    return ReadySchema(root, Check(rules, _validator(json.loads(original))))


def _refused(rules: SchemaRules, unenforced: tuple[Unenforced, ...]) -> ApiError:
    keywords = ", ".join(map(str, unenforced[:_NAMED])) + (", ..." if len(unenforced) > _NAMED else "")
    checked = ", or leave `strict` out to have the finished text checked" if rules.checkable else ""
    message = f"{rules.subject} uses {keywords}, which no grammar enforces: change the schema{checked}."
    return invalid(message, rules.field, "unsupported_keyword")


def _validator(schema: dict[str, Any]) -> Validator:
    """A validator of the schema; raises ValueError for an invalid schema."""
    options = FancyRegexOptions(backtrack_limit=_BACKTRACKS)
    try:
        return validator_for(schema, validate_formats=False, pattern_options=options, retriever=_fetch_nothing)
    except ValidationError as error:
        raise ValueError(error.message) from error


def _fetch_nothing(uri: str) -> Any:
    raise ValueError(f"`{uri}` is another document; `$ref` may only point into this one")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"`{name}` is no JSON")
