"""From the body of chat completions, which REST, WebSocket and gRPC share, to a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.gateway.api.chat import CHAT_COMPLETIONS, Call, ChatRequest, OfferedTools, Turn
from services.gateway.api.ignored import Ignored
from services.gateway.api.options import FunctionDefinition
from services.gateway.api.schema import ChatBody, ChosenFunction, ChosenTool, Message, ToolCall
from services.gateway.errors import ApiError, invalid
from services.gateway.generation.chat import ChatPreparer
from services.gateway.generation.prepared import Prepared
from services.gateway.generation.request import Caller
from services.gateway.text.codec import ServedModel

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
    open_turn, continued = body.add_generation_prompt is not False, bool(body.continue_final_message)
    if open_turn and continued:
        message = "`continue_final_message` needs `add_generation_prompt` to be false."
        raise invalid(message, "continue_final_message", "invalid_value")
    if body.web_search_options is not None:
        ignored.add("web_search_options")
    return ChatRequest(
        turns=[_turn(message) for message in body.messages],
        names=_OLDER if body.functions else CHAT_COMPLETIONS,
        add_generation_prompt=open_turn,
        continue_final_message=continued,
        variables=_variables(body),
        tools=_tools(body),
        options=body,
        n=body.n or 1,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        include_workers=body.stream_options is not None and bool(body.stream_options.include_workers),
    )


def _variables(body: ChatBody) -> dict[str, Any]:
    """For the chat template; what `chat_template_kwargs` says counts most."""
    asked, effort = body.reasoning, body.reasoning_effort
    found: dict[str, Any] = {"reasoning_effort": effort}
    if asked is not None:
        found = {"reasoning_effort": asked.effort if effort is None else effort, "enable_thinking": asked.enabled}
    return {name: value for name, value in found.items() if value is not None} | (body.chat_template_kwargs or {})


def _turn(message: Message) -> Turn:
    reasoning, content = message.reasoning, message.reasoning_content
    if reasoning is None and content is None:
        content = _text_of_details(message.reasoning_details or ())
    made = message.tool_calls or ([ToolCall(function=message.function_call)] if message.function_call else [])
    return Turn(
        "tool" if message.role == "function" else message.role,
        message.texts(),
        name=message.name,
        tool_call_id=message.tool_call_id,
        reasoning=reasoning,
        reasoning_content=content,
        calls=[Call(call.function.name, call.function.arguments or "{}", call.id) for call in made],
    )


def _text_of_details(details: Sequence[Mapping[str, Any]]) -> str | None:
    """The readable text of `reasoning_details`; encrypted ones have none."""
    found = (detail.get("text") or detail.get("summary") for detail in details)
    return "".join(text for text in found if isinstance(text, str)) or None


def _tools(body: ChatBody) -> OfferedTools:
    """The functions of either form; raises :class:`ApiError` (400)."""
    if body.tools and body.functions:
        raise invalid("Only one of `tools` and `functions` may be given.", "functions", "invalid_value")
    parallel = body.parallel_tool_calls is not False
    if body.functions:
        return OfferedTools(body.functions, _name(body.function_call), parallel, legacy=True)
    functions = [tool.function for tool in body.tools or ()]
    choice = body.tool_choice
    if isinstance(choice, ChosenTool) and choice.type == "allowed_tools":
        return _allowed(functions, choice, parallel)
    return OfferedTools(functions, _name(choice), parallel)


def _allowed(functions: Sequence[FunctionDefinition], choice: ChosenTool, parallel: bool) -> OfferedTools:
    asked = choice.allowed_tools
    if asked is None:
        raise _missing("tool_choice.allowed_tools")
    names = {tool.function.name for tool in asked.tools}
    if unknown := names - {function.name for function in functions}:
        message = f"`tool_choice.allowed_tools.tools` names `{min(unknown)}`, which is not among `tools`."
        raise invalid(message, "tool_choice.allowed_tools.tools", "invalid_value")
    return OfferedTools([function for function in functions if function.name in names], asked.mode, parallel)


def _name(choice: str | ChosenTool | ChosenFunction | None) -> str:
    if isinstance(choice, ChosenTool):
        if choice.function is None:
            raise _missing("tool_choice.function")
        return choice.function.name
    return choice.name if isinstance(choice, ChosenFunction) else choice or "auto"


def _missing(field: str) -> ApiError:
    return invalid(f"Missing required field `{field}`.", field, "missing_field")
