"""What a chat request says about tools: which may be called, what the prompt tells of them, how calls are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from services.gateway.api.schema import ChatBody, ChosenFunction, ChosenTool, FunctionDefinition
from services.gateway.errors import ApiError, invalid
from services.gateway.grammar.formats import Asked
from services.gateway.tools import grammars
from services.gateway.tools.forced import NamedParser, RequiredParser
from services.gateway.tools.hermes import HermesParser
from services.gateway.tools.parser import CallReader, ToolParser


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request that may call some."""

    field: str  # that they came by
    functions: list[FunctionDefinition]
    choice: str  # auto, required, or the name of a function
    parallel: bool
    legacy: bool  # `functions`: answers have a `function_call`
    native: type[ToolParser]

    @property
    def names(self) -> frozenset[str]:
        """What may be called."""
        return frozenset(function.name for function in self.functions)

    def definitions(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        found = []
        for function in self.functions:
            about = {"name": function.name, "description": function.description or ""}
            found.append({"type": "function", "function": {**about, "parameters": function.parameters or {}}})
        return found

    def plan(self, asked: Asked | None) -> tuple[Asked | None, Callable[[], CallReader]]:
        """The grammar of the answer, given the one that was asked for, and a maker of readers of its calls.

        Raises :class:`ApiError` (400).
        """
        if self.choice == "required":
            grammar = self._grammar(lambda: grammars.of_required(self.functions, parallel=self.parallel))
            return grammar, lambda: RequiredParser(self.names)
        if self.choice != "auto":
            named = next(function for function in self.functions if function.name == self.choice)
            return self._grammar(lambda: grammars.of_named(named)), lambda: NamedParser(self.choice)
        if asked is not None:
            return self._beside(asked), lambda: HermesParser(self.names)
        if any(function.strict for function in self.functions):
            return self._grammar(lambda: grammars.of_strict(self.functions)), lambda: HermesParser(self.names)
        return None, lambda: self.native(self.names)

    def _grammar(self, build: Callable[[], str]) -> Asked:
        try:
            return Asked(self.field, build())
        except (ValueError, RecursionError) as error:
            raise invalid(f"`{self.field}` cannot be followed: {error}", self.field, "invalid_grammar") from error

    def _beside(self, asked: Asked) -> Asked:
        schema = _schema_of(asked) if asked.field.startswith("response_format") else None
        if schema is None:
            message = f"`{asked.field}` leaves no room for calls: set `tool_choice`, or ask by `response_format`."
            raise invalid(message, asked.field, "invalid_value")
        return self._grammar(lambda: grammars.of_answer_or_calls(self.functions, schema))


def _schema_of(asked: Asked) -> dict[str, Any] | None:
    """The JSON Schema of a grammar that is nothing else."""
    if not asked.grammar.startswith("{"):
        return None
    schema: dict[str, Any] | None = json.loads(asked.grammar)["grammars"][0]["json_schema"]
    return schema


def tool_use(body: ChatBody, native: type[ToolParser]) -> ToolUse | None:
    """The tools that a body lets the model call; raises :class:`ApiError` (400) when they contradict each other."""
    if body.tools and body.functions:
        raise invalid("Only one of `tools` and `functions` may be given.", "functions", "invalid_value")
    legacy = bool(body.functions)
    field, by = ("functions", "function_call") if legacy else ("tools", "tool_choice")
    functions = body.functions or [tool.function for tool in body.tools or ()]
    choice = body.function_call if legacy else body.tool_choice
    if isinstance(choice, ChosenTool) and choice.type == "allowed_tools":
        functions, choice = _allowed(functions, choice)
    name = _choice(choice)
    if not functions:
        if name not in ("none", "auto"):
            raise invalid(f"`{by}` needs `{field}`.", by, "invalid_value")
        return None
    _check_names(functions, field)
    if name not in ("none", "auto", "required") and all(function.name != name for function in functions):
        raise invalid(f"`{by}` names `{name}`, which is not among `{field}`.", by, "invalid_value")
    if name == "none":
        return None
    return ToolUse(field, list(functions), name, body.parallel_tool_calls is not False, legacy, native)


def _allowed(
    functions: Sequence[FunctionDefinition], choice: ChosenTool
) -> tuple[list[FunctionDefinition], Literal["auto", "required"]]:
    """The functions that a choice allows, and its mode; raises :class:`ApiError` (400)."""
    asked = choice.allowed_tools
    if asked is None:
        raise _missing("tool_choice.allowed_tools")
    names = {tool.function.name for tool in asked.tools}
    if unknown := names - {function.name for function in functions}:
        message = f"`tool_choice.allowed_tools.tools` names `{min(unknown)}`, which is not among `tools`."
        raise invalid(message, "tool_choice.allowed_tools.tools", "invalid_value")
    return [function for function in functions if function.name in names], asked.mode


def _choice(choice: str | ChosenTool | ChosenFunction | None) -> str:
    if isinstance(choice, ChosenTool):
        if choice.function is None:
            raise _missing("tool_choice.function")
        return choice.function.name
    return choice.name if isinstance(choice, ChosenFunction) else choice or "auto"


def _missing(field: str) -> ApiError:
    return invalid(f"Missing required field `{field}`.", field, "missing_field")


def _check_names(functions: Sequence[FunctionDefinition], field: str) -> None:
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise invalid(f"`{field}` has two functions named `{name}`.", field, "invalid_value")
