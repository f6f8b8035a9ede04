"""Refusals of a training: of its base, and of lines that the model's chat template cannot render."""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from services.cli.stack.default_model import TINY_MODEL
from services.finetuner.training.base import base_folder
from services.finetuner.training.examples import Tokenizer
from services.finetuner.training.messages import REFUSED, RefusedError
from services.finetuner.training.process import main
from tests.unit.finetuner.test_training import ORDER
from tests.unit.tools.converter.test_convert import MODELS, run, weights, write_folder

ASKS, SAYS = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"}
# Qwen's way: what the assistant thought is in its last turn only.
THINKS = (
    "{% if tools %}tools{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.thought and loop.last %}({{ m.thought }}){% endif %}"
    "{{ m.content }}{% for call in m.tool_calls %}[{{ call.function.arguments.place }}]{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(template: str | None = THINKS) -> Tokenizer:
    made = AutoTokenizer.from_pretrained(TINY_MODEL)
    made.chat_template = template
    return Tokenizer(made, 512)


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("\n\n".join(map(json.dumps, lines)))
    return path


def trained(*messages: dict[str, Any], **line: Any) -> list[str]:
    """The trained text of each example of a conversation."""
    plain = AutoTokenizer.from_pretrained(TINY_MODEL)
    examples = tokenizer().examples({"messages": messages, **line})
    return [plain.decode([example.tokens[at] for at in example.targets]) for example in examples]


def test_a_turn_with_a_changed_later_rendering_is_a_separate_example() -> None:
    thought = {**SAYS, "thought": "hm"}
    assert trained(ASKS, thought, ASKS, thought) == ["(hm)say", "(hm)say"]
    assert trained(ASKS, SAYS, ASKS, SAYS) == ["saysay"]


def test_parts_are_joined_and_arguments_of_calls_are_objects() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert trained({"role": "user", "content": parts}, {"role": "assistant", "content": parts}) == ["one\ntwo"]
    for arguments in ('{"place": "Rome"}', {"place": "Rome"}):
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        calls = {"role": "assistant", "content": None, "tool_calls": [call]}
        assert trained(ASKS, calls, tools=[{"type": "function"}]) == ["[Rome]"]


@pytest.mark.parametrize(
    ("template", "message", "expected"),
    [
        (None, SAYS, "The model has no chat template"),
        (THINKS, {**SAYS, "weight": 0}, "The lines file has no token of an assistant to train on"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}",
            SAYS,
            "lines file: line 1: the chat template renders no generation prompt before message 2",
        ),
        ("{{ messages[1].content.no.thing }}", SAYS, "lines file: line 1: .*has no attribute"),
    ],
    ids=["none", "nothing to train", "no prompt", "an error"],
)
def test_unsupported_templates_are_reported(
    template: str | None, message: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "lines.jsonl", {"messages": [ASKS, message]})
    with pytest.raises(RefusedError, match=expected):
        tokenizer(template).read(path)


def test_at_most_twenty_lines_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "lines.jsonl", *[{"messages": [ASKS, {"role": "assistant"}], "tools": 1}] * 22)
    with pytest.raises(RefusedError, match=r"line 1: .*; line 39: .*; and 2 more$"):
        tokenizer("{{ messages[0].content }}").read(path)


@pytest.mark.parametrize(("content", "expected"), [("", "there is no"), ("x", "was not converted: .* cut off")])
def test_a_base_that_cannot_be_read_refuses_the_job_in_a_word(
    content: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, as everywhere; forked, since imports take seconds."""
    folder, words = tmp_path / "jobs" / "ftjob-1", tmp_path / "words" / "uid.jsonl"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(ORDER.model_dump_json())
    if content:
        (tmp_path / "base.gguf").write_text(content)
    arguments = (folder, tmp_path / "base.gguf", 300, 2048, 1, 0, words)
    monkeypatch.setattr(sys, "argv", ["training", *map(str, arguments)])
    process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(main()))
    process.start()
    process.join()
    assert process.exitcode == REFUSED
    assert words.read_text().startswith("\n"), "the training before may have been killed within a line"
    [word] = map(json.loads, words.read_text().splitlines()[1:])
    assert (word["kind"], word["code"], word["param"]) == ("refused", "base_unavailable", "model")
    assert re.search(expected, word["message"])
    assert [path.name for path in tmp_path.glob("bases/*")] == [], "what was begun is removed"


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, stored, original = tmp_path / "tiny.gguf", tmp_path / "bases", write_folder(tmp_path, MODELS["llama"]())
    run(original, source)
    made = base_folder(str(source), stored, "ftjob-1")
    wanted, actual = weights(original), weights(made)
    assert all(torch.equal(actual[name], weight) for name, weight in wanted.items())
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert base_folder(str(source), stored, "ftjob-2") == made
    assert base_folder(str(made), stored, "ftjob-3") == made, "a folder of safetensors is taken as it is"
    assert [path.name for path in stored.iterdir()] == [made.name]
