"""Requests of coding agents: every field and every nesting that they send, with words of our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"path": {"type": "string", "description": "Which file"}},
    "required": ["path"],
    "additionalProperties": False,
}
ARGUMENTS = '{"path": "a.txt"}'
CACHED = {"cache_control": {"type": "ephemeral"}}


@dataclass(frozen=True)
class Shape:
    """A first request, and what the next one has at its end once the model has called `read`."""

    path: str
    body: dict[str, Any]
    conversation: str  # the field that grows
    result: list[dict[str, Any]]


def _said(role: str, *texts: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": "msg_0a1b2c3d", "role": role, "content": content}


def _function(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Does it", **parameters}}


CODEX = Shape(
    "/v1/responses",
    {
        "stream": True,
        "input": [
            _said("developer", "Be a coding agent."), _said("developer", "Skills: none.", "Permissions: few."),
            _said("user", "The folder is /src."), _said("user", "Read a.txt."),
        ],
        "tools": [
            {"type": "function", "name": "read", "description": "Reads", "strict": False, "parameters": SCHEMA},
            {"type": "namespace", "name": "agents_v1", "description": "Helpers", "tools": [
                {"type": "function", "name": "close", "description": "Ends", "strict": False, "parameters": SCHEMA},
            ]},
            {"type": "custom", "name": "patch", "description": "Patches",
             "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0a1b2c3d",
        "client_metadata": {"session_id": "0a1b2c3d", "turn": "{}"},
    },
    "input",
    [
        {"type": "function_call", "id": "fc_1", "name": "read", "arguments": ARGUMENTS, "call_id": "c1"},
        {"type": "function_call", "name": "close", "namespace": "agents_v1", "arguments": "{}", "call_id": "c2"},
        {"type": "custom_tool_call", "name": "patch", "input": "+ a", "call_id": "c3", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "words"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ended"}]},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "patched"},
    ],
)  # fmt: skip

CLAUDE_CODE = Shape(
    "/v1/messages?beta=true",
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Reminder."}, {"type": "text", "text": "Read."}]},
            {"role": "system", "content": [{"type": "text", "text": "The folder is /src.", **CACHED}]},
        ],
        "system": [{"type": "text", "text": "billing: none"}, {"type": "text", "text": "Be an agent.", **CACHED}],
        "tools": [
            {"name": "read", "description": "Reads", "input_schema": SCHEMA},
            {"name": "placeholder", "description": "", "input_schema": {"type": "object", "properties": {}},
             "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": '{"device_id": "0a1b"}'},
        "max_tokens": 100,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    },
    "messages",
    [
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c1", "name": "read", "input": {"path": "a.txt"}, "caller": {"type": "direct"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "words", "is_error": False, **CACHED},
        ]},
    ],
)  # fmt: skip

_ANSWERED = [
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "read", "arguments": ARGUMENTS}},
    ]},
    {"role": "tool", "tool_call_id": "c1", "content": "words"},
]  # fmt: skip

QWEN_CODE = Shape(
    "/v1/chat/completions",
    {
        "messages": [
            {"role": "system", "content": "Be an agent."},
            {"role": "user", "content": [{"type": "text", "text": "Reminder."}, {"type": "text", "text": "Read."}]},
        ],
        "max_tokens": 100,
        "tools": [_function("read", parameters=SCHEMA), _function("list")],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "messages",
    [_ANSWERED[0] | {"reasoning_content": "", "reasoning": ""}, _ANSWERED[1]],
)

OPENCODE = Shape(
    "/v1/chat/completions",
    {
        "max_tokens": 100,
        "messages": [{"role": "system", "content": "Be an agent."}, {"role": "user", "content": '"Read."'}],
        "tools": [_function("read", parameters=SCHEMA), _function("todo", parameters={"type": "object"})],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "messages",
    _ANSWERED,
)

SHAPES = {"codex": CODEX, "claude-code": CLAUDE_CODE, "qwen-code": QWEN_CODE, "opencode": OPENCODE}
