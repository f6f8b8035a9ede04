"""Chats: from a request to its sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from ryzanstein.v1 import worker_pb2

from services.gateway.api.chat import Call, ChatRequest, Part, Turn
from services.gateway.api.ignored import Ignored
from services.gateway.errors import invalid
from services.gateway.files.reader import FileReader
from services.gateway.generation.group import SequenceGroup
from services.gateway.generation.message_format import message_format_of
from services.gateway.generation.pipeline import Pipeline, check_prompt, fit_max_tokens
from services.gateway.generation.prepared import MAX_CHOICES, Prepared
from services.gateway.generation.prompts import encode_prediction
from services.gateway.generation.request import Caller, SamplingOptions
from services.gateway.generation.sampling import check_token_ids, sampling_options
from services.gateway.grammar.admission import GrammarCompiler
from services.gateway.grammar.formats import Constraint
from services.gateway.ids import new_id
from services.gateway.images.reader import ImageReader, SeenImage, layout_of, placed, without_images
from services.gateway.settings import GatewaySettings
from services.gateway.text.codec import ServedModel
from services.gateway.text.conversation import Conversation, encode_conversation
from services.gateway.tools.formats import parser_for
from services.gateway.tools.use import ToolUse, tool_use


def conversation_of(
    request: ChatRequest, turns: Sequence[Turn], tools: ToolUse | None, *, control_tokens: bool
) -> Conversation:
    """Return the template's input, `turns` as the model reads them; raises :class:`ApiError` (400)."""
    if reserved := {"messages", "add_generation_prompt", "tools"} & request.variables.keys():
        raise invalid(f"`chat_template_kwargs` may not set {', '.join(sorted(reserved))}.", "chat_template_kwargs")
    return Conversation(
        [template_turn(turn) for turn in turns],
        request.add_generation_prompt,
        request.continue_final_message,
        dict(request.variables),
        control_tokens=control_tokens,
        tools=tools.definitions() if tools else (),
        names=request.names,
    )


def template_turn(turn: Turn) -> dict[str, Any]:
    """A message as templates expect it: `content` is a text, or a list of parts where it has several, or an image."""
    extra = {
        "name": turn.name,
        "tool_call_id": turn.tool_call_id,
        "reasoning": turn.reasoning,
        "reasoning_content": turn.reasoning_content,
    }
    first = turn.parts[0] if len(turn.parts) == 1 else None
    content = first if isinstance(first, str) else [_template_part(part) for part in turn.parts]
    message: dict[str, Any] = {"role": turn.role, "content": content}
    message |= {name: value for name, value in extra.items() if value is not None}
    if turn.calls:
        message["tool_calls"] = [_template_call(call) for call in turn.calls]
    return message


def _template_part(part: Part) -> dict[str, str]:
    """A part as templates expect it; the text of an image is what stands for it where a template takes texts only.

    Files have become texts.
    """
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "text": ""}


def _template_call(call: Call) -> dict[str, Any]:
    """Arguments as the object that they are, if they are one."""
    try:
        arguments: dict[str, Any] | str = msgspec.json.decode(call.arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        arguments = call.arguments  # arguments that were cut off or are no JSON are shown unchanged
    function = {"name": call.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({} if call.id is None else {"id": call.id})


class ChatPrompt(msgspec.Struct, frozen=True):
    """A model's prompt, and the tools that it may call."""

    ids: list[int]
    tools: ToolUse | None
    images: Sequence[worker_pb2.Image] = ()


class ChatPreparer:
    """Makes the sequences of chats."""

    def __init__(
        self,
        pipeline: Pipeline,
        grammars: GrammarCompiler,
        settings: GatewaySettings,
        images: ImageReader,
        files: FileReader,
    ) -> None:
        self._pipeline = pipeline
        self._images = images
        self._files = files
        self._grammars = grammars
        self._settings = settings

    async def prompt(self, request: ChatRequest, model: ServedModel, ignored: Ignored) -> ChatPrompt:
        """The prompt of a chat, which fits the model; raises :class:`ApiError` (400)."""
        prompt = await self.encode(request, model, ignored)
        check_prompt(model, prompt.ids, request.names.messages)
        return prompt

    async def encode(
        self, request: ChatRequest, model: ServedModel, ignored: Ignored, *, add_special_tokens: bool = False
    ) -> ChatPrompt:
        """The prompt of a chat; raises :class:`ApiError` (400).

        `ignored` gets the images that the model cannot see, and the files of a history that cannot be read.
        """
        settings, layout = self._settings, layout_of(model)
        turns = await self._files.read(request.turns, ignored)
        seen: list[SeenImage] = []
        if layout is None:
            turns = without_images(turns, ignored)
        else:
            seen = await self._images.read(turns, model, layout)
        template = model.template.source if model.template else ""
        native = parser_for(template, settings.tool_parser)
        tools = tool_use(request, native, closed=not settings.additional_properties)
        conversation = conversation_of(request, turns, tools, control_tokens=settings.control_tokens_in_messages)
        if layout is not None and seen:
            texts = [image.text for image in seen]
            conversation = replace(conversation, placeholder=layout.placeholder, images=texts)
        ids = await encode_conversation(model, conversation, add_special_tokens=add_special_tokens)
        images = placed(ids, seen, model.card.images.token, request.names.messages) if seen else ()
        return ChatPrompt(ids, tools, images)

    async def prepare(
        self,
        request: ChatRequest,
        model: ServedModel,
        caller: Caller,
        request_id: str | None = None,
        prompt: ChatPrompt | None = None,
    ) -> Prepared:
        """The sequences of a chat; raises :class:`ApiError`, which names fields as the request does."""
        check_token_ids(request.options, model.card.vocab_size)
        if request.n > MAX_CHOICES:
            raise invalid(f"`n` may be at most {MAX_CHOICES}.", "n", "invalid_value")
        prompt = prompt or await self.prompt(request, model, caller.ignored)
        constraint = await self._constraint(request, prompt.tools)
        grammar = await self._grammars.admit(constraint, model) if constraint else ""
        reasons = self._settings.reasoning == "auto"
        form = message_format_of(model, prompt.ids, prompt.tools, constrained=bool(grammar), reasoning=reasons)
        options = self._options(request, model, prompt, grammar)
        if form and form.special and request.options.skip_special_tokens is None:
            options = replace(options, skip_special_tokens=False)
        request_id, group = request_id or new_id("chatcmpl"), SequenceGroup() if request.n > 1 else None
        prediction_ids = await encode_prediction(model, request.prediction)
        first = await self._pipeline.prepare(
            request_id,
            model,
            prompt.ids,
            options,
            caller,
            group=group,
            prediction_ids=prediction_ids,
            images=prompt.images,
        )
        readers = [form.new() if form else None for _ in range(request.n)]
        checks = constraint.checks if constraint else None
        choices = [(first.choice(i), reader) for i, reader in enumerate(readers)]
        return Prepared(
            request_id,
            model,
            generations=[self._pipeline.generate(choice, reader, checks) for choice, reader in choices],
            include_workers=request.include_workers,
            billed=lambda generation: generation.usage,
            per_prompt=request.n,
        )

    async def _constraint(self, request: ChatRequest, tools: ToolUse | None) -> Constraint | None:
        """Return the grammar of the answer: the requested format, calls of tools, or both."""
        requested = await self._grammars.constraint(request.options, request.names)
        if tools is None or not (tools.constrained or requested is not None):
            return requested
        return await asyncio.to_thread(tools.plan, requested)

    def _options(self, request: ChatRequest, model: ServedModel, prompt: ChatPrompt, grammar: str) -> SamplingOptions:
        return sampling_options(
            request.options,
            model,
            max_tokens=fit_max_tokens(model, len(prompt.ids), request.max_tokens, request.names.messages, None),
            logprobs=request.logprobs,
            grammar=grammar,
            stop_field=request.names.stop,
        )
