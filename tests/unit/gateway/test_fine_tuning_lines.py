"""Faults of a training file, by line."""

from __future__ import annotations

import json
from typing import Any

from services.gateway.fine_tuning.lines import FileInspector

USER = {"role": "user", "content": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def _line(*turns: dict[str, Any], **more: Any) -> str:
    return json.dumps({"messages": turns, **more})


def _verdict(lines: list[str], least: int = 1) -> str:
    inspector = FileInspector(least)
    for number, line in enumerate(lines, 1):
        inspector.look(number, line.encode())
    return inspector.verdict()


def test_good_lines_pass() -> None:
    answer = {"role": "assistant", "content": "b"}
    good = [
        _line(USER, answer),
        _line(
            {"role": "system", "content": [{"type": "text", "text": "s"}]}, USER, answer | {"weight": 0}, USER, answer
        ),
        _line(
            USER,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
            answer,
            tools=[{"type": "function", "function": {"name": "f"}}],
        ),
    ]
    assert _verdict(good) == ""
    assert "it has 3 examples, and 10 is the least" in _verdict(good, 10)


def test_each_bad_line_is_named_with_its_reason_and_only_the_first_twenty() -> None:
    bad = {
        "{": "not valid JSON",
        '{"prompt": "a"}': "prompt",
        _line(): "messages",
        _line(USER): "the last message must be the assistant's",
        _line({"role": "robot", "content": "x"}): "`user`",
        _line(USER, {"role": "assistant"}): "`messages[1].content`",
        _line(USER, {"role": "assistant", "content": "b", "weight": 2}): "weight",
        _line(USER, {"role": "assistant", "content": "b", "weight": 0}): "a weight other than 0",
        _line(USER | {"weight": 1}, {"role": "assistant", "content": "b"}): "`messages[0].weight`",
        _line(USER, {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "1"}}]}): (
            "`messages[1].tool_calls[0].function.arguments`"
        ),
        _line(USER, {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "{"}}]}): (
            "`messages[1].tool_calls[0].function.arguments` must be a JSON object as text"
        ),
        _line(USER | {"tool_calls": [CALL]}, {"role": "assistant", "content": "b"}): "`messages[0].tool_calls`",
        _line({"role": "user"}, {"role": "assistant", "content": "b"}): "`messages[0].content` is missing",
    }
    expected = _verdict(list(bad)).split("; ")
    assert [part.partition(":")[0] for part in expected] == [f"line {number}" for number in range(1, len(bad) + 1)]
    for part, reason in zip(expected, bad.values(), strict=True):
        assert reason in part
    many = _verdict(["{"] * 25)
    assert "line 20: " in many
    assert "line 21: " not in many
    assert many.endswith("and 5 more lines")
