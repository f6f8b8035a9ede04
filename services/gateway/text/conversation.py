"""Converts messages to token ids through a model's chat template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from services.gateway.api.chat import CHAT_COMPLETIONS, FieldNames
from services.gateway.errors import invalid
from services.gateway.text.codec import ServedModel
from services.gateway.text.guard import Marks, PromptPart
from services.gateway.text.template import ChatTemplate, TemplateRefusedError
from services.gateway.text.tool_turns import (
    joined,
    with_roles_in_turn,
    with_text_arguments,
    with_tools_told,
    without_calls,
)


class Conversation(Struct, frozen=True):
    """The input of a chat template."""

    turns: Sequence[dict[str, Any]]  # role, content (a text, or parts), and other fields for templates
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = field(default_factory=dict)
    control_tokens: bool = False  # whether messages may spell control tokens
    tools: Sequence[dict[str, Any]] = ()  # in the templates' form
    names: FieldNames = CHAT_COMPLETIONS  # for errors
    placeholder: str = ""  # text of chat templates for an image
    images: Sequence[str] = ()  # texts in place of the placeholders, in order

    @property
    def size(self) -> int:
        """The characters in clients' texts."""
        return _size([_with_text(turn) for turn in self.turns]) + _size(self.tools)


def _with_text(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn whose content is one text."""
    content = turn["content"]
    return turn if isinstance(content, str) else turn | {"content": joined(content)}


def _size(value: Any) -> int:
    """The characters of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + _size(inner) for key, inner in value.items())
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 0


async def encode_conversation(
    model: ServedModel, conversation: Conversation, *, add_special_tokens: bool = False
) -> list[int]:
    """The prompt of a conversation; raises :class:`ApiError` (400)."""
    try:
        return await _encode(model, conversation, add_special_tokens)
    except RecursionError as error:
        field, tools = conversation.names.messages, conversation.names.tools
        message = f"The calls in `{field}`, `{tools}` or `chat_template_kwargs` are nested too deeply."
        raise invalid(message, field, "invalid_value") from error


async def _encode(model: ServedModel, conversation: Conversation, add_special_tokens: bool) -> list[int]:
    if model.template is None:
        message = f"The model `{model.name}` has no chat template; use /v1/completions."
        raise invalid(message, "model", "no_chat_template")
    template, count, field = model.template, len(conversation.turns), conversation.names.messages
    size = conversation.size
    model.check_length(size, field)

    def encode() -> list[int]:
        parts = _render(model, template, conversation)
        return model.encode_parts(parts, field, add_special_tokens=add_special_tokens)

    return await model.off_loop(size + 40 * count, encode)


def _render(model: ServedModel, template: ChatTemplate, conversation: Conversation) -> list[PromptPart]:
    """The rendered text, cut where clients spelled control tokens."""
    marks, control = Marks(), model.control_tokens
    variables, placeholder = conversation.variables, conversation.placeholder
    turns = [_readable(_with_images(turn, marks.image), template, placeholder) for turn in conversation.turns]
    if not template.knows_calls:
        turns = without_calls(turns)
    if conversation.tools and template.knows_tools:
        variables = variables | {"tools": list(conversation.tools)}
    elif conversation.tools:
        turns = with_tools_told(turns, conversation.tools, own_form=template.knows_calls)
    if not conversation.control_tokens:
        turns = [control.wrap(turn, marks) for turn in turns]
        variables = control.wrap(variables, marks)
    if conversation.continue_final_message:
        turns[-1] = turns[-1] | {"content": _marked(turns[-1]["content"], marks.end)}
    variables = variables | {"add_generation_prompt": conversation.add_generation_prompt}
    try:
        text = _rendered(template, turns, variables)
    except TemplateRefusedError as error:
        message = f"The model's chat template refused the messages: {error}"
        raise invalid(message, conversation.names.messages, "chat_template_error") from error
    if conversation.continue_final_message:
        rest = marks.cut(text)
        if rest is None:
            message = "The chat template drops the final message: it cannot be continued."
            raise invalid(message, conversation.names.continued, "chat_template_error")
        text = rest
    return _with_texts(control.parts(text.replace(marks.image, placeholder), marks), conversation)


def _with_texts(parts: list[PromptPart], conversation: Conversation) -> list[PromptPart]:
    """The parts with the texts of images in place of the placeholders; raises :class:`ApiError` (400)."""
    placeholder, texts = conversation.placeholder, conversation.images
    if not texts:
        return parts
    n_places = sum(part.text.count(placeholder) for part in parts if not part.literal)
    if n_places != len(texts):
        field = conversation.names.messages
        message = f"The prompt of `{field}` has {n_places} places for {len(texts)} images (`{placeholder}`)."
        raise invalid(message, field, "chat_template_error")
    following = iter(texts)

    def shown(text: str) -> str:
        first, *rest = text.split(placeholder)
        return first + "".join(next(following) + behind for behind in rest)

    return [part if part.literal else replace(part, text=shown(part.text)) for part in parts]


def _with_images(turn: dict[str, Any], mark: str) -> dict[str, Any]:
    """A turn whose images have the text `mark`, for templates that take texts only."""
    parts = turn["content"]
    if isinstance(parts, str) or not _has_images(parts):
        return turn
    return turn | {"content": [part | {"text": mark} if part["type"] == "image" else part for part in parts]}


def _has_images(parts: str | Sequence[dict[str, str]]) -> bool:
    return not isinstance(parts, str) and any(part["type"] == "image" for part in parts)


def _readable(turn: dict[str, Any], template: ChatTemplate, placeholder: str) -> dict[str, Any]:
    """A turn for the template: `developer` becomes `system`, and parts become lines, if the template needs it."""
    role, parts = turn["role"], turn["content"]
    if role == "developer" and not template.knows_developers:
        role = "system"
    if _has_images(parts):
        as_list = role in template.roles_with_images(placeholder)
    else:
        as_list = not isinstance(parts, str) and len(parts) > 1 and role in template.roles_with_parts
    return turn | {"role": role, "content": parts if as_list else joined(parts)}


def _marked(content: str | list[dict[str, str]], mark: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content + mark
    *others, last = content
    return [*others, last | {"text": last["text"] + mark}]


def _rendered(template: ChatTemplate, turns: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """Render the text in the first form that the template takes; raises the refusal of the first form."""
    refused: TemplateRefusedError | None = None
    for form in _forms(turns):
        try:
            return template.render(form, **variables)
        except TemplateRefusedError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _forms(turns: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The turns, and forms of them that some templates want: arguments of calls as text, roles in turn."""
    forms = [turns]
    if any(turn.get("tool_calls") for turn in turns):
        forms.append(with_text_arguments(turns))
    yield from forms
    for form in forms:
        if (ordered := with_roles_in_turn(form)) != form:
            yield ordered
