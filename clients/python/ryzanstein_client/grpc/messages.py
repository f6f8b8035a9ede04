"""From calls to protobuf messages and back."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ryzanstein.v1 import inference_pb2, worker_pb2

from ryzanstein_client.results import Chunk, Embeddings, Model, TokenLogprob, ToolCallDelta, Usage
from ryzanstein_client.settings import CHAT_ONLY, TEXT_ONLY, Message, Options, ResponseFormat, Settings, Tool

_SEED_MASK = (1 << 64) - 1


class Messages:
    """Builds requests with a client's settings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def generate(
        self, prompt: str | Sequence[int], model: str | None, options: Options
    ) -> inference_pb2.GenerateRequest:
        """Of a completion."""
        request = inference_pb2.GenerateRequest(
            model=self._model(model),
            options=_options(self._settings.text_options(options)),
            echo=options.get("echo", False),
            add_special_tokens=options.get("add_special_tokens"),
        )
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.prompt_ids.ids.extend(prompt)
        return request

    def chat(self, messages: Sequence[Message], model: str | None, options: Options) -> inference_pb2.ChatRequest:
        """Of a chat."""
        return inference_pb2.ChatRequest(
            model=self._model(model),
            messages=list(map(_turn, messages)),
            options=_options(self._settings.chat_options(options)),
            tools=list(map(_tool, options.get("tools", ()))),
            tool_choice=options.get("tool_choice", ""),
            parallel_tool_calls=options.get("parallel_tool_calls"),
            reasoning_effort=options.get("reasoning_effort", ""),
            chat_template_kwargs=json.dumps(variables) if (variables := options.get("chat_template_kwargs")) else "",
            add_generation_prompt=options.get("add_generation_prompt"),
            continue_final_message=options.get("continue_final_message", False),
        )

    def embed(self, inputs: str | Sequence[str], model: str | None) -> inference_pb2.EmbedRequest:
        """Of embeddings."""
        texts = [inputs] if isinstance(inputs, str) else inputs
        return inference_pb2.EmbedRequest(model=self._model(model), input=texts)

    def tokenize(self, text: str, model: str | None, *, add_special_tokens: bool) -> inference_pb2.TokenizeRequest:
        """Of token ids."""
        return inference_pb2.TokenizeRequest(model=self._model(model), text=text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], model: str | None) -> inference_pb2.DetokenizeRequest:
        """Of text."""
        return inference_pb2.DetokenizeRequest(model=self._model(model), ids=token_ids)

    def _model(self, model: str | None) -> str:
        return self._settings.model if model is None else model


def _options(options: Options) -> inference_pb2.GenerationOptions:
    fields = {name: value for name, value in options.items() if name not in CHAT_ONLY | TEXT_ONLY}
    if isinstance(stop := options.get("stop"), str):
        fields["stop"] = [stop]
    if (seed := options.get("seed")) is not None:
        fields["seed"] = seed & _SEED_MASK  # the contract's seeds have no sign; the bits are the same
    if (structured := options.get("structured_outputs")) is not None:
        schema = structured.get("json")
        text = {} if schema is None or isinstance(schema, str) else {"json": json.dumps(schema)}
        fields["structured_outputs"] = {**structured, **text}
    if (asked := options.get("response_format")) is not None:
        fields["response_format"] = _response_format(asked)
    return inference_pb2.GenerationOptions(**fields)  # type: ignore[arg-type]  # Options has the contract's names


def _response_format(asked: ResponseFormat) -> inference_pb2.ResponseFormat:
    found = inference_pb2.ResponseFormat(type=asked["type"])
    if (named := asked.get("json_schema")) is not None:
        found.json_schema.SetInParent()
        found.json_schema.name, found.json_schema.description = named.get("name", ""), named.get("description", "")
        found.json_schema.strict = named.get("strict", False)
        found.json_schema.schema = json.dumps(named["schema"]) if "schema" in named else ""
    return found


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


def chunk_of(found: inference_pb2.GenerateResponse) -> Chunk:
    """A message of a stream."""
    finished = bool(found.finish_reason)
    return Chunk(
        text=found.text,
        logprobs=tuple(map(_logprob, (*found.prompt_logprobs, *found.logprobs))),
        token_ids=tuple(found.ids),
        finish_reason=found.finish_reason if finished else None,
        usage=_usage(found.usage) if finished else None,
        request_id=found.request_id,
        reasoning=found.reasoning,
        tool_calls=tuple(ToolCallDelta(call.index, call.id, call.name, call.arguments) for call in found.tool_calls),
    )


def _logprob(found: worker_pb2.TokenLogprobs) -> TokenLogprob:
    pairs = zip(found.top_ids, found.top_logprobs, strict=True)
    top = tuple(TokenLogprob(logprob, token_id=token_id) for token_id, logprob in pairs)
    return TokenLogprob(found.logprob, token_id=found.token_id, top=top)


def _usage(found: inference_pb2.Usage) -> Usage:
    return Usage(found.prompt_tokens, found.completion_tokens, found.cached_tokens)


def embeddings_of(found: inference_pb2.EmbedResponse) -> Embeddings:
    """Vectors."""
    return Embeddings(tuple(tuple(row.values) for row in found.data), _usage(found.usage))


def models_of(found: inference_pb2.ListModelsResponse) -> tuple[Model, ...]:
    """The served models."""
    return tuple(Model(model.id, model.created, model.max_model_len) for model in found.models)
