"""How models write calls, and which model writes which way: each format is a value over one of five readers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from services.gateway.tools.braces import BracedCall
from services.gateway.tools.headed import Head, HeadedCall
from services.gateway.tools.markup import Markup, MarkupCall
from services.gateway.tools.parser import Body, CallFormat, OpenCall
from services.gateway.tools.pythonic import PythonCalls


def _headed(pattern: str, *, json: bool = False) -> Callable[[OpenCall], Body]:
    head = Head(re.compile(pattern, re.DOTALL), json)
    return lambda call: HeadedCall(head)


def _markup(**marks: str | tuple[str, ...]) -> Callable[[OpenCall], Body]:
    whole = Markup(**marks)  # type: ignore[arg-type]  # by name
    return lambda call: MarkupCall(whole, call.schemas, called=call.mark == whole.call)


def _python(end: str = "") -> Callable[[OpenCall], Body]:
    return lambda call: PythonCalls(call.own_names, end)


_FUNCTION = partial(
    _markup, call="<function=", name_end=">", parameter="<parameter=", key_end=">", value_end="</parameter>",
    call_end="</function>",
)  # fmt: skip
_INVOKE = partial(
    _markup, call='<invoke name="', name_end='">', parameter='<parameter name="', key_end='">',
    value_end="</parameter>", call_end="</invoke>",
)  # fmt: skip
_DSML = "｜DSML｜"

HERMES = CallFormat(begins=("<tool_call>",), ends=("</tool_call>",))
_GENERIC = CallFormat(begins=("<tool_call>",), ends=("</tool_call>",), bare="{[", between=",")


@dataclass(frozen=True, slots=True)
class NamedFormat:
    """A format as users know it."""

    models: str
    example: str  # a call of `get_weather`
    form: CallFormat
    signs: tuple[str, ...] = ()  # a model writes the format if its template has one of them
    aliases: tuple[str, ...] = ()  # names of its parsers in vLLM and SGLang


# In the order in which a template's signs are looked for.
FORMATS: Mapping[str, NamedFormat] = {
    "mistral": NamedFormat(
        "Mistral, Ministral, Devstral, Magistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}',
        CallFormat(
            _headed(r"\s*(?P<name>[^\s\[{]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*", json=True),
            begins=("[TOOL_CALLS]",), special=True,
        ),
        ("[TOOL_CALLS]",),
    ),
    "deepseek_v32": NamedFormat(
        "DeepSeek V3.2",
        f'<{_DSML}function_calls><{_DSML}invoke name="get_weather">'
        f'<{_DSML}parameter name="city" string="true">Oslo</{_DSML}parameter></{_DSML}invoke></{_DSML}function_calls>',
        CallFormat(
            _markup(
                call=f'<{_DSML}invoke name="', name_end='">', parameter=f'<{_DSML}parameter name="', key_end=">",
                value_end=f"</{_DSML}parameter>", call_end=f"</{_DSML}invoke>",
            ),
            begins=(f"<{_DSML}function_calls>", f'<{_DSML}invoke name="'), ends=(f"</{_DSML}function_calls>",),
            special=True,
        ),
        (f"<{_DSML}", "'<' + dsml_token", "dsml_token"),
        ("deepseekv32",),
    ),
    "step3": NamedFormat(
        "Step 3",
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
        '<steptml:parameter name="city">Oslo</steptml:parameter></steptml:invoke>'
        "<｜tool_call_end｜><｜tool_calls_end｜>",
        CallFormat(
            _markup(
                call='<steptml:invoke name="', name_end='">', parameter='<steptml:parameter name="', key_end='">',
                value_end="</steptml:parameter>", call_end="</steptml:invoke>",
                before=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>"),
            ),
            begins=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", '<steptml:invoke name="'),
            ends=("<｜tool_call_end｜>", "<｜tool_calls_end｜>"), special=True,
        ),
        ("<steptml:", "<｜tool_calls_begin｜>"),
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
                r"<\|tool_call_argument_begin\|>\s*"
            ),
            begins=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
            ends=("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>"), special=True,
        ),
        ("<|tool_call_begin|>",),
    ),
    "minimax_m2": NamedFormat(
        "MiniMax M2",
        '<minimax:tool_call><invoke name="get_weather"><parameter name="city">Oslo</parameter></invoke>'
        "</minimax:tool_call>",
        CallFormat(
            _INVOKE(), begins=("<minimax:tool_call>", '<invoke name="'), ends=("</minimax:tool_call>",), special=True
        ),
        ("<minimax:tool_call>",),
        ("minimax-m2",),
    ),
    "seed_oss": NamedFormat(
        "Seed-OSS",
        "<seed:tool_call><function=get_weather><parameter=city>Oslo</parameter></function></seed:tool_call>",
        CallFormat(
            _FUNCTION(), begins=("<seed:tool_call>", "<function="), ends=("</seed:tool_call>",), special=True
        ),
        ("<seed:tool_call>",),
    ),
    "longcat": NamedFormat(
        "LongCat",
        '<longcat_tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</longcat_tool_call>',
        CallFormat(begins=("<longcat_tool_call>",), ends=("</longcat_tool_call>",), special=True),
        ("<longcat_tool_call>",),
    ),
    "glm": NamedFormat(
        "GLM 4.5, 4.6, 4.7",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
        CallFormat(
            _markup(
                call="", name_end="", parameter="<arg_key>", key_end="</arg_key>", value="<arg_value>",
                value_end="</arg_value>", call_end="</tool_call>",
            ),
            begins=("<tool_call>",), special=True,
        ),
        ("<arg_key>",),
        ("glm45", "glm47"),
    ),
    "qwen3_coder": NamedFormat(
        "Qwen3-Coder, Qwen 3.5, Nemotron 3, MiMo, Step 3.5",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        CallFormat(_FUNCTION(), begins=("<tool_call>", "<function="), ends=("</tool_call>",), special=True),
        ("<function=",),
        ("qwen3_xml", "mimo", "step3p5"),
    ),
    "functiongemma": NamedFormat(
        "FunctionGemma",
        "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>",
        CallFormat(
            lambda call: BracedCall(), begins=("<start_function_call>",), ends=("<end_function_call>",), special=True
        ),
        ("<start_function_call>",),
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
        "Command A, Command R7B",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}}]'
        "<|END_ACTION|>",
        CallFormat(begins=("<|START_ACTION|>",), ends=("<|END_ACTION|>",), special=True),
        ("<|START_ACTION|>",),
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
        CallFormat(_python(), begins=("<|tool_call_start|>",), ends=("<|tool_call_end|>",), special=True),
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
        CallFormat(begins=("functools", "<|tool_call|>"), ends=("<|/tool_call|>",), special=True),
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
        CallFormat(begins=("function call<|role_sep|>", "<|function_call|>"), special=True),
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
        "Hermes, Qwen 2.5 and 3, Granite 4, ERNIE 4.5",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>',
        HERMES,
        ("<tool_call>",),
        ("qwen", "qwen25", "granite4", "ernie45"),
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
