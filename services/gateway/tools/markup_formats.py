"""Formats of calls in markup, which one reader takes by their marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from services.gateway.tools.markup import JsonOrMarkupCall, Markup, MarkupCall
from services.gateway.tools.named import NamedFormat
from services.gateway.tools.nested import NestedCall
from services.gateway.tools.parser import Body, CallFormat, OpenCall


def _reader(marks: Markup) -> Callable[[OpenCall], Body]:
    return lambda call: MarkupCall(marks, call.schemas, called=call.mark == marks.call)


def _markup(**marks: str | tuple[str, ...] | bool) -> Callable[[OpenCall], Body]:
    return _reader(Markup(**marks))  # type: ignore[arg-type]  # by name


def _marked(word: str, *blocks: str) -> CallFormat:
    """The format whose tags begin with a word of the model's, in one of some `blocks`."""
    marks = Markup(
        call=f'<{word}invoke name="', name_end='">', parameter=f'<{word}parameter name="', key_end=">",
        value_end=f"</{word}parameter>", call_end=f"</{word}invoke>",
    )  # fmt: skip
    begins = tuple(f"<{word}{block}>" for block in blocks)
    ends = tuple(f"</{word}{block}>" for block in blocks)
    return CallFormat(_reader(marks), begins=(*begins, marks.call), ends=ends, special=True)


_FUNCTION = partial(
    _markup, call="<function=", name_end=">", parameter="<parameter=", key_end=">", value_end="</parameter>",
    call_end="</function>",
)  # fmt: skip
_INVOKED = Markup(
    call='<invoke name="', name_end='">', parameter='<parameter name="', key_end='">', value_end="</parameter>",
    call_end="</invoke>",
)  # fmt: skip
_LONGCAT = Markup(
    call="<longcat_tool_call>", name_end="", parameter="<longcat_arg_key>", key_end="</longcat_arg_key>",
    value="<longcat_arg_value>", value_end="</longcat_arg_value>", call_end="</longcat_tool_call>",
)  # fmt: skip
_DSML, _GCML, _M3 = "｜DSML｜", "｜GCML｜", "]<]minimax[>["


def _hunyuan(suffix: str) -> Markup:
    return Markup(
        call=f"<tool_call{suffix}>", name_end="", separator=f"<tool_sep{suffix}>", parameter=f"<arg_key{suffix}>",
        key_end=f"</arg_key{suffix}>", value=f"<arg_value{suffix}>", value_end=f"</arg_value{suffix}>",
        call_end=f"</tool_call{suffix}>",
    )  # fmt: skip


_HUNYUAN = (_hunyuan(""), _hunyuan(":opensource"))  # every tag of some releases has the suffix
_IFM = Markup(
    call="<ifm|tool_call>", name_end="", parameter="<ifm|arg_key>", key_end="</ifm|arg_key>", value="<ifm|arg_value>",
    value_end="</ifm|arg_value>", call_end="</ifm|tool_call>", typed=("<ifm|arg_type>", "</ifm|arg_type>"),
)  # fmt: skip
# In the order in which a template's signs are looked for.
MARKUP_FORMATS: Mapping[str, NamedFormat] = {
    "deepseek_v41": NamedFormat(
        "DeepSeek V4.1",
        f'<{_DSML} calls><{_DSML} invoke name="get_weather">'
        f'<{_DSML} parameter name="city" string="true">Oslo</{_DSML} parameter></{_DSML} invoke></{_DSML} calls>',
        _marked(f"{_DSML} ", "calls"),
        (f"<{_DSML} calls>",),
        ("deepseekv41",),
    ),
    "deepseek_v32": NamedFormat(
        "DeepSeek V3.2, V4",
        f'<{_DSML}function_calls><{_DSML}invoke name="get_weather">'
        f'<{_DSML}parameter name="city" string="true">Oslo</{_DSML}parameter></{_DSML}invoke></{_DSML}function_calls>',
        _marked(_DSML, "function_calls", "tool_calls"),
        (f"<{_DSML}", "'<' + dsml_token", "dsml_token"),
        ("deepseekv32", "deepseek_v4", "deepseekv4"),
    ),
    "gigachat35": NamedFormat(
        "GigaChat 3.5",
        f'<{_GCML}tool_calls><{_GCML}invoke name="get_weather">'
        f'<{_GCML}parameter name="city" string="true">Oslo</{_GCML}parameter></{_GCML}invoke></{_GCML}tool_calls>',
        _marked(_GCML, "tool_calls"),
        (f"<{_GCML}",),
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
                before=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>"), titled="<｜tool_sep｜>",
            ),
            begins=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", '<steptml:invoke name="'),
            ends=("<｜tool_call_end｜>", "<｜tool_calls_end｜>", "<｜tool_sep｜>"), special=True,
        ),
        ("<steptml:", "<｜tool_calls_begin｜>"),
    ),
    "minimax_m3": NamedFormat(
        "MiniMax M3",
        f'{_M3}<tool_call>\n{_M3}<invoke name="get_weather">{_M3}<city>Oslo{_M3}</city>{_M3}</invoke>\n'
        f"{_M3}</tool_call>",
        CallFormat(
            lambda call: NestedCall(_M3, call.schemas, called=call.mark.endswith('"')),
            begins=(f"{_M3}<tool_call>", f'{_M3}<invoke name="'), ends=(f"{_M3}</tool_call>",), special=True,
        ),
        (_M3, "<mm:think>"),
        ("minimax-m3",),
    ),
    "minimax_m2": NamedFormat(
        "MiniMax M2",
        '<minimax:tool_call><invoke name="get_weather"><parameter name="city">Oslo</parameter></invoke>'
        "</minimax:tool_call>",
        CallFormat(
            _reader(_INVOKED), begins=("<minimax:tool_call>", _INVOKED.call), ends=("</minimax:tool_call>",),
            special=True,
        ),
        ("<minimax:tool_call>",),
        ("minimax-m2",),
    ),
    "muse": NamedFormat(
        "Muse Glimmer",
        '<|start|>assistant to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Oslo</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>',
        CallFormat(
            _markup(
                call='<atem:invoke name="', name_end='">', parameter='<atem:parameter name="', key_end='">',
                value_end="</atem:parameter>", call_end="</atem:invoke>", before=("<atem:function_calls>",),
            ),
            begins=("<atem:function_calls>", '<atem:invoke name="'),
            named=("<|start|>assistant to={}<|message|>", "to={}<|message|>"),
            ends=("</atem:function_calls>", "<|eot|>", "<|eom|>"), special=True, quoted=True,
        ),
        ("<atem:function_calls>",),
    ),
    "dots": NamedFormat(
        "dots",
        '<dots_function_call><invoke name="get_weather"><parameter name="city">Oslo</parameter></invoke>'
        "</dots_function_call>",
        CallFormat(
            lambda call: JsonOrMarkupCall(_INVOKED, call.schemas, called=call.mark == _INVOKED.call),
            begins=("<dots_function_call>", _INVOKED.call), ends=("</dots_function_call>",), special=True,
        ),
        ("<dots_function_call>",),
    ),
    "minicpm5": NamedFormat(
        "MiniCPM 5",
        '<function name="get_weather"><param name="city">Oslo</param></function>',
        CallFormat(
            _markup(
                call='<function name="', name_end='">', parameter='<param name="', key_end='">', value_end="</param>",
                call_end="</function>", cdata=True, lines=True,
            ),
            begins=('<function name="',), special=True,
        ),
        ("<param name=",),
    ),
    "kimi_k3": NamedFormat(
        "Kimi K3",
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Oslo<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>",
        CallFormat(
            _markup(
                call='<|open|>call tool="', name_end="<|sep|>", parameter='<|open|>argument key="', key_end="<|sep|>",
                value_end="<|close|>argument<|sep|>", call_end="<|close|>call<|sep|>",
                whole=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
            ),
            begins=("<|open|>tools<|sep|>", '<|open|>call tool="'), ends=("<|close|>tools<|sep|>",), special=True,
        ),
        ("<|open|>",),
    ),
    "solar_open2": NamedFormat(
        "Solar Open 2",
        "<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>Oslo<|tool_arg:end|>\n"
        "<|tool_call:end|>",
        CallFormat(
            _markup(
                call="", name_end="", parameter="<|tool_arg:start|>", key_end="<|tool_arg:value|>",
                value_end="<|tool_arg:end|>", call_end="<|tool_call:end|>",
            ),
            begins=("<|tool_call:start|>",), special=True,
        ),
        ("<|tool_call:start|>",),
    ),
    "hy_v3": NamedFormat(
        "Hunyuan 3, 4",
        "<tool_calls><tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "</tool_call></tool_calls>",
        CallFormat(
            lambda call: _reader(_HUNYUAN[call.mark.endswith(":opensource>")])(call),
            begins=("<tool_calls>", "<tool_call>", "<tool_calls:opensource>", "<tool_call:opensource>"),
            ends=("</tool_calls>", "</tool_calls:opensource>"), special=True,
        ),
        ("<tool_sep", ":opensource"),
        ("hy_v4",),
    ),
    "k2_horizon": NamedFormat(
        "K2 Horizon",
        "<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key><ifm|arg_value>Oslo</ifm|arg_value>"
        "</ifm|tool_call></ifm|tool_calls>",
        CallFormat(
            lambda call: JsonOrMarkupCall(_IFM, call.schemas, called=call.mark == _IFM.call),
            begins=("<ifm|tool_calls>", "<ifm|tool_call>"),
            ends=("</ifm|tool_call>", "</ifm|tool_calls>"), special=True,
        ),
        ("<ifm|tool_call",),
    ),
    "longcat": NamedFormat(
        "LongCat",
        '<longcat_tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</longcat_tool_call>',
        CallFormat(
            lambda call: JsonOrMarkupCall(_LONGCAT, call.schemas, called=True),
            begins=("<longcat_tool_call>",), ends=("</longcat_tool_call>",), special=True,
        ),
        ("<longcat_tool_call>",),
    ),
    "seed_oss": NamedFormat(
        "Seed-OSS",
        "<seed:tool_call><function=get_weather><parameter=city>Oslo</parameter></function></seed:tool_call>",
        CallFormat(
            _FUNCTION(), begins=("<seed:tool_call>", "<function="), ends=("</seed:tool_call>",), special=True,
            quoted=True,
        ),
        ("<seed:tool_call>",),
    ),
    "glm": NamedFormat(
        "GLM 4.5 to 5, Ling 3, Laguna, Spark 2.5",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
        CallFormat(
            _markup(
                call="", name_end="", parameter="<arg_key>", key_end="</arg_key>", value="<arg_value>",
                value_end="</arg_value>", call_end="</tool_call>",
            ),
            begins=("<tool_call>",), special=True,
        ),
        ("<arg_key>",),
        ("glm45", "glm47", "ling3", "poolside_v1", "spark25"),
    ),
    "qwen3_coder": NamedFormat(
        "Qwen3-Coder, Qwen 3.5, Nemotron 3, MiMo, Step 3.5",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
        CallFormat(_FUNCTION(lines=True), begins=("<tool_call>", "<function="), ends=("</tool_call>",), special=True),
        ("<function=",),
        ("qwen3_xml", "mimo", "step3p5"),
    ),
}  # fmt: skip
