"""How models write calls, and which model writes which way: each format is a value over one of seven readers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from services.gateway.tools.braces import BracedCall
from services.gateway.tools.headed import Head, HeadedCall
from services.gateway.tools.keyed import KeyedCalls
from services.gateway.tools.markup_formats import MARKUP_FORMATS
from services.gateway.tools.named import NamedFormat
from services.gateway.tools.parser import Body, CallFormat, OpenCall
from services.gateway.tools.pythonic import PythonCalls


def _headed(pattern: str, *, json: bool = False, numbered: bool = False) -> Callable[[OpenCall], Body]:
    head = Head(re.compile(pattern, re.DOTALL), json, numbered)
    return lambda call: HeadedCall(head, call)


def _python(end: str = "", last: str = "") -> Callable[[OpenCall], Body]:
    return lambda call: PythonCalls(call.own_names, end, last, call.keys)


def _braced(quote: str) -> Callable[[OpenCall], Body]:
    return lambda call: BracedCall(quote, call.schemas)


HERMES = CallFormat(begins=("<tool_call>",), ends=("</tool_call>",))
_GENERIC = CallFormat(begins=("<tool_call>",), ends=("</tool_call>",), bare="{[", between=",")
# In the order in which a template's signs are looked for.
FORMATS: Mapping[str, NamedFormat] = {
    **MARKUP_FORMATS,
    "mistral": NamedFormat(
        "Mistral, Ministral, Devstral, Magistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}',
        CallFormat(
            _headed(r"\s*(?P<name>[^\s\[{]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*", json=True),
            begins=("[TOOL_CALLS]",), special=True,
        ),
        ("[TOOL_CALLS]",),
    ),
    "deepseek": NamedFormat(
        "DeepSeek V3, V3.1, R1",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        CallFormat(
            _headed(
                r"(?=.*<｜tool▁sep｜>)\s*(?:<｜tool▁call▁begin｜>)?\s*(?:function\s*<｜tool▁sep｜>\s*)?(?P<name>[^\s<{`]+)\s*"
                r"(?:<｜tool▁sep｜>\s*)?(?:```json\s*)?"
            ),
            begins=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
            ends=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"), special=True,
        ),
        ("<｜tool▁call▁begin｜>",),
        ("deepseek_v3", "deepseek_v31", "deepseekv3", "deepseekv31"),
    ),
    "kimi_k2": NamedFormat(
        "Kimi K2",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>'
        '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>',
        CallFormat(
            _headed(
                r"\s*(?:<\|tool_call_begin\|>)?\s*(?:functions\.)?(?P<name>[^\s:<{]+)(?::\d+)?\s*"
                r"<\|tool_call_argument_begin\|>\s*",
                numbered=True,
            ),
            begins=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
            ends=("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>"), special=True,
        ),
        ("<|tool_call_begin|>",),
    ),
    "functiongemma": NamedFormat(
        "FunctionGemma",
        "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>",
        CallFormat(
            _braced("<escape>"), begins=("<start_function_call>",), ends=("<end_function_call>",), special=True,
        ),
        ("<start_function_call>",),
    ),
    "gemma4": NamedFormat(
        "Gemma 4",
        '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>',
        CallFormat(
            _braced('<|"|>'), begins=("<|tool_call>",), ends=("<tool_call|>", "<|tool_response>"), special=True,
        ),
        ("<|tool_call>",),
    ),
    "apertus": NamedFormat(
        "Apertus",
        '<|tools_prefix|>[{"get_weather": {"city": "Oslo"}}]<|tools_suffix|>',
        CallFormat(
            lambda call: KeyedCalls(), begins=("<|tools_prefix|>",), ends=("<|tools_suffix|>",), special=True
        ),
        ("<|tools_prefix|>",),
        ("apertus2509",),
    ),
    "inkling": NamedFormat(
        "Inkling",
        '<|message_model|>get_weather<|content_invoke_tool_json|>{"name": "get_weather", "args": {"city": "Oslo"}}'
        "<|end_message|>",
        CallFormat(
            begins=("<|content_invoke_tool_json|>",),
            named=("<|message_model|>{}<|content_invoke_tool_json|>", "{}<|content_invoke_tool_json|>"),
            ends=("<|end_message|>", "<|content_model_end_sampling|>"), special=True,
        ),
        ("<|content_invoke_tool_json|>",),
    ),
    "internlm": NamedFormat(
        "InternLM 2, 2.5, 3; Intern-S1",
        '<|action_start|><|plugin|>{"name": "get_weather", "parameters": {"city": "Oslo"}}<|action_end|>',
        CallFormat(
            begins=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"), ends=("<|action_end|>",), special=True
        ),
        ("<|plugin|>", "<|action_start|>"),
        ("interns1",),
    ),
    "cohere": NamedFormat(
        "Command A, Command A Plus, Command R7B",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}}]'
        "<|END_ACTION|>",
        CallFormat(begins=("<|START_ACTION|>",), ends=("<|END_ACTION|>",), special=True),
        ("<|START_ACTION|>",),
        ("cohere_command3", "cohere_command4"),
    ),
    "nemotron": NamedFormat(
        "Nemotron Nano 2, Llama Nemotron",
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>',
        CallFormat(begins=("<TOOLCALL>",), ends=("</TOOLCALL>",)),
        ("<TOOLCALL>",),
    ),
    "lfm2": NamedFormat(
        "LFM2",
        '<|tool_call_start|>[get_weather(city="Oslo")]<|tool_call_end|>',
        CallFormat(
            _python(last="<|tool_call_end|>"), begins=("<|tool_call_start|>",), ends=("<|tool_call_end|>",),
            special=True,
        ),
        ("<|tool_call_start|>",),
    ),
    "olmo3": NamedFormat(
        "Olmo 3",
        '<function_calls>get_weather(city="Oslo")</function_calls>',
        CallFormat(_python("</function_calls>"), begins=("<function_calls>",)),
        ("<function_calls>",),
    ),
    "tool_calls": NamedFormat(
        "Jamba, Hunyuan A13B, MiniMax M1",
        '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_calls>',
        CallFormat(begins=("<tool_calls>",), ends=("</tool_calls>",), again="{"),
        ("<tool_calls>",),
        ("jamba", "hunyuan_a13b", "hunyuan", "minimax"),
    ),
    "phi4": NamedFormat(
        "Phi-4 mini",
        'functools[{"name": "get_weather", "arguments": {"city": "Oslo"}}]',
        CallFormat(begins=("<|tool_call|>", "functools"), ends=("<|/tool_call|>",), special=True),
        ("functools[", "<|tool|>"),
        ("phi4_mini_json",),
    ),
    "gpt_oss": NamedFormat(
        "gpt-oss (harmony)",
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        CallFormat(
            _headed(
                r"(?:functions\.)?(?P<name>[\w.-]+?)\s*(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\s*(?:json|code)?"
                r"\s*<\|message\|>\s*"
            ),
            begins=(
                "<|channel|>commentary to=", "<|channel|>analysis to=", "<|start|>assistant to=",
                "<|start|>assistant<|channel|>commentary to=", "<|start|>assistant<|channel|>analysis to=",
            ),
            ends=("<|call|>", "<|end|>"), special=True,
        ),
        ("<|channel|>",),
        ("openai", "gpt-oss"),
    ),
    "gigachat": NamedFormat(
        "GigaChat 3",
        'function call<|role_sep|>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}',
        CallFormat(
            begins=("<|message_sep|>\n\nfunction call<|role_sep|>", "function call<|role_sep|>", "<|function_call|>"),
            special=True,
        ),
        ("function call<|role_sep|>", "<|role_sep|>"),
        ("gigachat3",),
    ),
    "granite": NamedFormat(
        "Granite 3",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]',
        CallFormat(begins=("<|tool_call|>", "<tool_call>"), ends=("</tool_call>",), special=True),
        ("<|tool_call|>",),
    ),
    "granite_20b_fc": NamedFormat(
        "Granite 20B functioncalling",
        '<function_call> {"name": "get_weather", "arguments": {"city": "Oslo"}}',
        CallFormat(begins=("<function_call>",)),
        ("<function_call>",),
        ("granite-20b-fc",),
    ),
    "hermes": NamedFormat(
        "Hermes, Qwen 2.5 and 3, Granite 4, ERNIE 4.5, Trinity",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>',
        HERMES,
        ("<tool_call>",),
        ("qwen", "qwen25", "granite4", "ernie45", "trinity"),
    ),
    "pythonic": NamedFormat(
        "Llama 3.2 (small), Llama 4",
        '[get_weather(city="Oslo")]',
        CallFormat(
            _python(), begins=("<|python_start|>", "<|python_tag|>"), ends=("<|python_end|>",), bare="[", special=True
        ),
        ("func_name1(params_name1=", "<|python_start|>"),
        ("llama4_pythonic",),
    ),
    "llama3_json": NamedFormat(
        "Llama 3.1, 3.2, 3.3",
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        CallFormat(begins=("<|python_tag|>",), bare="{", between=";", special=True),
        ("<|python_tag|>", "ipython"),
        ("llama3", "llama4_json"),
    ),
    "xlam": NamedFormat(
        "xLAM 2",
        '[{"name": "get_weather", "arguments": {"city": "Oslo"}}]',
        CallFormat(
            begins=("```json", "<tool_call>", "[TOOL_CALLS]"), ends=("```", "</tool_call>"), bare="{[", between=",;"
        ),
    ),
    "generic": NamedFormat(
        "all others",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>',
        _GENERIC,
    ),
}  # fmt: skip
PARSERS: Mapping[str, CallFormat] = {
    name: named.form for first, named in FORMATS.items() for name in (first, *named.aliases)
}


@lru_cache
def parser_for(template: str, setting: str) -> CallFormat:
    """The format that a setting names; "auto" chooses it by the chat template."""
    if setting != "auto":
        return PARSERS[setting]
    signed = (named.form for named in FORMATS.values() if any(sign in template for sign in named.signs))
    return next(signed, _GENERIC)
