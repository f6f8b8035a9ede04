"""The tools of a chat request: which ones may be called, how the prompt lists them, how calls are parsed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from services.gateway.api.schema import ChatBody, ChosenFunction, ChosenTool, FunctionDefinition
from services.gateway.errors import ApiError, invalid
from services.gateway.grammar.formats import Asked, Checks
from services.gateway.tools import grammars
from services.gateway.tools.forced import NamedParser, RequiredParser
from services.gateway.tools.hermes import HermesParser
from services.gateway.tools.parser import CallReader, ToolParser


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request that may call tools."""

    field: str  # the body's field with the tools
    functions: list[FunctionDefinition]
    choice: str  # auto, required, or the name of a function
    parallel: bool
    legacy: bool  # `functions`: answers have a `function_call`
    native: type[ToolParser]
    closed: bool = True  # arguments allow only named properties, unless the schema has `additionalProperties`

    @property
    def names(self) -> frozenset[str]:
        """The names of the functions that may be called."""
        return frozenset(function.name for function in self.functions)

    def definitions(self) -> list[dict[str, Any]]:
        """The tools in the form that chat templates expect."""
        found = []
        for function in self.functions:
            about = {"name": function.name, "description": function.description or ""}
            found.append({"type": "function", "function": {**about, "parameters": function.parameters or {}}})
        return found

    @property
    def constrained(self) -> bool:
        """Whether calls always follow a grammar."""
        return self.choice != "auto" or any(function.strict for function in self.functions)

    def reader(self, *, constrained: bool) -> CallReader:
        """A parser of calls; `constrained`: the text follows a grammar."""
        if self.choice == "required":
            return RequiredParser(self.names)
        if self.choice != "auto":
            return NamedParser(self.choice)
        return HermesParser(self.names) if constrained else self.native(self.names)

    def plan(self, asked: Asked | None) -> Asked:
        """The grammar of the answer, by the structured output that was `asked` for; raises :class:`ApiError` (400)."""
        if self.choice == "required":
            forms = self._forms(self.functions)
            return self._asked(grammars.of_required(forms, parallel=self.parallel), forms)
        if self.choice != "auto":
            forms = self._forms([function for function in self.functions if function.name == self.choice])
            return self._asked(grammars.of_named(forms[0]), forms)
        if asked is not None:
            return self._beside(asked)
        forms = self._forms([function for function in self.functions if function.strict])
        free = [grammars.free_form_of(function) for function in self.functions if not function.strict]
        return self._asked(grammars.of_strict([*forms, *free]), forms)

    def _forms(self, functions: Sequence[FunctionDefinition]) -> list[grammars.CallForm]:
        try:
            return [grammars.form_of(function, self.field, closed=self.closed) for function in functions]
        except (ValueError, RecursionError) as error:
            raise invalid(f"`{self.field}` cannot be followed: {error}", self.field, "invalid_grammar") from error

    def _asked(self, grammar: str, forms: Sequence[grammars.CallForm]) -> Asked:
        arguments = {form.name: form.check for form in forms if form.check is not None}
        return Asked(self.field, grammar, checks=Checks(arguments=arguments))

    def _beside(self, asked: Asked) -> Asked:
        schema = _schema_of(asked) if asked.field.startswith("response_format") else None
        if schema is None:
            message = f"`{asked.field}` leaves no room for calls: set `tool_choice`, or ask by `response_format`."
            raise invalid(message, asked.field, "invalid_value")
        forms = self._forms(self.functions)
        found = self._asked(grammars.of_answer_or_calls(forms, schema), forms)
        return replace(found, checks=replace(found.checks, text=asked.checks.text))


def _schema_of(asked: Asked) -> dict[str, Any] | None:
    """The JSON Schema of a grammar that consists of only that schema."""
    if not asked.grammar.startswith("{"):
        return None
    schema: dict[str, Any] | None = json.loads(asked.grammar)["grammars"][0]["json_schema"]
    return schema


def tool_use(body: ChatBody, native: type[ToolParser], *, closed: bool) -> ToolUse | None:
    """The tools that the model may call; raises :class:`ApiError` (400) when fields contradict each other."""
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
    return ToolUse(field, list(functions), name, body.parallel_tool_calls is not False, legacy, native, closed)


def _allowed(
    functions: Sequence[FunctionDefinition], choice: ChosenTool
) -> tuple[list[FunctionDefinition], Literal["auto", "required"]]:
    """The functions that a tool choice allows, and its mode; raises :class:`ApiError` (400)."""
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
