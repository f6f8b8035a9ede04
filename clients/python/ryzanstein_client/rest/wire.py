"""The JSON that the REST API answers with. Fields that this client does not use are left out and ignored."""

from __future__ import annotations

from msgspec import Struct, field


class Failure(Struct):
    """OpenAI's error object."""

    message: str
    type: str = ""
    param: str | None = None
    code: str | int | None = None


class ErrorBody(Struct):
    """The body of an error."""

    error: Failure


class PromptDetails(Struct):
    """How the prompt was computed."""

    cached_tokens: int = 0


class CompletionDetails(Struct):
    """Tokens drafted from a prediction."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Struct):
    """Tokens used."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class ItemUsage(Struct):
    """Tokens used, as responses and batches call them."""

    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: PromptDetails | None = None


class TextLogprobs(Struct):
    """Of completions: parallel lists. A prompt's first token has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(Struct):
    """A completion, or what a frame adds to it."""

    text: str
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None


class ScoredText(Struct):
    """A token of chat logprobs."""

    token: str
    logprob: float
    top_logprobs: list[ScoredText] = field(default_factory=list)


class ChatLogprobs(Struct):
    """Of chats."""

    content: list[ScoredText] | None = None


class Function(Struct):
    """A called function, or the part that a frame adds to it."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(Struct):
    """A call, or what a frame adds to it."""

    function: Function
    index: int = 0
    id: str | None = None


class ChatMessage(Struct):
    """An answer, or what a frame adds to it."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Struct):
    """A chat completion."""

    message: ChatMessage
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatDelta(Struct):
    """The part of a chat completion that a frame adds."""

    delta: ChatMessage
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class TextBody(Struct):
    """A completion; as a frame of a stream it may be an error or have usage only."""

    id: str = ""
    model: str = ""
    choices: list[TextChoice] = field(default_factory=list)
    usage: Usage | None = None
    error: Failure | None = None


class ChatBody(Struct):
    """A chat completion."""

    id: str = ""
    model: str = ""
    choices: list[ChatChoice] = field(default_factory=list)
    usage: Usage | None = None


class ChatFrame(Struct):
    """A frame of a streamed chat completion."""

    id: str = ""
    model: str = ""
    choices: list[ChatDelta] = field(default_factory=list)
    usage: Usage | None = None
    error: Failure | None = None


class Embedding(Struct):
    """A vector: little-endian float32 in base64."""

    index: int
    embedding: str


class EmbeddingBody(Struct):
    """Vectors."""

    data: list[Embedding]
    usage: Usage


class TokensBody(Struct):
    """Token ids of a text."""

    tokens: list[int]


class TextOfTokens(Struct):
    """The text of token ids."""

    prompt: str


class ModelCard(Struct):
    """A model."""

    id: str
    created: int = 0
    max_model_len: int = 0


class ModelsBody(Struct):
    """All models."""

    data: list[ModelCard]


class Deleted(Struct):
    """A removed object."""

    deleted: bool
