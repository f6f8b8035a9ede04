"""From calls to protobuf messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ryzanstein.v1 import inference_pb2

from ryzanstein_client.options import ChatOptions, CompletionOptions, ResponseFormat, Tool
from ryzanstein_client.settings import Message, Prompt, Settings

_SEED_MASK = (1 << 64) - 1


_OPTIONS = inference_pb2.GenerationOptions.DESCRIPTOR.fields_by_name.keys()


def generate(settings: Settings, prompt: Prompt, options: CompletionOptions) -> inference_pb2.GenerateRequest:
    """Of a completion; raises TypeError for an option that completions do not have."""
    fields = settings.generation_fields(options, CompletionOptions)
    request = inference_pb2.GenerateRequest(
        model=fields.get("model"),
        options=_options(fields),
        echo=fields.get("echo", False),
        add_special_tokens=fields.get("add_special_tokens"),
    )
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.prompt_ids.ids.extend(prompt)
    return request


def chat(settings: Settings, messages: Sequence[Message], options: ChatOptions) -> inference_pb2.ChatRequest:
    """Of a chat; raises TypeError for an option that chats do not have."""
    fields = settings.generation_fields(options, ChatOptions)
    variables = fields.get("chat_template_kwargs")
    return inference_pb2.ChatRequest(
        model=fields.get("model"),
        messages=list(map(_turn, messages)),
        options=_options(fields),
        tools=list(map(_tool, fields.get("tools", ()))),
        tool_choice=fields.get("tool_choice", ""),
        parallel_tool_calls=fields.get("parallel_tool_calls"),
        reasoning_effort=fields.get("reasoning_effort", ""),
        chat_template_kwargs=json.dumps(variables) if variables else "",
        add_generation_prompt=fields.get("add_generation_prompt"),
        continue_final_message=fields.get("continue_final_message", False),
    )


def embed(settings: Settings, inputs: str | Sequence[str], model: str | None) -> inference_pb2.EmbedRequest:
    """Of embeddings."""
    texts = [inputs] if isinstance(inputs, str) else inputs
    return inference_pb2.EmbedRequest(model=settings.model_of(model), input=texts)


def tokenize(
    settings: Settings, text: str, model: str | None, *, add_special_tokens: bool
) -> inference_pb2.TokenizeRequest:
    """Of token ids."""
    return inference_pb2.TokenizeRequest(
        model=settings.model_of(model), text=text, add_special_tokens=add_special_tokens
    )


def detokenize(settings: Settings, token_ids: Sequence[int], model: str | None) -> inference_pb2.DetokenizeRequest:
    """Of text."""
    return inference_pb2.DetokenizeRequest(model=settings.model_of(model), ids=token_ids)


def _options(fields: Mapping[str, Any]) -> inference_pb2.GenerationOptions:
    given = {name: value for name, value in fields.items() if name in _OPTIONS}
    if isinstance(stop := given.get("stop"), str):
        given["stop"] = [stop]
    if (seed := given.get("seed")) is not None:
        given["seed"] = seed & _SEED_MASK  # the contract's seeds have no sign; the bits are the same
    if (structured := given.get("structured_outputs")) is not None:
        schema = structured.get("json")
        text = {} if schema is None or isinstance(schema, str) else {"json": json.dumps(schema)}
        given["structured_outputs"] = {**structured, **text}
    if (form := given.get("response_format")) is not None:
        given["response_format"] = _response_format(form)
    return inference_pb2.GenerationOptions(**given)


def _response_format(form: ResponseFormat) -> inference_pb2.ResponseFormat:
    encoded = inference_pb2.ResponseFormat(type=form["type"])
    if (named := form.get("json_schema")) is not None:
        encoded.json_schema.SetInParent()
        encoded.json_schema.name, encoded.json_schema.description = named.get("name", ""), named.get("description", "")
        encoded.json_schema.strict = named.get("strict", False)
        encoded.json_schema.schema = json.dumps(named["schema"]) if "schema" in named else ""
    return encoded


def _turn(message: Message) -> inference_pb2.ChatMessage:
    calls = [
        inference_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls
    ]
    return inference_pb2.ChatMessage(
        role=message.role,
        content=message.content,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning,
    )


def _tool(tool: Tool) -> inference_pb2.Tool:
    return inference_pb2.Tool(
        name=tool["name"],
        description=tool.get("description", ""),
        parameters=json.dumps(tool["parameters"]) if "parameters" in tool else "",
        strict=tool.get("strict", False),
    )
