"""The request bodies of the REST API. These structs define both the validation and the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from services.common.fine_tuning.records import MOST_RANK
from services.common.patterns import END
from services.gateway.api.fields import ADVISORY, neutral
from services.gateway.api.ignored import Unserved
from services.gateway.api.options import (
    MAX_TOOLS,
    ChosenModel,
    FunctionDefinition,
    FunctionName,
    KeepAlive,
    Labels,
    PredictedContent,
    Priority,
    ReasoningOptions,
    Session,
    TextOptions,
    TextPart,
    ThinkingSwitch,
    TokenId,
)

MAX_TEXTS = 2048  # in an embedding request; OpenAI's limit
_WINDOW = "Like `24h`, at most as long as files are kept (RYZANSTEIN_BATCH_FILE_LIFE_S)"


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Parts of a stream besides its tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_cost: (
        Annotated[
            bool, Meta(description="Adds `cost` to the usage of the whole answer; null for a model without a price")
        ]
        | None
    ) = None
    include_workers: (
        Annotated[bool, Meta(description="Adds `worker` to a choice whenever another one answers")] | None
    ) = None
    include_obfuscation: Annotated[Any, ADVISORY] = None


class SamplingBody(TextOptions, kw_only=True, forbid_unknown_fields=True):
    """Fields that completions and chat share."""

    model: ChosenModel | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=1024)] | None = None
    return_token_ids: Annotated[bool, Meta(description="Adds token_ids to each choice")] | None = None
    user: Annotated[Session, Meta(description="Keeps a user's requests on one worker without session_id")] | None = None
    session_id: Annotated[Session, Meta(description="Requests of a session stay on one worker")] | None = None
    priority: Priority | None = None
    keep_alive: KeepAlive | None = None
    metadata: Annotated[Any, ADVISORY] = None
    client_metadata: Annotated[Any, ADVISORY] = None
    service_tier: Annotated[Any, ADVISORY] = None
    store: Annotated[Any, ADVISORY] = None
    safety_identifier: Annotated[Any, ADVISORY] = None
    prompt_cache_key: Annotated[Any, ADVISORY] = None
    prompt_cache_retention: Annotated[Any, ADVISORY] = None
    allowed_token_ids: Annotated[Any, neutral()] = None
    bad_words: Annotated[Any, neutral([])] = None
    cache_salt: Annotated[Any, neutral()] = None
    early_stopping: Annotated[Any, neutral(False)] = None
    kv_transfer_params: Annotated[Any, neutral()] = None
    length_penalty: Annotated[Any, neutral(1.0)] = None
    logits_processors: Annotated[Any, neutral([])] = None
    return_tokens_as_token_ids: Annotated[Any, neutral(False)] = None
    spaces_between_special_tokens: Annotated[Any, neutral(True)] = None
    truncate_prompt_tokens: Annotated[Any, neutral()] = None
    use_beam_search: Annotated[Any, neutral(False)] = None
    vllm_xargs: Annotated[Any, neutral({})] = None

    @property
    def session(self) -> str:
        """The key that keeps requests on one worker; empty when the body has none."""
        return self.session_id or self.user or ""


class CompletionBody(SamplingBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: Annotated[
        str | list[str | TokenId | list[TokenId]],
        Meta(description="A text, token ids, or a batch of either"),
    ]
    max_tokens: Annotated[int, Meta(ge=0, description="Default 16")] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prediction: (
        Annotated[str | PredictedContent, Meta(description="The expected text; it changes speed alone")] | None
    ) = None
    echo: bool | None = None
    best_of: (
        Annotated[int, Meta(ge=1, le=1024, description="Only the value of `n`, 1 where that is left out")] | None
    ) = None
    suffix: Annotated[Any, neutral("")] = None
    add_special_tokens: Annotated[bool, Meta(description="Default true")] | None = None


class RefusalPart(Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    """A part with the assistant's refusal."""

    refusal: str | None

    @property
    def text(self) -> str | None:
        """The refusal, under the name that other parts use."""
        return self.refusal


ContentPart = TextPart | RefusalPart | Unserved


class CustomDefinition(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool whose input is text."""

    name: FunctionName
    description: str | None = None
    format: Annotated[dict[str, Any] | None, Meta(description="Shown to the model, and not enforced")] = None


class Tool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the model may call; tools of other types are left out."""

    type: Annotated[str, Meta(description="Default: function")] | None = None
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None
    cache_control: Annotated[Any, ADVISORY] = None


class ChosenFunction(Struct, forbid_unknown_fields=True):
    """The name of a function."""

    name: str


class NamedTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool of `tools`, by name."""

    type: Annotated[str, Meta(description="Other types than function and custom are hosted tools")] | None = None
    function: ChosenFunction | None = None
    custom: ChosenFunction | None = None


class AllowedTools(Struct, kw_only=True, forbid_unknown_fields=True):
    """The part of `tools` that the prompt offers."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ChosenTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """The tool that must be called, the tools that may be called, or a word as an object."""

    type: Literal["function", "custom", "tool", "allowed_tools", "auto", "none", "required", "any"] | None = None
    name: Annotated[str, Meta(description="`function.name`, where `function` is missing")] | None = None
    function: ChosenFunction | None = None
    custom: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None


class FunctionCall(Struct, forbid_unknown_fields=True):
    """A function and its arguments' JSON."""

    name: str
    arguments: Annotated[Any, Meta(description="JSON text, or the object itself")] = None
    parsed_arguments: Annotated[Any, ADVISORY] = None
    provider_specific_fields: Annotated[Any, ADVISORY] = None  # LiteLLM sends it with replayed messages


class CustomCall(Struct, forbid_unknown_fields=True):
    """A custom tool and its input."""

    name: str
    input: Annotated[Any, Meta(description="A text; the JSON text of other values")] = None


class ToolCall(Struct, kw_only=True, forbid_unknown_fields=True):
    """A call by the assistant."""

    function: FunctionCall | None = None
    custom: CustomCall | None = None
    id: str | None = None
    type: Annotated[str, Meta(description="Calls of other types than function and custom are left out")] | None = None
    extra_content: Annotated[Any, ADVISORY] = None
    index: Annotated[Any, ADVISORY] = None
    provider_specific_fields: Annotated[Any, ADVISORY] = None


ROLES = ("assistant", "developer", "function", "system", "tool", "user")


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    is_turn: ClassVar = True
    role: Annotated[str, Meta(description=f"One of {', '.join(ROLES)}; in a history others are left out")]
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning: Annotated[str, Meta(description="Given to the chat template")] | None = None
    reasoning_content: Annotated[str, Meta(description="Given to the chat template")] | None = None
    reasoning_details: (
        Annotated[list[dict[str, Any]], Meta(description="Texts in it are `reasoning_content` where that is missing")]
        | None
    ) = None
    refusal: Annotated[Any, ADVISORY] = None
    parsed: Annotated[Any, ADVISORY] = None
    annotations: Annotated[Any, ADVISORY] = None
    cache_control: Annotated[Any, ADVISORY] = None
    provider_specific_fields: Annotated[Any, ADVISORY] = None
    extra_content: Annotated[Any, ADVISORY] = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    prefix: Annotated[bool, Meta(description="Of a last message by the assistant: its answer goes on")] | None = None
    partial: Annotated[bool, Meta(description="As `prefix`")] | None = None
    audio: Annotated[Any, Meta(description="Of a history: left out"), ADVISORY] = None


class ChatBody(SamplingBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1, description="Default: what fits; use max_completion_tokens")] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: Annotated[bool, Meta(description="Default true")] | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="Variables for the chat template")] | None = None
    reasoning_effort: Annotated[str, Meta(description="A variable for the chat template")] | None = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: Annotated[bool, Meta(description="A variable for the chat template")] | None = None
    thinking: Annotated[ThinkingSwitch, Meta(description="`enable_thinking`, where that is missing")] | None = None
    thinking_budget: Annotated[Any, ADVISORY] = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    functions: (
        Annotated[list[FunctionDefinition], Meta(max_length=MAX_TOOLS, description="Older form of tools")] | None
    ) = None
    function_call: Literal["none", "auto"] | ChosenFunction | None = None
    prediction: Annotated[PredictedContent, Meta(description="The expected answer; it changes speed alone")] | None = (
        None
    )
    verbosity: Annotated[Any, ADVISORY] = None
    web_search_options: Annotated[Any, Meta(description="Left out: there is no search"), ADVISORY] = None
    add_special_tokens: Annotated[Any, neutral(False)] = None
    audio: Annotated[Any, neutral()] = None
    best_of: Annotated[Any, neutral(1)] = None
    chat_template: Annotated[Any, neutral()] = None
    documents: Annotated[Any, neutral([])] = None
    echo: Annotated[Any, neutral(False)] = None
    include_reasoning: Annotated[Any, neutral(True)] = None
    media_io_kwargs: Annotated[Any, neutral({})] = None
    mm_processor_kwargs: Annotated[Any, neutral({})] = None
    modalities: Annotated[Any, neutral(["text"])] = None
    prompt_logprobs: Annotated[Any, neutral()] = None


Truncation = Annotated[
    int, Meta(ge=-1, description="Longer texts keep their first tokens; -1: as many as the model takes")
]


class TextsBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of every request that reads texts and writes none."""

    model: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    user: Annotated[Session, Meta(description="Keeps a user's requests on one worker")] | None = None
    priority: Priority | None = None


class EmbeddingBody(TextsBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings."""

    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, description="Only the model's own size")] | None = None
    prompt_name: (
        Annotated[str, Meta(description="The model's text before each text, as `query`; default: the publisher's")]
        | None
    ) = None
    add_special_tokens: Annotated[Any, neutral(True)] = None


class ClassifyBody(TextsBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/classify."""

    input: str | list[str | TokenId | list[TokenId]]
    add_special_tokens: Annotated[Any, neutral(True)] = None


Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]


class ScoreBody(TextsBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/score: one text and many, or pairs."""

    text_1: Annotated[str | Texts, Meta(description="A text, or as many as text_2 holds")]
    text_2: str | Texts
    mm_processor_kwargs: Annotated[Any, neutral({})] = None


class Document(Struct, forbid_unknown_fields=True):
    """A document to rank."""

    text: str


class RerankBody(TextsBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/rerank."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[int, Meta(ge=0, description="Default and 0: all")] | None = None
    return_documents: Annotated[bool, Meta(description="Default true")] | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, description="Longer documents keep their first tokens")] | None = None
    rank_fields: Annotated[Any, neutral(["text"])] = None
    mm_processor_kwargs: Annotated[Any, neutral({})] = None


class BatchBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Meta(min_length=1, max_length=64)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Annotated[str, Meta(pattern="^[1-9][0-9]{0,6}[smhd]" + END, description=_WINDOW)]
    metadata: Labels | None = None
    output_expires_after: Annotated[Any, ADVISORY] = None


class Hyperparameters(Struct, kw_only=True, forbid_unknown_fields=True):
    """How an adapter is trained; the last two are ours."""

    n_epochs: Literal["auto"] | Annotated[int, Meta(ge=1, le=50)] | None = None
    batch_size: Literal["auto"] | Annotated[int, Meta(ge=1, le=256)] | None = None
    learning_rate_multiplier: Literal["auto"] | Annotated[float, Meta(gt=0, le=1000)] | None = None
    lora_rank: Annotated[int, Meta(ge=1, le=MOST_RANK)] | None = None
    quantization: Literal["none", "nf4"] | None = None


class Supervised(Struct, kw_only=True, forbid_unknown_fields=True):
    """Training on the assistant's turns."""

    hyperparameters: Hyperparameters | None = None


class TrainingMethod(Struct, kw_only=True, forbid_unknown_fields=True):
    """The kind of training."""

    type: Literal["supervised"]
    supervised: Supervised | None = None


class FineTuningBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/fine_tuning/jobs."""

    model: Annotated[str, Meta(min_length=1, max_length=256, description="A model that the fine-tuner has")]
    training_file: Annotated[str, Meta(min_length=1, max_length=64)]
    validation_file: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    suffix: (
        Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,64}" + END, description="A part of the result's name")] | None
    ) = None
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    method: TrainingMethod | None = None
    hyperparameters: Annotated[Hyperparameters, Meta(description="Use `method`")] | None = None
    metadata: Labels | None = None
    integrations: Annotated[Any, neutral([])] = None
