"""Every format's calls are read, in whatever pieces the text comes; what is no call stays content."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from services.gateway.tools.forced import EnforcedHermesParser, RequiredParser
from services.gateway.tools.formats import PARSERS, parser_for

NAMES = frozenset({"get_weather", "now", "add"})
Call = tuple[str, object]
OSLO: Call = ("get_weather", {"city": "Oslo", "tags": ["}", '"</tool_call>"', "[1, {"], "é": {"n": -1.5e3}})
NOW: Call = ("now", {})


def written(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


DEEP = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
ARGS = json.dumps(OSLO[1])
CASES: list[tuple[str, str, str, list[Call]]] = [
    ("hermes", f"<tool_call>\n{written(OSLO)}\n</tool_call>", "", [OSLO]),
    ("hermes", f"Let me see.\n\n<tool_call>{written(NOW)}</tool_call>\n<tool_call>\n{written(OSLO)}</tool_call>\n",
     "Let me see.", [NOW, OSLO]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}', "", [NOW]),
    ("hermes", '<tool_call>{"id": 7, "name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": now, "id": 7}</tool_call>', '<tool_call>{"name": now, "id": 7}</tool_call>', []),
    ("hermes", "a < b, <tool_, and <tool_cal", "a < b, <tool_, and <tool_cal", []),
    ("hermes", "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
    ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', []),
    ("hermes", ' \n{"name": "now", "arguments": {}} ', ' \n{"name": "now", "arguments": {}} ', []),
    ("llama3_json", written(OSLO, "parameters"), "", [OSLO]),
    ("llama3_json", f"<|python_tag|>{written(NOW, 'parameters')}; {written(OSLO, 'parameters')}", "", [NOW, OSLO]),
    ("llama3_json", ' {"name": "Alice", "age": 3} ', ' {"name": "Alice", "age": 3} ', []),
    ("llama3_json", 'It is {"name": "now", "parameters": {}}', 'It is {"name": "now", "parameters": {}}', []),
    ("mistral", f"[TOOL_CALLS][{written(NOW)}, {written(OSLO)}]", "", [NOW, OSLO]),
    ("mistral", f"Well: [TOOL_CALLS]get_weather{ARGS}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{{}}", "Well:", [OSLO, NOW]),
    ("mistral", f"[TOOL_CALLS][{written(NOW)}, 5", "", [NOW]),
    ("mistral", "[TOOL_CALLS] {}", "[TOOL_CALLS] {}", []),
    ("mistral", "[TOOL_CALL of the wild]", "[TOOL_CALL of the wild]", []),
    ("granite", f"<|tool_call|>[{written(OSLO)}, {written(NOW)}]", "", [OSLO, NOW]),
    ("granite", f"<tool_call>[{written(NOW)}]</tool_call>", "", [NOW]),
    ("deepseek", "Yes.<｜tool▁calls▁begin｜>" + DEEP.format(f"function<｜tool▁sep｜>get_weather\n```json\n{ARGS}\n```")
     + "\n" + DEEP.format("function<｜tool▁sep｜>now\n```json\n{}\n```") + "<｜tool▁calls▁end｜>", "Yes.", [OSLO, NOW]),
    ("deepseek", "<｜tool▁calls▁begin｜>" + DEEP.format(f"get_weather<｜tool▁sep｜>{ARGS}")
     + DEEP.format("now<｜tool▁sep｜>{}") + "<｜tool▁calls▁end｜>", "", [OSLO, NOW]),
    ("pythonic", "[get_weather(city='O\\'slo)', tags=[1, {'a': None}], ok=true), now()]", "",
     [("get_weather", {"city": "O'slo)", "tags": [1, {"a": None}], "ok": True}), NOW]),
    ("deepseek", "<｜tool▁call▁begin｜>now{}", "<｜tool▁call▁begin｜>now{}", []),
    ("pythonic", "[now(5)]", "[now(5)]", []),
    ("pythonic", "[now(a=)]", "[now(a=)]", []),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
    ("pythonic", "[exec(code='1')]", "[exec(code='1')]", []),
    ("generic", written(OSLO), "", [OSLO]),
    ("generic", f"[{written(NOW)}, {written(OSLO)}]", "", [NOW, OSLO]),
    ("generic", f"Sure.\n<tool_call>{written(OSLO)}</tool_call>", "Sure.", [OSLO]),
    ("generic", '{"name": "Bob"} {"x": 1}', '{"name": "Bob"} {"x": 1}', []),
    ("generic", "[TODO] no call", "[TODO] no call", []),
]  # fmt: skip


def read(kind: str, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]], int]:
    """Content, calls, and in how many pieces the arguments came."""
    parser, content, calls, n_pieces = PARSERS[kind](NAMES), "", [], 0
    for found in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        content += found.content
        for delta in found.calls:
            if delta.name is not None:
                assert delta.index == len(calls)
                calls.append((delta.name, ""))
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
            n_pieces += bool(delta.arguments)
    return content, calls, n_pieces


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_calls_are_the_same_however_the_text_is_cut(kind: str, text: str, content: str, calls: list[Call]) -> None:
    whole = read(kind, [text])
    assert (whole[0], [(name, json.loads(arguments)) for name, arguments in whole[1]]) == (content, calls)
    for at in range(len(text) + 1):
        assert read(kind, [text[:at], text[at:]])[:2] == whole[:2], (text[:at], text[at:])
    assert read(kind, text)[:2] == whole[:2]


@pytest.mark.parametrize("kind", ["hermes", "llama3_json", "mistral", "granite", "deepseek", "generic"])
def test_arguments_are_streamed(kind: str) -> None:
    text = next(text for each, text, _, calls in CASES if each == kind and calls)
    assert read(kind, text)[2] > 20


@pytest.mark.parametrize(("kind", "text", "content", "calls"), [case for case in CASES if case[3]])
def test_a_text_that_is_cut_off_has_no_call_that_was_not_written(
    kind: str, text: str, content: str, calls: list[Call]
) -> None:
    for at in range(len(text)):
        _, found, _ = read(kind, [text[:at]])
        assert [name for name, _ in found] == [name for name, _ in calls][: len(found)]
        for _, arguments in found[:-1]:
            json.loads(arguments)


def test_an_enforced_call_cut_off_before_its_name_is_no_content() -> None:
    call = written(NOW)
    for parser, text in ((RequiredParser, f"[{call}"), (EnforcedHermesParser, f"<tool_call>\n{call}")):
        begun = text.index('"now"') + len('"now"')
        for at in range(1, len(text)):
            reader = parser(NAMES)
            found = [reader.push(piece) for piece in text[:at]] + [reader.finish()]
            content = "".join(one.content for one in found)
            mark = "<tool_call>"
            assert content == (text[:at] if parser is EnforcedHermesParser and at < len(mark) else "")
            assert any(one.calls for one in found) == (at > begun)


def test_the_chat_template_selects_the_tool_format() -> None:
    signs = {"... [TOOL_CALLS] ...": "mistral", "<|tool_call|>": "granite", "<tool_call>": "hermes", "": "generic"}
    for template, name in signs.items():
        assert parser_for(template, "auto") is PARSERS[name]
    assert parser_for("<tool_call>", "pythonic") is PARSERS["pythonic"]
