"""Items of a conversation become turns of a chat, also those that no model here has written."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from services.gateway.api.chat import Turn
from services.gateway.api.ignored import Ignored
from services.gateway.errors import ApiError
from services.gateway.http.responses.history import turns_of
from services.gateway.http.responses.reading import check_new_parts, read_items
from services.gateway.http.responses.schema import COMMANDS, ITEMS, ReferenceItem
from services.gateway.images.reader import without_images

Raw = dict[str, Any]
ASKED: Raw = {"role": "user", "content": "Go on."}
IMAGE: Raw = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
OUTPUT: Raw = {"type": "function_call_output", "call_id": "f"}
NOTE = "[The image that stood here was left out: this model reads text only.]"
NO_FILE = "[The file that stood here was left out: it cannot be read.]"


def read(*items: Raw) -> tuple[list[Turn], str]:
    """The turns of items for a model that reads text only, and the names of what is left out."""
    ignored = Ignored()
    actual = [item for item in read_items(items, ignored) if not isinstance(item, ReferenceItem)]
    turns = without_images(turns_of(actual, ignored), ignored)
    return turns, ignored.header


def types_of(kind: Any) -> set[str]:
    """The types of items that OpenAI's client can send."""
    members = get_args(kind)
    hints = [get_type_hints(member).get("type") for member in members]
    return {value for hint in hints for value in _words(hint)}


def _words(hint: Any) -> list[str]:
    return [hint] if isinstance(hint, str) else [word for inner in get_args(hint) for word in _words(inner)]


def test_every_item_of_the_official_client_is_read_except_commands() -> None:
    kinds = types_of(ResponseInputItemParam)
    assert {"web_search_call", "additional_tools", "compaction", *COMMANDS} < kinds
    for kind in kinds - set(ITEMS):
        item = {"type": kind, "id": "x", "tools": []}
        if kind in COMMANDS:
            with pytest.raises(ApiError):
                read(item, ASKED)
            continue
        turns, ignored = read(item, ASKED)
        assert [turn.role for turn in turns] == ["user"]
        assert ignored in (f"input[].type={kind}", "")


LEFT_OUT: list[Raw] = [
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "a"}},
    {"type": "image_generation_call", "id": "i", "status": "completed", "result": "AAAA"},
    {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": [{"name": "f", "input_schema": {}}]},
    {"type": "mcp_approval_request", "id": "m", "server_label": "s", "name": "f", "arguments": "{}"},
    {"type": "mcp_approval_response", "approval_request_id": "m", "approve": True},
    {"type": "compaction", "encrypted_content": "x"},
    {"type": "computer_call", "call_id": "c", "action": {"type": "screenshot"}},
    {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot", "image_url": "x"}},
    {"type": "local_shell_call", "call_id": "l", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "id": "other", "output": "a.txt"},
    {"type": "shell_call_output", "call_id": [], "output": {}},
    {"type": "file_search_call", "id": "f", "queries": ["a"], "results": None},
    {"type": "ghost_snapshot", "ghost_commit": {"id": "0"}},
    {"type": "of_next_year"},
    {"type": "function_call", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "", "output": "a"},
    {"type": "message", "role": 5, "content": "a"},
    {"type": "message", "role": [], "content": "a"},
    {"type": "message", "content": "a"},
    {"type": "message", "role": "user"},
    {"type": "reasoning", "summary": "a"},
]


@pytest.mark.parametrize("item", LEFT_OUT, ids=lambda item: item["type"])
def test_an_item_without_a_meaning_here_is_left_out_and_named(item: Raw) -> None:
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "content": [], "id": "r"}
    turns, ignored = read(ASKED, reasoning, item, {"role": "assistant", "content": "Yes."}, ASKED)
    turn = Turn("user", ["Go on."])
    assert turns == [turn, Turn("assistant", ["Yes."], reasoning_content="Hm."), turn]
    assert ignored == f"input[].type={item['type']}"
    assert read(ASKED, item, ASKED) == ([turn, turn], ignored)  # directly before the newest message


SERVED: list[tuple[list[Raw], str, str, str]] = [
    ([{"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
      {"type": "local_shell_call_output", "call_id": "c", "output": "a.txt"}],
     "local_shell", '{"type":"exec","command":["ls"]}', "a.txt"),
    ([{"type": "local_shell_call", "id": "c", "action": {"command": ["ls"]}},
      {"type": "local_shell_call_output", "id": "c", "output": "a.txt"}],
     "local_shell", '{"command":["ls"]}', "a.txt"),
    ([{"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
      {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "outcome": {"exit_code": 1}}]}],
     "shell", '{"commands":["ls"]}', '{"stdout":"a","outcome":{"exit_code":1}}'),
    ([{"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
      {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"}],
     "apply_patch", '{"type":"delete_file","path":"a"}', "completed"),
    ([{"type": "tool_search_call", "call_id": "c", "arguments": {"query": "a"}},
      {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "function", "name": "f"}]}],
     "tool_search", '{"query":"a"}', "f"),
    ([{"type": "program", "call_id": "c", "code": "1"}, {"type": "program_output", "call_id": "c", "result": "2"}],
     "program", '{"code":"1"}', "2"),
    ([{"type": "mcp_call", "id": "c", "server_label": "s", "name": "f", "arguments": "{}", "output": "a"}],
     "s__f", "{}", "a"),
    ([{"type": "mcp_call", "id": "c", "server_label": "s", "name": "f", "arguments": "", "error": {"code": 1}}],
     "s__f", "{}", '{"code":1}'),
    ([{"type": "code_interpreter_call", "id": "c", "code": "1", "outputs": [{"type": "logs", "logs": "1"}]}],
     "code_interpreter", '{"code":"1"}', '{"type":"logs","logs":"1"}'),
    ([{"type": "file_search_call", "id": "c", "queries": ["a"], "results": [{"filename": "b", "text": "B"}]}],
     "file_search", '{"queries":["a"]}', '{"filename":"b","text":"B"}'),
]  # fmt: skip


@pytest.mark.parametrize(("items", "name", "arguments", "result"), SERVED, ids=lambda value: str(value)[:24])
def test_a_hosted_call_with_its_result_is_a_call_and_a_result(
    items: list[Raw], name: str, arguments: str, result: str
) -> None:
    turns, ignored = read(ASKED, *items, ASKED)
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "user"]
    (call,) = turns[1].calls
    assert (call.name, call.arguments, call.id) == (name, arguments, "c")
    assert (turns[2].parts, turns[2].tool_call_id, turns[2].name) == ([result], "c", name)
    assert ignored == ""


def test_an_image_in_an_output_or_a_history_has_a_note_in_its_place() -> None:
    called = {"type": "function_call", "call_id": "f", "name": "look", "arguments": "{}"}
    custom = {"type": "custom_tool_call", "call_id": "g", "name": "snap", "input": ""}
    text = {"type": "text", "text": "A picture."}
    turns, ignored = read(
        {"role": "user", "content": [IMAGE, text]},
        called,
        {"type": "function_call_output", "call_id": "f", "output": [text, IMAGE]},
        custom,
        {"type": "custom_tool_call_output", "call_id": "g", "output": [{"type": "input_file", "file_id": "x"}]},
        {"type": "code_interpreter_call", "id": "i", "code": "", "outputs": [{"type": "image", "url": "data:AAAA"}]},
    )
    assert [turn.parts for turn in turns if turn.role != "assistant"] == [
        [NOTE, "A picture."], ["A picture.", NOTE], [NO_FILE], [NOTE]
    ]  # fmt: skip
    lists = ("content[].type=input_image", "output[].type=input_image", "output[].type=input_file")
    assert set(ignored.split(", ")) == {f"input[].{name}" for name in (*lists, "outputs[].type=image")}


@pytest.mark.parametrize(
    ("content", "texts", "result", "kinds"),
    [
        (5, [""], ["5"], ["number"]),
        (True, [""], ["true"], ["boolean"]),
        ({"a": [1]}, [""], ['{"a":[1]}'], ["object"]),
        ([["a"], None], ["", ""], ['["a"]', ""], ["array", "null"]),
        ({"type": "input_text", "text": "a"}, ["a"], ["a"], []),
        (["a"], ["a"], ["a"], []),
        (["a", {"type": "output_text", "text": {"value": "b"}}], ["a", ""], ["a", ""], ["output_text"]),
        ([{"type": "input_text"}, {"text": "b"}], ["", "b"], ["", "b"], ["input_text"]),
    ],
)
def test_malformed_content_of_a_history_is_left_out_and_a_bare_result_is_json(
    content: Any, texts: list[str], result: list[str], kinds: list[str]
) -> None:
    called = {"type": "function_call", "call_id": "f", "name": "look", "arguments": "{}"}
    for role in ("user", "assistant"):
        turns, ignored = read({"role": role, "content": content}, ASKED, called, {**OUTPUT, "output": content}, ASKED)
        assert (turns[0].parts, turns[-2].parts) == (texts, result)
        noted = {f"input[].content[].type={kind}" for kind in kinds}
        assert noted <= set(ignored.split(", ")) if noted else ignored == ""
    items = read_items([{"role": "user", "content": content}], Ignored())
    if kinds or content == ["a"]:
        with pytest.raises(ApiError) as refused:
            check_new_parts(items)
        assert str(refused.value.param).startswith("input[0].content")


def test_null_in_a_history_is_an_empty_text() -> None:
    called = {"type": "function_call", "call_id": "f", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "f", "output": None}
    turns, ignored = read(ASKED, {"role": "assistant", "content": None}, called, output, ASKED)
    assert [(turn.role, turn.parts) for turn in turns[1:3]] == [("assistant", [""]), ("tool", [""])]
    assert ignored == ""


@pytest.mark.parametrize(
    ("called", "arguments"),
    [
        ({"type": "function_call"}, "{}"),
        ({"type": "function_call", "arguments": None}, "{}"),
        ({"type": "function_call", "arguments": []}, "{}"),
        ({"type": "function_call", "arguments": {"a": 1}}, '{"a":1}'),
        ({"type": "custom_tool_call"}, '{"input":""}'),
        ({"type": "custom_tool_call", "input": {"a": 1}}, '{"input":"{\\"a\\":1}"}'),
    ],
)
def test_calls_and_results_are_read_in_each_clients_form(called: Raw, arguments: str) -> None:
    output = {"type": f"{called['type']}_output", "call_id": "f"}
    answer = {"role": "assistant", "content": [{"type": "output_text", "text": None}, {"text": "So."}]}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": None}]}
    turns, ignored = read(ASKED, called | {"call_id": "f", "name": "look"}, output, thought, answer, ASKED)
    assert turns[1].calls[0].arguments == arguments
    assert [turn.parts for turn in turns[2:4]] == [[""], ["", "So."]]
    assert ignored == ""


def test_an_output_without_its_call_is_left_out_of_a_history_and_refused_as_new() -> None:
    for kind in ("function_call", "custom_tool_call"):
        output = {"type": f"{kind}_output", "call_id": "f", "output": "a"}
        turns, ignored = read(ASKED, output, ASKED)
        assert [turn.role for turn in turns] == ["user", "user"]
        assert ignored == f"input[].type={kind}_output"
        with pytest.raises(ApiError, match="a call `f` that is not in the conversation"):
            read(ASKED, output, output)


def test_a_message_of_another_role_is_left_out_of_a_history_and_refused_as_the_last() -> None:
    for role in ("critic", "tool", "model"):
        turns, ignored = read(ASKED, {"role": role, "content": [IMAGE]}, ASKED)
        assert [turn.role for turn in turns] == ["user", "user"]
        assert ignored == f"input[].role={role}"
        items = read_items([ASKED, {"role": role, "content": "a"}], Ignored())
        with pytest.raises(ApiError, match="is none of `assistant`"):
            check_new_parts(items)


def test_too_deep_nesting_is_rejected() -> None:
    deep: Any = {}
    for _ in range(20_000):
        deep = {"a": deep}
    with pytest.raises(ApiError, match="nested too deeply"):
        read({"type": "mcp_call", "id": "m", "name": "f", "arguments": deep, "output": "a"})
