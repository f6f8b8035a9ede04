"""Turns conversations into tokens, and says which of them are trained: those of the assistant's turns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from transformers import PreTrainedTokenizerBase

from services.common.templates import compile_template
from services.finetuner.training.messages import RefusedError

_MOST_NAMED = 20
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    """Tokens, and half-open ranges of those that are trained."""

    tokens: tuple[int, ...]
    trained: tuple[tuple[int, int], ...]

    @property
    def targets(self) -> list[int]:
        """Positions of the trained tokens; position 0 follows nothing and is never trained."""
        return [position for begin, end in self.trained for position in range(max(begin, 1), end)]


class Tokenizer:
    """Renders conversations as the serving gateway does, and tokenizes them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        if not isinstance(tokenizer.chat_template, str):
            raise RefusedError("The model has no chat template, so conversations cannot be trained on.")
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._template: Template = compile_template(tokenizer.chat_template)
        self._special = {name: str(getattr(tokenizer, name) or "") for name in _SPECIAL}
        self._knows_tools = "tools" in tokenizer.chat_template

    def read(self, path: Path) -> list[TokenizedExample]:
        """All examples of a file; raises :class:`RefusedError`, which names the first lines that are wrong."""
        examples: list[TokenizedExample] = []
        wrong: list[str] = []
        for number, line in enumerate(path.read_text("utf-8-sig").split("\n"), 1):
            if line.strip():
                try:
                    examples += self.examples(json.loads(line))
                except (RefusedError, TemplateError, TypeError, KeyError) as error:
                    wrong.append(f"line {number}: {error}")
        if wrong:
            more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
            raise RefusedError(f"{path.stem} file: {'; '.join(wrong[:_MOST_NAMED])}{more}")
        if not any(example.targets for example in examples):
            raise RefusedError(f"The {path.stem} file has no token of an assistant to train on.")
        return [example for example in examples if example.targets]

    def examples(self, line: Mapping[str, Any]) -> Iterable[TokenizedExample]:
        """The examples of a conversation: one, or more where the template renders early turns in another way later."""
        messages, tools = [_plain(message) for message in line["messages"]], line.get("tools") or None
        if tools and not self._knows_tools:
            raise RefusedError("the model's chat template renders no tools")
        whole, ranges = self._render(messages, tools), list[tuple[int, int]]()
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight", 1) == 0:
                continue
            before = self._render(messages[:index], tools, add_generation_prompt=True)
            after = self._render(messages[: index + 1], tools)
            if not after.startswith(before):
                raise RefusedError(f"the chat template renders no generation prompt before message {index + 1}")
            turn = (len(before), len(after.rstrip()))
            if whole.startswith(after):
                ranges.append(turn)
            else:
                yield self._tokenize(after, [turn])
        yield self._tokenize(whole, ranges)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, *, add_generation_prompt: bool = False) -> str:
        variables = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt, **self._special}
        return self._template.render(**variables, messages=messages)

    def _tokenize(self, text: str, turns: Sequence[tuple[int, int]]) -> TokenizedExample:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, offsets = encoded["input_ids"], encoded["offset_mapping"]
        if len(tokens) > self._max_tokens:
            raise RefusedError(f"{len(tokens)} tokens; at most {self._max_tokens} are allowed")
        ranges: list[tuple[int, int]] = []
        for begin, end in turns:
            inside = [at for at, (first, last) in enumerate(offsets) if last > first and begin <= first < end]
            if inside:
                ranges.append((inside[0], inside[-1] + 1))
        return TokenizedExample(tuple(tokens), tuple(ranges))


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: text as one string, arguments of calls as objects."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    plain = {**message, "content": content or ""}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [call | {"function": _as_object(call["function"])} for call in calls]
    return plain


def _as_object(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}
