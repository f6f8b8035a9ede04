"""The tools of a chat request: which ones may be called, how the prompt lists them, how calls are parsed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.gateway.api.chat import ChatRequest, FieldNames, OfferedTools
from services.gateway.api.options import FunctionDefinition
from services.gateway.errors import invalid
from services.gateway.grammar.formats import Checks, Constraint
from services.gateway.tools import grammars
from services.gateway.tools.custom import CustomReader
from services.gateway.tools.forced import ENFORCED_HERMES, REQUIRED, NamedParser
from services.gateway.tools.parser import CallFormat, CallReader, ToolParser


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request that may call tools."""

    offered: OfferedTools
    field_names: FieldNames
    native: CallFormat
    closed: bool = True  # arguments allow only named properties, unless the schema has `additionalProperties`

    @property
    def names(self) -> frozenset[str]:
        """The names of the functions that may be called."""
        return frozenset(function.name for function in self.offered.functions)

    def definitions(self) -> list[dict[str, Any]]:
        """The tools in the form that chat templates expect."""
        definitions = []
        for function in self.offered.functions:
            about = {"name": function.name, "description": function.description or ""}
            definitions.append({"type": "function", "function": {**about, "parameters": function.parameters or {}}})
        return definitions

    @property
    def constrained(self) -> bool:
        """Whether calls always follow a grammar."""
        return self.offered.choice != "auto" or any(function.strict for function in self.offered.functions)

    def reader(self, *, constrained: bool) -> CallReader:
        """A parser of calls; `constrained`: the text follows a grammar."""
        calls = self._function_reader(constrained=constrained)
        return CustomReader(calls, self.offered.custom) if self.offered.custom else calls

    def _function_reader(self, *, constrained: bool) -> CallReader:
        if self.offered.choice not in ("auto", "required"):
            return NamedParser(self.offered.choice)
        form = ENFORCED_HERMES if constrained else self.native
        form = REQUIRED if self.offered.choice == "required" else form
        schemas = {function.name: function.parameters or {} for function in self.offered.functions}
        return ToolParser(form, self.names, schemas)

    def plan(self, requested: Constraint | None) -> Constraint:
        """The grammar of the answer, by the `requested` structured output; raises :class:`ApiError` (400)."""
        functions, choice = self.offered.functions, self.offered.choice
        if choice == "required":
            forms = self._forms(functions)
            return self._constraint(grammars.of_required(forms, parallel=self.offered.parallel), forms)
        if choice != "auto":
            forms = self._forms([function for function in functions if function.name == choice])
            return self._constraint(grammars.of_named(forms[0]), forms)
        if requested is not None:
            return self._with_calls(requested)
        forms = self._forms([function for function in functions if function.strict])
        free = [grammars.free_form_of(function) for function in functions if not function.strict]
        return self._constraint(grammars.of_strict([*forms, *free]), forms)

    def _forms(self, functions: Sequence[FunctionDefinition]) -> list[grammars.CallForm]:
        field = self.field_names.tools
        try:
            return [grammars.form_of(function, field, closed=self.closed) for function in functions]
        except (ValueError, RecursionError) as error:
            raise invalid(f"`{field}` cannot be followed: {error}", field, "invalid_grammar") from error

    def _constraint(self, grammar: str, forms: Sequence[grammars.CallForm]) -> Constraint:
        arguments = {form.name: form.check for form in forms if form.check is not None}
        return Constraint(self.field_names.tools, grammar, checks=Checks(arguments=arguments))

    def _with_calls(self, requested: Constraint) -> Constraint:
        names = self.field_names
        schema = _schema_of(requested) if requested.field.startswith(names.format) else None
        if schema is None:
            message = (
                f"`{requested.field}` leaves no room for calls: set `{names.tool_choice}`, or ask by `{names.format}`."
            )
            raise invalid(message, requested.field, "invalid_value")
        forms = self._forms(self.offered.functions)
        combined = self._constraint(grammars.of_answer_or_calls(forms, schema), forms)
        return replace(combined, checks=replace(combined.checks, text=requested.checks.text))


def _schema_of(constraint: Constraint) -> dict[str, Any] | None:
    """The JSON Schema of a grammar that consists of only that schema."""
    if not constraint.grammar.startswith("{"):
        return None
    schema: dict[str, Any] | None = json.loads(constraint.grammar)["grammars"][0]["json_schema"]
    return schema


def tool_use(request: ChatRequest, native: CallFormat, *, closed: bool) -> ToolUse | None:
    """The tools that the model may call in a chat; raises :class:`ApiError` (400) when they contradict each other."""
    offered, names = request.tools, request.names
    if not offered.functions:
        if offered.choice not in ("none", "auto"):
            raise invalid(f"`{names.tool_choice}` needs `{names.tools}`.", names.tool_choice, "invalid_value")
        return None
    _check_names(offered.functions, names.tools)
    called = {function.name for function in offered.functions}
    if offered.choice not in ("none", "auto", "required") and offered.choice not in called:
        message = f"`{names.tool_choice}` names `{offered.choice}`, which is not among `{names.tools}`."
        raise invalid(message, names.tool_choice, "invalid_value")
    return None if offered.choice == "none" else ToolUse(offered, names, native, closed)


def _check_names(functions: Sequence[FunctionDefinition], field: str) -> None:
    for name, count in Counter(function.name for function in functions).items():
        if count > 1:
            raise invalid(f"`{field}` has two functions named `{name}`.", field, "invalid_value")
