"""Chats: from a body to sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from services.gateway.api.schema import ChatBody, Message, ToolCall
from services.gateway.errors import invalid
from services.gateway.generation.group import SequenceGroup
from services.gateway.generation.pipeline import Pipeline, check_prompt, fit_max_tokens
from services.gateway.generation.prepared import Prepared
from services.gateway.generation.reading import reading_of
from services.gateway.generation.request import Caller
from services.gateway.generation.sampling import check_token_ids, sampling_options
from services.gateway.grammar.admission import GrammarCompiler
from services.gateway.ids import new_id
from services.gateway.settings import GatewaySettings
from services.gateway.text.codec import ServedModel
from services.gateway.text.conversation import Conversation, encode_conversation
from services.gateway.tools.formats import parser_for
from services.gateway.tools.use import ToolUse, tool_use


def conversation_of(body: ChatBody, tools: ToolUse | None, *, control_tokens: bool) -> Conversation:
    """What the template is to render; raises :class:`ApiError` (400)."""
    open_turn, continued = body.add_generation_prompt is not False, bool(body.continue_final_message)
    if open_turn and continued:
        message = "`continue_final_message` needs `add_generation_prompt` to be false."
        raise invalid(message, "continue_final_message", "invalid_value")
    variables = body.chat_template_kwargs or {}
    if reserved := {"messages", "add_generation_prompt", "tools"} & variables.keys():
        raise invalid(f"`chat_template_kwargs` may not set {', '.join(sorted(reserved))}.", "chat_template_kwargs")
    variables = _reasoning_variables(body) | variables
    turns = [template_message(message) for message in body.messages]
    definitions = tools.definitions() if tools else ()
    return Conversation(turns, open_turn, continued, variables, control_tokens=control_tokens, tools=definitions)


def _reasoning_variables(body: ChatBody) -> dict[str, Any]:
    asked, effort = body.reasoning, body.reasoning_effort
    found: dict[str, Any] = {"reasoning_effort": effort}
    if asked is not None:
        found = {"reasoning_effort": asked.effort if effort is None else effort, "enable_thinking": asked.enabled}
    return {name: value for name, value in found.items() if value is not None}


def template_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: `content` is a text, or a list of parts where it has several."""
    extra = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning": message.reasoning,
        "reasoning_content": message.reasoning_content,
    }
    if message.reasoning is None and message.reasoning_content is None:
        extra["reasoning_content"] = _text_of_details(message.reasoning_details or ())
    role = "tool" if message.role == "function" else message.role
    texts = message.texts()
    content = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    turn: dict[str, Any] = {"role": role, "content": content} | {k: v for k, v in extra.items() if v is not None}
    made = message.tool_calls or ([ToolCall(function=message.function_call)] if message.function_call else [])
    if made:
        turn["tool_calls"] = [_template_call(call) for call in made]
    return turn


def _text_of_details(details: Sequence[Mapping[str, Any]]) -> str | None:
    """The readable text of `reasoning_details`; encrypted ones have none."""
    found = (detail.get("text") or detail.get("summary") for detail in details)
    return "".join(text for text in found if isinstance(text, str)) or None


def _template_call(call: ToolCall) -> dict[str, Any]:
    """Arguments as the object that they are, if they are one."""
    text = call.function.arguments or "{}"
    try:
        arguments: dict[str, Any] | str = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        arguments = text  # what the model wrote was cut off, or is no JSON: it is shown as it is
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({} if call.id is None else {"id": call.id})


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a model gets to read, and the tools that it was told of."""

    ids: list[int]
    tools: ToolUse | None


class ChatPreparer:
    """Turns bodies into sequences."""

    def __init__(self, pipeline: Pipeline, grammars: GrammarCompiler, settings: GatewaySettings) -> None:
        self._pipeline = pipeline
        self._grammars = grammars
        self._settings = settings

    async def prompt(self, body: ChatBody, model: ServedModel) -> ChatPrompt:
        """The prompt of a body, which fits the model; raises :class:`ApiError` (400)."""
        prompt = await self.encode(body, model)
        check_prompt(model, prompt.ids, "messages")
        return prompt

    async def encode(self, body: ChatBody, model: ServedModel, *, add_special_tokens: bool = False) -> ChatPrompt:
        """The prompt of a body; raises :class:`ApiError` (400)."""
        allowed = self._settings.control_tokens_in_messages
        template = model.template.source if model.template else ""
        tools = tool_use(
            body,
            parser_for(template, self._settings.tool_parser),
            closed=not self._settings.additional_properties,
        )
        conversation = conversation_of(body, tools, control_tokens=allowed)
        ids = await encode_conversation(model, conversation, add_special_tokens=add_special_tokens)
        return ChatPrompt(ids, tools)

    async def prepare(
        self,
        body: ChatBody,
        model: ServedModel,
        caller: Caller,
        request_id: str | None = None,
        prompt: ChatPrompt | None = None,
    ) -> Prepared:
        """The sequences of a body; raises :class:`ApiError`, which names fields of chat."""
        if body.top_logprobs and not body.logprobs:
            raise invalid("`top_logprobs` needs `logprobs` to be true.", "top_logprobs", "invalid_value")
        check_token_ids(body, model.card.vocab_size)
        n = body.n or 1
        if n > self._settings.max_choices:
            raise invalid(f"`n` may be at most {self._settings.max_choices}.", "n", "invalid_value")
        prompt = prompt or await self.prompt(body, model)
        ids, tools = prompt.ids, prompt.tools
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        constraint = await self._grammars.asked(body)
        if tools is not None and (tools.constrained or constraint is not None):
            constraint = await asyncio.to_thread(tools.plan, constraint)
        grammar = await self._grammars.admit(constraint, model) if constraint else ""
        reasons = self._settings.reasoning == "auto"
        reads = reading_of(model, ids, tools, constrained=bool(grammar), reasoning=reasons)
        options = sampling_options(
            body,
            model.sampling_defaults,
            max_tokens=fit_max_tokens(model, len(ids), asked, "messages", None),
            max_stops=self._settings.max_stop_strings,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=grammar,
        )
        if reads and reads.special and body.skip_special_tokens is None:
            options = replace(options, skip_special_tokens=False)
        request_id = request_id or new_id("chatcmpl")
        group = SequenceGroup() if n > 1 else None
        request = await self._pipeline.prepare(request_id, model, ids, options, caller, group=group)
        readers = [reads.new() if reads else None for _ in range(n)]
        checks = constraint.checks if constraint else None
        choices = [(request.choice(i), reader) for i, reader in enumerate(readers)]
        return Prepared(
            request_id,
            model,
            generations=[self._pipeline.generate(choice, reader, checks) for choice, reader in choices],
            include_workers=body.stream_options is not None and bool(body.stream_options.include_workers),
            billed=lambda generation: generation.usage,
            per_prompt=n,
            ignored_tools=() if body.web_search_options is None else ("web_search",),
        )
