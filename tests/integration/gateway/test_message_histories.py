"""Parts of a history of Anthropic's Messages API: read as text, or left out and named."""

from __future__ import annotations

from typing import Any

from services.gateway.api.ignored import IGNORED_HEADER
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import GatewayStack
from tests.integration.gateway.test_messages import ASK, HELLO, IMAGE, MESSAGES, PDF, served
from tests.unit.gateway.made_tokenizers import byte_level

TEXT = [{"type": "text", "text": "s"}]
PAGE = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "page"}}
NO_IMAGE = "[The image that stood here was left out: this model reads text only.]"
NO_DOCUMENT = "[The document that stood here was left out: it cannot be read.]"
SEARCHED = {"type": "server_tool_use", "id": "srv1", "name": "web_search", "input": {"query": "q"}}
FOUND = {
    "type": "web_search_tool_result", "tool_use_id": "srv1", "caller": {"type": "direct"},
    "content": [{"type": "web_search_result", "title": "Lists", "url": "https://a.example", "encrypted_content": "e"}],
}  # fmt: skip


def served_result(kind: str, content: Any, call: str = "server_tool_use") -> list[dict[str, Any]]:
    """A call that a provider's server has run, and its result."""
    used = {"type": call, "id": "s", "name": "f", "input": {}}
    return [used, {"type": kind, "tool_use_id": "s", "content": content}]


# Blocks of an assistant, the words of the prompt, and what is left out.
ANSWERED: list[tuple[Any, str, str]] = [
    ([SEARCHED, FOUND, {"type": "text", "text": "So."}], 'web_search{"query": "q"}|Lists\nhttps://a.example|So.', ""),
    ([SEARCHED, {"type": "text", "text": "So."}], "So.", "server_tool_use"),
    ([FOUND], "", "web_search_tool_result"),
    ([FOUND | {"tool_use_id": ["srv1"]}], "", "web_search_tool_result"),
    (served_result("web_search_tool_result", {"type": "web_search_tool_result_error", "error_code": "max_uses"}),
     "f{}|max_uses", ""),
    (served_result("mcp_tool_result", [{"type": "text", "text": "42"}, IMAGE], "mcp_tool_use"),
     f"f{{}}|42\n{NO_IMAGE}", ""),
    (served_result("bash_code_execution_tool_result",
                   {"type": "bash_code_execution_result", "stdout": "out", "stderr": "err", "return_code": 0,
                    "content": []}), "f{}|out\nerr", ""),
    (served_result("web_fetch_tool_result", {"type": "web_fetch_result", "url": "u", "content":
                   {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "page"}}}),
     "f{}|u\npage", ""),
    (served_result("tool_search_tool_result", {"type": "tool_search_tool_search_result", "tool_references":
                   [{"type": "tool_reference", "tool_name": "t"}]}), "f{}|t", ""),
    ([{"type": "compaction", "content": "Earlier: words.", "encrypted_content": "e"}], "Earlier: words.", ""),
    ([{"type": "container_upload", "file_id": "f"}], NO_DOCUMENT.replace("document", "file"), "container_upload"),
    ([{"type": "fallback", "from": {"model": "a"}}, {"type": "text", "text": "ho"}], "ho", "fallback"),
    ([{"type": "of_next_year", "text": "x"}, {"type": "text", "text": "ho"}], "ho", "of_next_year"),
    ([{"type": "text", "text": "ho", "citations": [], "parsed": 1}], "ho", ".parsed"),
    ([{"type": "text", "text": None}, {"text": "ho"}], "\nho", ""),
    ([{"type": "thinking", "thinking": None, "signature": 1}, {"type": "text", "text": "ho"}], "ho", ""),
    ([{"type": "thinking"}, {"type": "redacted_thinking"}, {"type": "text", "text": "ho"}], "ho", ""),
    (None, "", ""),
    (5, "", "number"),
    ({"a": 1}, "", "object"),
    ({"type": "text", "text": "ho"}, "ho", ""),
    ([{"type": "text"}, "ho"], "ho", "text"),
    ([{"type": "tool_use", "name": "f"}, "ho"], "ho", "tool_use"),
    ([None, "ho"], "ho", "null"),
]  # fmt: skip
# Contents of a tool's result.
RESULTS: list[tuple[Any, str, str]] = [
    ([{"type": "tool_reference", "tool_name": "mcp__a__b"}], "mcp__a__b", ""),
    ([{"type": "text", "text": "see"}, IMAGE], f"see\n{NO_IMAGE}", "image"),
    ([PDF], NO_DOCUMENT, "document"),
    ([{"type": "search_result", "title": "T", "source": "u", "content": TEXT}], "T\nu\ns", ""),
    ([{"type": "document", "source": {"type": "content", "content": TEXT}}], "s", ""),
    ([{"type": "of_next_year"}], "", "of_next_year"),
    (42, "42", ""),
    ({"rows": []}, '{"rows":[]}', ""),
]  # fmt: skip
SHOWS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ m.content }}|{% endfor %}"
)


async def test_blocks_of_a_history_are_read_or_left_out_with_their_names() -> None:
    call = {"type": "tool_use", "id": "c", "name": "g", "input": None}
    async with served(Worker("w0", template=SHOWS)) as (stack, _client):
        for content, prompt, left_out in ANSWERED:
            turns = [HELLO, {"role": "assistant", "content": content}, HELLO]
            await asks(stack, turns, f"hi|{prompt}|hi|", "messages[].content[]", left_out)
        for content, prompt, left_out in RESULTS:
            result = {"type": "tool_result", "tool_use_id": "c", "content": content}
            turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
            await asks(stack, turns, f"g{{}}|{prompt}|", "messages[].content[].content[]", left_out)
            await asks(stack, [*turns, HELLO], f"g{{}}|{prompt}|hi|", "messages[].content[].content[]", left_out)
        for given, arguments in (([], "{}"), ("", "{}"), ('{"a": 1}', '{"a": 1}'), ("{a", '"{a"'), ([1], '"[1]"')):
            used = {"type": "tool_use", "id": "c", "name": "g", "input": given}
            result = {"type": "tool_result", "tool_use_id": "c"}
            turns = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
            await asks(stack, turns, f"g{arguments}||", "", "")
        turns = [HELLO, {"role": 5, "content": "x"}, HELLO]
        await asks(stack, turns, "hi\nhi|", "messages[]", ".role, messages[]")
        turns = [HELLO, {"role": "tool", "content": "x"}, HELLO]
        await asks(stack, turns, "hi\nhi|", "messages[]", ".role=tool")
        mixed = [{"type": "tool_result", "tool_use_id": "c", "content": "read"}, PDF]
        turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": mixed}]
        await asks(stack, turns, f"g{{}}|read|{NO_DOCUMENT}|", "messages[].content[]", "document")
        turns = [{"role": "user", "content": [IMAGE]}, {"role": "assistant", "content": "no"}, HELLO]
        await asks(stack, turns, f"{NO_IMAGE}|no|hi|", "messages[].content[]", "image")
        await asks(stack, [{"role": "user", "content": [PAGE]}], "T\npage|", "", "")
        turns = [{"role": "developer", "content": "d"}, HELLO, {"role": "system", "content": TEXT}]
        await asks(stack, turns, "d|hi|s|", "", "")
        turns = [HELLO, {"role": "assistant", "content": [SEARCHED, FOUND]}]  # its server has paused
        await asks(stack, turns, 'hi|web_search{"query": "q"}|Lists\nhttps://a.example|', "", "")


async def asks(stack: GatewayStack, turns: list[dict[str, Any]], prompt: str, where: str, left_out: str) -> None:
    """Send a history, and compare the prompt and the header."""
    answer = await stack.http.post(MESSAGES, json=ASK | {"messages": turns, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    read = byte_level().decode(list(stack.workers[0].submits[-1].prompt_ids), skip_special_tokens=False)
    assert read == prompt
    kind = left_out if left_out.startswith(".") else f".type={left_out}"
    assert answer.headers.get(IGNORED_HEADER, "") == (where + kind if left_out else "")


# As templates of models that want a system message at the beginning, and turns in turn.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and loop.index0 %}{{ raise_exception('Late.') }}{% endif %}"
    "{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}{{ raise_exception('In turn.') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
)


async def test_history_is_merged_into_alternating_roles_when_the_template_requires_alternation() -> None:
    turns = [HELLO, {"role": "system", "content": "s"}, {"role": "assistant", "content": "ho"}, HELLO]
    developer = {"role": "developer", "content": "d"}
    async with served(Worker("w0", template=STRICT)) as (stack, _client):
        await asks(stack, turns, "u:hi\n\ns|a:ho|u:hi|", "", "")
        await asks(stack, [developer, turns[1], *turns], "s:d\n\ns|u:hi\n\ns|a:ho|u:hi|", "", "")
        await asks(stack, [*turns[:2], HELLO], "u:hi\n\ns\n\nhi|", "", "")
        answer = await stack.http.post("/v1/chat/completions", json={"messages": [HELLO, HELLO], "max_tokens": 1})
        assert answer.status_code == 200, answer.text
