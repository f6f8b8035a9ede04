"""From the body of chat completions, which REST, WebSocket and gRPC share, to a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from services.gateway.api.chat import (
    CHAT_COMPLETIONS,
    Call,
    ChatRequest,
    OfferedTools,
    Part,
    Turn,
    thinking_variables,
)
from services.gateway.api.files import given_file
from services.gateway.api.ignored import Ignored, Unserved
from services.gateway.api.images import given_image
from services.gateway.api.options import FunctionDefinition
from services.gateway.api.parts import is_role, json_text, own_text, part_refusal, stand_in
from services.gateway.api.schema import (
    ROLES,
    ChatBody,
    ChosenFunction,
    ChosenTool,
    ContentPart,
    Message,
    Tool,
    ToolCall,
)
from services.gateway.errors import ApiError, invalid
from services.gateway.generation.chat import ChatPreparer
from services.gateway.generation.prepared import Prepared
from services.gateway.generation.request import Caller
from services.gateway.text.codec import ServedModel
from services.gateway.tools.custom import custom_function, input_arguments

_SERVED_TOOLS = (None, "function", "custom")
_OLDER = replace(CHAT_COMPLETIONS, tools="functions", tool_choice="function_call")


class ChatBodyPreparer:
    """Prepares bodies of chat completions."""

    def __init__(self, chats: ChatPreparer) -> None:
        self._chats = chats

    async def prepare(self, body: ChatBody, model: ServedModel, caller: Caller) -> Prepared:
        """See :class:`Preparer`."""
        return await self._chats.prepare(chat_of(body, model.max_len, caller.ignored), model, caller)


def chat_of(body: ChatBody, max_turns: int, ignored: Ignored) -> ChatRequest:
    """The chat that a body asks for; raises :class:`ApiError` (400), for too many messages before any is looked at."""
    if len(body.messages) > max_turns:  # a message costs a token at the least
        message = f"`messages` may hold at most {max_turns} messages for this model, got {len(body.messages)}."
        raise invalid(message, "messages", "invalid_value")
    if body.top_logprobs and not body.logprobs:
        raise invalid("`top_logprobs` needs `logprobs` to be true.", "top_logprobs", "invalid_value")
    continued = bool(body.continue_final_message) or _goes_on(body)
    open_turn = body.add_generation_prompt is not False and not _goes_on(body)
    if open_turn and continued:
        message = "`continue_final_message` needs `add_generation_prompt` to be false."
        raise invalid(message, "continue_final_message", "invalid_value")
    if body.web_search_options is not None:
        ignored.add("web_search_options")
    return ChatRequest(
        turns=turns_of(body.messages, ignored),
        names=_OLDER if body.functions else CHAT_COMPLETIONS,
        add_generation_prompt=open_turn,
        continue_final_message=continued,
        variables=_variables(body),
        tools=_tools(body, ignored),
        options=body,
        n=body.n or 1,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        include_workers=body.stream_options is not None and bool(body.stream_options.include_workers),
        prediction=body.prediction,
    )


def _goes_on(body: ChatBody) -> bool:
    """Whether the last message is the beginning of the answer."""
    last = body.messages[-1] if body.messages else None
    return (
        bool(last and last.role == "assistant" and (last.prefix or last.partial)) and body.add_generation_prompt is None
    )


def _variables(body: ChatBody) -> dict[str, Any]:
    """For the chat template; what `chat_template_kwargs` says counts most."""
    reasoning, effort, on = body.reasoning, body.reasoning_effort, body.enable_thinking
    if on is None and body.thinking is not None:
        on = body.thinking.type != "disabled"
    if reasoning is not None:
        effort, on = reasoning.effort if effort is None else effort, reasoning.enabled if on is None else on
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    return variables | ({} if on is None else thinking_variables(on=on)) | (body.chat_template_kwargs or {})


def turns_of(messages: Sequence[Message], ignored: Ignored) -> list[Turn]:
    """The turns of messages; raises :class:`ApiError` (400) for a new part that is no text."""
    last = len(messages) - 1
    return [
        _turn(message, _Place(index, index == last, ignored))
        for index, message in enumerate(messages)
        if is_role(message.role, ROLES, f"messages[{index}].role", ignored, new=index == last)
    ]


class _Place(Struct, frozen=True):
    """A message's place in a body."""

    index: int
    last: bool
    ignored: Ignored

    def read(self, part: str | ContentPart, number: int, role: str) -> Part:
        """The text of a part of the content, or the image or file that it is; raises :class:`ApiError` (400)."""
        if isinstance(part, str):
            return part
        if not isinstance(part, Unserved):
            return part.text or ""
        new, field = role in ("system", "developer") or (self.last and role == "user"), f"messages[{self.index}]"
        refused = part_refusal(part, ("text", "refusal"), f"{field}.content[{number}]") if new else None
        if image := given_image(part, f"{field}.content[{number}]", "messages[].content[]", refused):
            return image
        if file := given_file(part, f"{field}.content[{number}]", "messages[].content[]", new=new):
            return file
        if refused and own_text(part) is None:
            raise refused
        return stand_in(part, "messages[].content[]", self.ignored, result=role in ("tool", "function"))

    def call(self, call: ToolCall, number: int) -> Call | None:
        """A call by the assistant; None for one of another type. Raises :class:`ApiError` (400)."""
        if call.custom is not None:
            where = f"messages[{self.index}].tool_calls[{number}].custom.input"
            return Call(call.custom.name, input_arguments(call.custom.input, where), call.id)
        if call.function is None and call.type in _SERVED_TOOLS:
            if not self.last:
                self.ignored.add("messages[].tool_calls[]")
                return None
            raise _missing(f"messages[{self.index}].tool_calls[{number}].{call.type or 'function'}")
        if call.function is None:
            self.ignored.add(f"messages[].tool_calls[].type={call.type}")
            return None
        where = f"messages[{self.index}].tool_calls[{number}].function.arguments"
        return Call(call.function.name, json_text(call.function.arguments, where), call.id)


def _turn(message: Message, place: _Place) -> Turn:
    reasoning, reasoned, content = message.reasoning, message.reasoning_content, message.content
    if reasoning is None and reasoned is None:
        reasoned = _text_of_details(message.reasoning_details or ())
    if message.audio is not None:
        place.ignored.add("messages[].audio")
    made = message.tool_calls or ([ToolCall(function=message.function_call)] if message.function_call else [])
    parts = content if isinstance(content, list) else [content or ""]
    calls = [place.call(call, number) for number, call in enumerate(made)]
    return Turn(
        "tool" if message.role == "function" else message.role,
        [place.read(part, number, message.role) for number, part in enumerate(parts)],
        name=message.name,
        tool_call_id=message.tool_call_id,
        reasoning=reasoning,
        reasoning_content=reasoned,
        calls=[call for call in calls if call],
    )


def _text_of_details(details: Sequence[Mapping[str, Any]]) -> str | None:
    """The readable text of `reasoning_details`; encrypted ones have none."""
    texts = (detail.get("text") or detail.get("summary") for detail in details)
    return "".join(text for text in texts if isinstance(text, str)) or None


def _tools(body: ChatBody, ignored: Ignored) -> OfferedTools:
    """The functions of either form; raises :class:`ApiError` (400)."""
    if body.tools and body.functions:
        raise invalid("Only one of `tools` and `functions` may be given.", "functions", "invalid_value")
    parallel = body.parallel_tool_calls is not False
    if body.functions:
        return OfferedTools(body.functions, _name(body.function_call), parallel, legacy=True)
    functions = _functions(body.tools or (), ignored)
    custom = frozenset(tool.custom.name for tool in body.tools or () if tool.custom and not tool.function)
    choice = body.tool_choice
    if isinstance(choice, ChosenTool) and choice.type == "allowed_tools":
        return replace(_allowed(functions, choice, parallel), custom=custom)
    return OfferedTools(functions, _name(choice), parallel, custom)


def _functions(tools: Sequence[Tool], ignored: Ignored) -> list[FunctionDefinition]:
    """The functions among tools; raises :class:`ApiError` (400)."""
    functions = []
    for index, tool in enumerate(tools):
        if tool.function is not None:
            functions.append(tool.function)
        elif tool.custom is not None:
            form = tool.custom.format or {}
            grammar = form.get("grammar") if form.get("type") == "grammar" else None
            shown = grammar if isinstance(grammar, dict) else None
            functions.append(custom_function(tool.custom.name, tool.custom.description, shown))
        elif tool.type in _SERVED_TOOLS:
            raise _missing(f"tools[{index}].{tool.type or 'function'}")
        else:
            ignored.add(f"tools[].type={tool.type}")
    return functions


def _allowed(functions: Sequence[FunctionDefinition], choice: ChosenTool, parallel: bool) -> OfferedTools:
    allowed = choice.allowed_tools
    if allowed is None:
        raise _missing("tool_choice.allowed_tools")
    named = [tool.function or tool.custom for tool in allowed.tools]
    for index, tool in enumerate(allowed.tools):
        if named[index] is None and tool.type in _SERVED_TOOLS:
            raise _missing(f"tool_choice.allowed_tools.tools[{index}].{tool.type or 'function'}")
    names = {one.name for one in named if one}
    if unknown := names - {function.name for function in functions}:
        message = f"`tool_choice.allowed_tools.tools` names `{min(unknown)}`, which is not among `tools`."
        raise invalid(message, "tool_choice.allowed_tools.tools", "invalid_value")
    return OfferedTools([function for function in functions if function.name in names], allowed.mode, parallel)


def _name(choice: str | ChosenTool | ChosenFunction | None) -> str:
    if isinstance(choice, ChosenFunction):
        return choice.name
    if isinstance(choice, ChosenTool):
        choice = _word_or_name(choice)
    return "required" if choice == "any" else choice or "auto"


def _word_or_name(choice: ChosenTool) -> str:
    if choice.type not in (None, "function", "custom", "tool", "allowed_tools"):
        return choice.type
    named = choice.function or choice.custom
    name = named.name if named else choice.name
    if name is None:
        raise _missing(f"tool_choice.{choice.type or 'function'}")
    return name


def _missing(field: str) -> ApiError:
    return invalid(f"Missing required field `{field}`.", field, "missing_field")
