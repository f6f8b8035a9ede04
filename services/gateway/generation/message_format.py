"""How the text of a chat's choices is read: which reasoning and calls it may hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from services.gateway.generation.message import MessageReader
from services.gateway.generation.tokens import FinishReason
from services.gateway.reasoning.formats import ReasoningFormat, reasoning_of
from services.gateway.reasoning.think import ReasoningParser
from services.gateway.text.codec import ServedModel
from services.gateway.tools.parser import CallReader
from services.gateway.tools.use import ToolUse

_PROMPT_END = 16  # tokens that show whether a template has opened the reasoning


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """Makes a reader for each choice."""

    tags: ReasoningFormat | None  # marks of reasoning
    inside: bool  # the prompt has opened it
    new_calls: Callable[[], CallReader] | None
    finish: FinishReason  # finish reason of a message with calls
    special: bool  # control tokens must be seen
    call_marks: tuple[str, ...] = ()  # a call that begins within the reasoning ends it

    def new(self) -> MessageReader:
        """A reader."""
        reasoning = ReasoningParser(self.tags, inside=self.inside, calls=self.call_marks) if self.tags else None
        return MessageReader(reasoning, self.new_calls() if self.new_calls else None, self.finish)


def message_format_of(
    model: ServedModel,
    prompt_ids: Sequence[int],
    tools: ToolUse | None,
    *,
    constrained: bool,
    reasoning: bool,
) -> MessageFormat | None:
    """How to read answers to a prompt; None when their text is all there is. A grammar leaves no room for reasoning."""
    template = model.template.source if model.template else ""
    tags = reasoning_of(template) if reasoning and not constrained else None
    if tags is None and tools is None:
        return None
    new_calls = None if tools is None else partial(tools.reader, constrained=constrained)
    inside = False
    if tags is not None:
        end = model.decode(list(prompt_ids[-_PROMPT_END:]), skip_special_tokens=False)
        inside = end.rstrip().endswith(tags.begins)
    control = model.control_tokens
    native = tools.native.special if tools is not None and not constrained else False
    special = native or (tags is not None and any(control.in_text(mark) for mark in tags.marks))
    call_marks = tools.native.ends_reasoning(tools.names) if tools is not None and native else ()
    return MessageFormat(tags, inside, new_calls, _finish(tools), special, call_marks)


def _finish(tools: ToolUse | None) -> FinishReason:
    if tools is not None and tools.offered.legacy:
        return FinishReason.FUNCTION_CALL
    named = tools is not None and tools.offered.choice not in ("auto", "required")
    return FinishReason.STOP if named else FinishReason.TOOL_CALLS
