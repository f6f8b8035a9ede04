"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from services.gateway.api.decode import BodyDecoder
from services.gateway.api.http import DONE, OPENAI_ERRORS
from services.gateway.api.logprobs import LogprobWriter
from services.gateway.api.reading import reading_of
from services.gateway.api.sampling import check_token_ids, sampling_options
from services.gateway.api.schema import ChatBody, Message, ToolCall
from services.gateway.errors import ApiError, invalid
from services.gateway.generation.output import Chunk, Generation, ScoredToken, Usage, usage_json
from services.gateway.generation.parts import Parts
from services.gateway.generation.pipeline import Pipeline, check_prompt, fit_max_tokens
from services.gateway.generation.request import Caller, new_id
from services.gateway.generation.sequences import Choice, Sequences, Serializer
from services.gateway.grammar.admission import GrammarCompiler
from services.gateway.settings import GatewaySettings
from services.gateway.text.codec import ServedModel
from services.gateway.text.conversation import Conversation, encode_conversation
from services.gateway.tools.calls import CallDelta, call_deltas, function_json, join_calls
from services.gateway.tools.formats import parser_for
from services.gateway.tools.use import ToolUse, tool_use

_encode = msgspec.json.encode


class ChatSerializer:
    """Writes chat completions. The frames of plain text are built once, around the text."""

    def __init__(self, request_id: str, model: ServedModel, body: ChatBody) -> None:
        self._legacy = bool(body.functions)
        options = body.stream_options
        self._common = {"id": request_id, "created": int(time.time()), "model": model.name}
        self._with_ids = bool(body.return_token_ids)
        self._usage_field = options is not None and bool(options.include_usage)
        self._running_usage = options is not None and bool(options.continuous_usage_stats)
        self._with_workers = options is not None and bool(options.include_workers)
        self._writer = LogprobWriter(model, body.top_logprobs or 0) if body.logprobs else None
        start = _encode({"id": request_id, "object": "chat.completion.chunk"} | self._common)[:-1]
        self._head = b"data: " + start + b',"choices":[{"index":'
        self._delta = b',"delta":{"content":'
        self._tail = b'},"logprobs":null,"finish_reason":null}]' + self._usage_null + b"}\n\n"

    @property
    def _usage_null(self) -> bytes:
        return b',"usage":null' if self._usage_field else b""

    def opening(self, index: int, generation: Generation) -> bytes:
        """See :class:`Serializer`."""
        return self._frame(index, {"role": "assistant", "content": ""}, None, None, {}, generation)

    def logprobs(self, index: int, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        """See :class:`Serializer`."""
        return self._writer.chat(tokens) if self._writer else None

    def frame(self, index: int, chunk: Chunk, generation: Generation) -> bytes:
        """See :class:`Serializer`."""
        plain = not (chunk.calls or chunk.reasoning)
        takeover = chunk.takeover if self._with_workers else None
        quick = plain and chunk.finish is None and not self._with_ids and takeover is None
        if quick and not chunk.tokens and not self._running_usage:
            if not chunk.ids:
                return b""
            return b"%b%d%b%b%b" % (self._head, index, self._delta, _encode(chunk.text), self._tail)
        extra: dict[str, Any] = {"token_ids": chunk.ids} if self._with_ids else {}
        if takeover is not None:
            extra["worker"] = takeover.json()
        logprobs = self.logprobs(index, chunk.tokens) if chunk.tokens else None
        delta: dict[str, Any] = {"content": chunk.text} if chunk.text or (plain and chunk.finish is None) else {}
        if chunk.reasoning:
            delta["reasoning_content"] = chunk.reasoning
        if chunk.calls:
            delta |= self._calls_delta(chunk.calls)
        return self._frame(index, delta, logprobs, chunk.finish, extra, generation)

    def _calls_delta(self, calls: Sequence[CallDelta]) -> dict[str, Any]:
        if self._legacy:
            first = CallDelta(0)
            join_calls([first], (call for call in calls if call.index == 0))
            return {"function_call": function_json(first)}
        return {"tool_calls": call_deltas(calls)}

    def _frame(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: object,
        finish: str | None,
        extra: dict[str, Any],
        generation: Generation,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **extra}
        usage: dict[str, Any] = {"usage": None} if self._usage_field else {}
        if self._running_usage:
            usage = {"usage": usage_json(generation.usage)}
        return (
            b"data: "
            + _encode({"object": "chat.completion.chunk", **self._common, "choices": [choice], **usage})
            + b"\n\n"
        )

    async def ending(self, usage: Usage) -> bytes:
        """See :class:`Serializer`."""
        if not self._usage_field:
            return DONE
        chunk = {"object": "chat.completion.chunk", **self._common, "choices": [], "usage": usage_json(usage)}
        return b"data: " + _encode(chunk) + b"\n\n" + DONE

    def failure(self, error: ApiError) -> bytes:
        """See :class:`Serializer`."""
        return OPENAI_ERRORS.frames(error)

    async def body(self, choices: Sequence[Choice], generations: Sequence[Generation], usage: Usage) -> dict[str, Any]:
        """See :class:`Serializer`."""
        return {
            "object": "chat.completion",
            **self._common,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage_json(usage),
        }

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": self._message(choice),
            "logprobs": self.logprobs(index, choice.tokens),
            "finish_reason": choice.finish,
        } | ({"token_ids": choice.ids} if self._with_ids else {})

    def _message(self, choice: Choice) -> dict[str, Any]:
        content = None if choice.calls and not choice.text else choice.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls and self._legacy:
            message["function_call"] = function_json(choice.calls[0])
        elif choice.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": function_json(call)} for call in choice.calls
            ]
        return message


def conversation_of(body: ChatBody, tools: ToolUse | None, *, control_tokens: bool) -> Conversation:
    """What the template is to render; raises :class:`ApiError` (400)."""
    open_turn, continued = body.add_generation_prompt is not False, bool(body.continue_final_message)
    if open_turn and continued:
        message = "`continue_final_message` needs `add_generation_prompt` to be false."
        raise invalid(message, "continue_final_message", "invalid_value")
    variables = body.chat_template_kwargs or {}
    if reserved := {"messages", "add_generation_prompt", "tools"} & variables.keys():
        raise invalid(f"`chat_template_kwargs` may not set {', '.join(sorted(reserved))}.", "chat_template_kwargs")
    if body.reasoning_effort is not None:
        variables = {"reasoning_effort": body.reasoning_effort} | variables
    turns = [template_message(message) for message in body.messages]
    definitions = tools.definitions() if tools else ()
    return Conversation(turns, open_turn, continued, variables, control_tokens=control_tokens, tools=definitions)


def template_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: `content` is one text."""
    extra = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning": message.reasoning,
        "reasoning_content": message.reasoning_content,
    }
    role = "tool" if message.role == "function" else message.role
    turn: dict[str, Any] = {"role": role, "content": message.text()} | {k: v for k, v in extra.items() if v is not None}
    made = message.tool_calls or ([ToolCall(function=message.function_call)] if message.function_call else [])
    if made:
        turn["tool_calls"] = [_template_call(call) for call in made]
    return turn


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


NewSerializer = Callable[[str, ServedModel, ChatBody], Serializer]  # of a request's id


class ChatPreparer:
    """Turns bodies into sequences."""

    def __init__(self, pipeline: Pipeline, grammars: GrammarCompiler, settings: GatewaySettings) -> None:
        self._pipeline = pipeline
        self._grammars = grammars
        self._settings = settings
        self._decoder = BodyDecoder(ChatBody)

    async def decode(self, data: bytes) -> ChatBody:
        """Validate a body."""
        return await self._decoder.decode(data)

    async def prompt(self, body: ChatBody, model: ServedModel) -> ChatPrompt:
        """The prompt of a body; raises :class:`ApiError` (400)."""
        allowed = self._settings.control_tokens_in_messages
        template = model.template.source if model.template else ""
        tools = tool_use(body, parser_for(template, self._settings.tool_parser))
        ids = await encode_conversation(model, conversation_of(body, tools, control_tokens=allowed))
        check_prompt(model, ids, "messages")
        return ChatPrompt(ids, tools)

    async def prepare(
        self,
        body: ChatBody,
        model: ServedModel,
        caller: Caller,
        serializer: NewSerializer = ChatSerializer,
        request_id: str | None = None,
        prompt: ChatPrompt | None = None,
    ) -> Sequences:
        """The sequences of a body, written by `serializer`; raises :class:`ApiError`, which names fields of chat."""
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("`top_logprobs` needs `logprobs` to be true.", "top_logprobs", "invalid_value")
        check_token_ids(body, model.card.vocab_size)
        n = body.n or 1
        if n > self._settings.max_choices:
            raise invalid(f"`n` may be at most {self._settings.max_choices}.", "n", "invalid_value")
        prompt = prompt or await self.prompt(body, model)
        ids, tools = prompt.ids, prompt.tools
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        asked_grammar, new_calls = await self._grammars.asked(body), None
        if tools is not None:
            asked_grammar, new_calls = tools.plan(asked_grammar)
        grammar = await self._grammars.admit(asked_grammar, model) if asked_grammar else ""
        reasons = self._settings.reasoning == "auto"
        reads = reading_of(model, ids, tools, new_calls, constrained=bool(grammar), reasoning=reasons)
        options = sampling_options(
            body,
            model.card.sampling_defaults,
            max_tokens=fit_max_tokens(model, len(ids), asked, "messages", None),
            max_stops=self._settings.max_stop_strings,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=grammar,
        )
        if reads and reads.special and body.skip_special_tokens is None:
            options = replace(options, skip_special_tokens=False)
        request_id = request_id or new_id("chatcmpl")
        parts = Parts() if n > 1 else None
        request = await self._pipeline.prepare(request_id, model, ids, options, caller, parts=parts)
        readers = [reads.new() if reads else None for _ in range(n)]
        return Sequences(
            generations=[self._pipeline.generate(request.choice(i), reader) for i, reader in enumerate(readers)],
            serializer=serializer(request_id, model, body),
            stream=bool(body.stream),
            include_workers=body.stream_options is not None and bool(body.stream_options.include_workers),
            billed=lambda generation: generation.usage,
            per_prompt=n,
        )
