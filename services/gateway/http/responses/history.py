"""From the items of a conversation to the turns of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.api.chat import Call, Turn
from services.gateway.api.chat import Part as TurnPart
from services.gateway.api.files import given_file
from services.gateway.api.ignored import Ignored, Unserved
from services.gateway.api.images import given_image
from services.gateway.api.parts import is_media, json_text, own_text, stand_in
from services.gateway.errors import invalid
from services.gateway.http.responses.reading import new_messages
from services.gateway.http.responses.schema import (
    ROLES,
    TOOL_ITEMS,
    CallItem,
    CallOutputItem,
    CompactionItem,
    Content,
    CustomCallItem,
    CustomOutputItem,
    Item,
    MessageItem,
    Part,
    ReasoningItem,
)
from services.gateway.http.responses.sealing import unseal
from services.gateway.http.responses.tools import flat_name
from services.gateway.tools.custom import input_arguments

# Calls of hosted tools, and the field of their arguments. Their results are in the call itself, or in a later item.
_ARGUMENTS = {
    "apply_patch_call": "operation", "code_interpreter_call": "code", "file_search_call": "queries",
    "local_shell_call": "action", "mcp_call": "arguments", "program": "code", "shell_call": "action",
    "tool_search_call": "arguments",
}  # fmt: skip
_RESULTS = {
    "apply_patch_call_output": ("output", "status"), "local_shell_call_output": ("output",),
    "program_output": ("result",), "shell_call_output": ("output",), "tool_search_output": ("tools",),
}  # fmt: skip
_OWN_RESULTS = {
    "code_interpreter_call": ("outputs",), "file_search_call": ("results",), "mcp_call": ("output", "error"),
}  # fmt: skip

SUMMARIZE = (
    "Summarize our conversation so far, so that it can go on from the summary alone: what was asked, what was found, "
    "decided and done, results of tools that still matter, names and values as they are, and what is left to do."
)


def turns_of(items: Sequence[Item], ignored: Ignored) -> list[Turn]:
    """The turns of a conversation; raises :class:`ApiError` (400) for a new output of a call that it does not hold.

    Calls of hosted tools that have a result become calls and results; `ignored` gets what is left out.
    """
    history = _History(ignored)
    end = len(items)
    while end and isinstance(items[end - 1], CallOutputItem | CustomOutputItem):
        end -= 1
    answered = set(new_messages(items))
    for index, item in enumerate(items):
        history.add(item, new=index >= end or index in answered)
    history.end()
    return history.turns


class _History:
    """The turns of a conversation, which grow with its items."""

    def __init__(self, ignored: Ignored) -> None:
        self.turns: list[Turn] = []
        self._ignored = ignored
        self._reasoning: list[str] = []  # before the next turn
        self._names: dict[str, str] = {}  # names of called tools, by the calls' ids
        self._hosted: dict[str, tuple[Unserved, Call]] = {}  # calls without results yet, by id

    def add(self, item: Item, *, new: bool) -> None:
        """Read an item; raises :class:`ApiError` (400). `new`: the answer is about it."""
        match item:
            case ReasoningItem():
                self._reasoning += _reasoning_of(item)
            case CompactionItem():
                self._append_summary(item)
            case MessageItem(role=role) if role not in ROLES:
                self._ignored.add(f"input[].role={role}")
            case MessageItem(role=role, content=content):
                self._append(Turn(role, self._parts(content, "content", new=new)))
            case CallItem() | CustomCallItem():
                self._names[item.call_id] = flat_name(item.namespace, item.name)
                self._append_call(_call(item))
            case CallOutputItem() | CustomOutputItem():
                self._append_output(item, new=new)
            case _:
                self._add_hosted(item)

    def end(self) -> None:
        """Note the calls that have no result."""
        for item, _ in self._hosted.values():
            self._leave_out(item)

    def _append(self, turn: Turn) -> None:
        self.turns.append(turn)
        self._append_reasoning()

    def _append_reasoning(self) -> None:
        if self._reasoning and self.turns[-1].role == "assistant":
            self.turns[-1].reasoning_content = "\n".join(self._reasoning)
        self._reasoning = []

    def _append_call(self, call: Call) -> None:
        if self._reasoning or not self.turns or self.turns[-1].role != "assistant":
            self.turns.append(Turn("assistant", [""]))
        self.turns[-1].calls.append(call)
        self._append_reasoning()

    def _append_output(self, item: CallOutputItem | CustomOutputItem, *, new: bool) -> None:
        name = self._names.get(item.call_id)
        if name is None and not new:
            self._ignored.add(f"input[].type={item.type}")
            return
        if name is None:
            message = f"`input` has the output of a call `{item.call_id}` that is not in the conversation."
            raise invalid(message, "input", "invalid_value")
        self._append(Turn("tool", self._parts(item.output, "output"), tool_call_id=item.call_id, name=name))

    def _append_summary(self, item: CompactionItem) -> None:
        """The request for a summary and the summary: templates want users and assistants in turn."""
        summary = unseal(item.encrypted_content)
        if summary is None:
            self._ignored.add("input[].type=compaction")
        else:
            self._append(Turn("user", [SUMMARIZE]))
            self._append(Turn("assistant", [summary]))

    def _add_hosted(self, item: Unserved) -> None:
        call_id = str(item.value.get("call_id") or item.value.get("id") or "")
        if item.kind in _ARGUMENTS:
            call = Call(_hosted_name(item), _hosted_arguments(item), call_id)
            result = self._result(item, _OWN_RESULTS.get(item.kind, ()))
            if result is None:
                self._hosted[call_id] = item, call
            else:
                self._append_pair(call, result)
        elif item.kind in _RESULTS and call_id in self._hosted:
            self._append_pair(self._hosted.pop(call_id)[1], self._result(item, _RESULTS[item.kind]) or "")
        elif item.kind not in TOOL_ITEMS:
            self._leave_out(item)

    def _append_pair(self, call: Call, result: str) -> None:
        self._append_call(call)
        self._append(Turn("tool", [result], tool_call_id=call.id, name=call.name))

    def _leave_out(self, item: Unserved) -> None:
        self._ignored.add(f"input[].type={item.kind}")

    def _parts(self, content: Content, field: str, *, new: bool = False) -> list[TurnPart]:
        if content is None or isinstance(content, str):
            return [content or ""]
        return [self._read(part, f"input[].{field}[]", new=new) for part in content]

    def _read(self, part: Part, where: str, *, new: bool) -> TurnPart:
        """The text of a part, or the image or file that it is; new images for models without eyes were refused."""
        if not isinstance(part, Unserved):
            return part.text or ""
        media = given_image(part, where, where) or given_file(part, where, where, new=new)
        return media or stand_in(part, where, self._ignored, result=where == "input[].output[]")

    def _result(self, item: Unserved, fields: Sequence[str]) -> str | None:
        """The result in the first of the fields that has one; None if there is none."""
        for name in fields:
            if (value := item.value.get(name)) is not None:
                parts = value if isinstance(value, list) else [value]
                return "\n".join(self._part(part, f"input[].{name}[]") for part in parts)
        return None

    def _part(self, part: Any, where: str) -> str:
        """A part of a result as text, the definition of a tool as its name."""
        if isinstance(part, str):
            return part
        if where == "input[].tools[]" and isinstance(part, dict):
            return str(part.get("name"))
        if isinstance(part, dict) and isinstance(kind := part.get("type"), str):
            typed = Unserved(kind, part)
            if is_media(kind) or own_text(typed) is not None:
                return stand_in(typed, where, self._ignored)
        return json_text(part, "input")


def _reasoning_of(item: ReasoningItem) -> list[str]:
    texts = [part.text for part in item.content or item.summary or () if part.text]
    sealed = None if texts else unseal(item.encrypted_content)
    return texts if sealed is None else [sealed]


def _call(item: CallItem | CustomCallItem) -> Call:
    name = flat_name(item.namespace, item.name)
    if isinstance(item, CustomCallItem):
        return Call(name, input_arguments(item.input, "input"), item.call_id)
    return Call(name, json_text(item.arguments, "input"), item.call_id)


def _hosted_name(item: Unserved) -> str:
    if item.kind == "mcp_call":
        return flat_name(str(item.value.get("server_label") or ""), str(item.value.get("name")))
    return item.kind.removesuffix("_call")


def _hosted_arguments(item: Unserved) -> str:
    field = _ARGUMENTS[item.kind]
    value = item.value.get(field)
    return json_text(value if isinstance(value, dict) or field == "arguments" else {field: value}, "input")
