"""Every format's calls are read, in whatever pieces the text comes; what is no call stays content."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from services.gateway.tools.forced import ENFORCED_HERMES, REQUIRED
from services.gateway.tools.formats import FORMATS, PARSERS, parser_for
from services.gateway.tools.parser import ToolParser

SCHEMAS = {
    "get_weather": {"properties": {"city": {"type": "string"}, "tags": {"type": "array"}, "n": {"type": "integer"}}},
    "now": {},
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": ["string", "null"]}}},
}
NAMES = frozenset(SCHEMAS)
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
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "a \\"b\\""}</tool_call>', "", [("now", 'a "b"')]),
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
    ("deepseek", "<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "", [NOW]),
    ("mistral", "[TOOL_CALLS]now {}", "", [NOW]),
    ("qwen3_coder", "Well.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo </par\n\n\"x\"\n</parameter>\n"
     "<parameter=tags>\n[\"a\", 1]\n</parameter>\n<parameter=n>5</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
     "<function=now>\n</function>\n</tool_call>", "Well.",
     [("get_weather", {"city": 'Oslo </par\n\n"x"', "tags": ["a", 1], "n": 5}), NOW]),
    ("qwen3_coder", "<function=add><parameter=a>True</parameter><parameter=b>null</parameter></function>", "",
     [("add", {"a": True, "b": None})]),
    ("qwen3_coder", "<function=add><parameter=a>many</parameter><parameter=b>5 o'clock</parameter></function>", "",
     [("add", {"a": "many", "b": "5 o'clock"})]),
    ("qwen3_coder", "<tool_call>now</tool_call>", "<tool_call>now</tool_call>", []),
    ("qwen3_coder", "a <function of x and <function=", "a <function of x and <function=", []),
    ("qwen3_coder", "<function=a b>", "<function=a b>", []),
    ("qwen3_coder", "<function=now>\nnonsense", "onsense", [NOW]),
    ("seed_oss", "<seed:tool_call>\n<function=get_weather>\n<parameter=city></parameter>\n</function>\n"
     "</seed:tool_call>", "", [("get_weather", {"city": ""})]),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n<invoke name="get_weather">\n<parameter name='
     '"city">Oslo</parameter>\n<parameter name="n">1e2</parameter></invoke>\n</minimax:tool_call>', "",
     [NOW, ("get_weather", {"city": "Oslo", "n": 100.0})]),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="true">'
     '7</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="false">{"c": [7]}</｜DSML｜parameter>\n'
     "</｜DSML｜invoke>\n"
     "</｜DSML｜function_calls>", "", [("add", {"a": "7", "b": {"c": [7]}})]),
    ("deepseek_v32", 'Hm.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n'
     '<｜DSML｜parameter name="a" string="false">7'
     "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>", "Hm.", [("add", {"a": 7})]),
    ("deepseek_v41", '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n'
     '<｜DSML｜ parameter name="city" string="true">'
     "Oslo</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>", "", [("get_weather", {"city": "Oslo"})]),
    ("gigachat35", 'I look.\n<｜GCML｜tool_calls>\n<｜GCML｜invoke name="add">\n'
     '<｜GCML｜parameter name="a" string="false">[7]'
     '</｜GCML｜parameter>\n</｜GCML｜invoke>\n<｜GCML｜invoke name="now">\n</｜GCML｜invoke>\n</｜GCML｜'
     'tool_calls>', "I look.",
     [("add", {"a": [7]}), NOW]),
    ("minimax_m3", 'Hm.]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>['
     '<city>Oslo > "N"\nx'
     "]<]minimax[>[</city>]<]minimax[>[<tags>]<]minimax[>[<item>a]<]minimax[>[</item>]<]minimax[>[<item>]<]minimax[>["
     "<k>1]<]minimax[>[</k>]<]minimax[>[</item>]<]minimax[>[</tags>]<]minimax[>[<n>5]<]minimax[>[</n>]<]minimax[>["
     '</invoke>\n]<]minimax[>[<invoke name="now">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>', "Hm.",
     [("get_weather", {"city": 'Oslo > "N"\nx', "tags": ["a", {"k": 1}], "n": 5}), NOW]),
    ("minimax_m3", ']<]minimax[>[<invoke name="get_weather">]<]minimax[>[<tags>'
     ']<]minimax[>[</tags>]<]minimax[>[</invoke>',
     "", [("get_weather", {"tags": []})]),
    ("minimax_m3", "]<]minimax[>[<tool_call>no", "]<]minimax[>[<tool_call>no", []),
    ("minimax_m3", ']<]minimax[>[<invoke name="now">]<]minimax[>[<a>1]<]minimax[>[</invoke>',
     ']<]minimax[>[<invoke name="now">]<]minimax[>[<a>1]<]minimax[>[</invoke>', []),
    ("muse", 'to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
     '<atem:parameter name="city">'
     'Oslo</atem:parameter>\n<atem:parameter name="n">3</atem:parameter>\n</atem:invoke>\n'
     '</atem:function_calls><|eot|>',
     "", [("get_weather", {"city": "Oslo", "n": 3})]),
    ("dots", 'Yes.<dots_function_call>\n<invoke name="now">\n</invoke>\n<invoke name="get_weather">\n'
     '<parameter name="city">'
     "Oslo</parameter>\n</invoke>\n</dots_function_call>", "Yes.", [NOW, ("get_weather", {"city": "Oslo"})]),
    ("minicpm5", '<function name="get_weather"><param name="city"><![CDATA[a\n</param> b]]></param><param name="tags">'
     '<![CDATA[["x"]]]></param><param name="n">5</param></function>\n<function name="now"></function>', "",
     [("get_weather", {"city": "a\n</param> b", "tags": ["x"], "n": 5}), NOW]),
    ("minicpm5", '<function name="get_weather"><param name="city">\n<![CDATA[a]]>\n</param></function>', "",
     [("get_weather", {"city": "a"})]),
    ("kimi_k3", 'Yes.<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" '
     'type="string"<|sep|>a "b" <|close|>argument<|sep|><|open|>argument key="n" type="number"<|sep|>3<|close|>argument'
     '<|sep|><|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
     "Yes.", [("get_weather", {"city": 'a "b" ', "n": 3}), NOW]),
    ("solar_open2", "<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>Oslo\nnow"
     "<|tool_arg:end|>\n"
     "<|tool_arg:start|>n<|tool_arg:value|>3<|tool_arg:end|>\n<|tool_call:end|>\n<|tool_call:start|>now\n"
     "<|tool_call:end|>", "", [("get_weather", {"city": "Oslo\nnow", "n": 3}), NOW]),
    ("k2_horizon", "Reading.\n<ifm|tool_calls>\n<ifm|tool_call>get_weather\n<ifm|arg_key>city</ifm|arg_key>\n"
     "<ifm|arg_value>a.cc</ifm|arg_value>\n<ifm|arg_key>n</ifm|arg_key>\n<ifm|arg_type>integer</ifm|arg_type>\n<ifm|arg_value>12"
     "</ifm|arg_value>\n</ifm|tool_call>\n<ifm|tool_call>now</ifm|tool_call></ifm|tool_calls>", "Reading.",
     [("get_weather", {"city": "a.cc", "n": 12}), NOW]),
    ("k2_horizon", f"<ifm|tool_calls>\n<ifm|tool_call>{written(OSLO)}</ifm|tool_call>\n<ifm|tool_call>\n{written(NOW)}"
     "</ifm|tool_call>\n</ifm|tool_calls>", "", [OSLO, NOW]),
    ("hy_v3", "Well.<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
     "<arg_key:opensource>city"
     "</arg_key:opensource>\n<arg_value:opensource>Oslo</arg_value:opensource>\n</tool_call:opensource>\n"
     "<tool_call:opensource>now<tool_sep:opensource></tool_call:opensource>\n</tool_calls:opensource>", "Well.",
     [("get_weather", {"city": "Oslo"}), NOW]),
    ("gemma4", 'Sure.<|tool_call>call:get_weather{city:<|"|>Oslo, {x}<|"|>,tags:[1,<|"|>b<|"|>,'
     '{c:true}],n:-2.5}<tool_call|>'
     "<|tool_call>call:now{}<tool_call|><|tool_response>", "Sure.",
     [("get_weather", {"city": "Oslo, {x}", "tags": [1, "b", {"c": True}], "n": -2.5}), NOW]),
    ("apertus", f'Hm.<|tools_prefix|>[{{"now": {{}}}}, {{"get_weather": {ARGS}}}]<|tools_suffix|>', "Hm.", [NOW, OSLO]),
    ("apertus", "<|tools_prefix|>none", "<|tools_prefix|>none", []),
    ("inkling", f'get_weather<|content_invoke_tool_json|>{{"name": "get_weather", "args": {ARGS}}}<|end_message|>'
     '<|message_model|>now<|content_invoke_tool_json|>{"name":"now","args":{}}<|end_message|>', "", [OSLO, NOW]),
    ("inkling", "It is now", "It is now", []),
    ("step3", "Hm.<｜tool_calls_begin｜>\n<｜tool_call_begin｜>\nfunction\n<｜tool_sep｜>\n"
     '<steptml:invoke name="now">\n</steptml:invoke>\n'
     "<｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"now\">"
     "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>", "Hm.", [NOW, NOW]),
    ("glm", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo\nnow</arg_value>\n<arg_key>n</arg_key>\n"
     "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now</tool_call>", "",
     [("get_weather", {"city": "Oslo\nnow", "n": 3}), NOW]),
    ("glm", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>a < b</arg_value></tool_call>", "",
     [("get_weather", {"city": "a < b"})]),
    ("glm", "<tool_call>two words\n", "<tool_call>two words\n", []),
    ("kimi_k2", "So.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
     f"<|tool_call_end|><|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{json.dumps(OSLO[1])}"
     "<|tool_call_end|><|tool_calls_section_end|>", "So.", [NOW, OSLO]),
    ("kimi_k2", "<|tool_call_begin|>{}", "<|tool_call_begin|>{}", []),
    ("kimi_k2", '<|tool_call_begin|>0<|tool_call_argument_begin|>{"a": {"b": 1}}<|tool_call_end|>', "",
     [("add", {"a": {"b": 1}})]),
    *(("kimi_k2", f"<|tool_call_begin|>call_7<|tool_call_argument_begin|>{unclear}",
       f"<|tool_call_begin|>call_7<|tool_call_argument_begin|>{unclear}", [])
      for unclear in ("{}", '{"a": 1, "c": 2}', "{1}")),
    ("functiongemma", "<start_function_call>call:get_weather{city:<escape>Oslo, {x}<escape>,tags:[1,<escape>b<escape>,"
     "{c:true}],n:-2.5}<end_function_call><start_function_call>call:now{}<end_function_call>", "",
     [("get_weather", {"city": "Oslo, {x}", "tags": [1, "b", {"c": True}], "n": -2.5}), NOW]),
    ("functiongemma", "<start_function_call>call:now{a}", "<start_function_call>call:now{a}", []),
    *(
        (kind, begin + "call:get_weather{city:Q3Q,n:Q3Q,tags:Q[1]Q,x:Q4Q}".replace("Q", quote), "",
         [("get_weather", {"city": "3", "n": 3, "tags": [1], "x": "4"})])
        for kind, begin, quote in (
            ("functiongemma", "<start_function_call>", "<escape>"), ("gemma4", "<|tool_call>", '<|"|>')
        )
    ),
    ("internlm", f"I look.<|action_start|> <|plugin|>\n{written(OSLO, 'parameters')}<|action_end|>\n", "I look.",
     [OSLO]),
    ("cohere", '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "now", "parameters": {}},\n '
     '{"tool_call_id": "1",'
     f' "tool_name": "get_weather", "parameters": {json.dumps(OSLO[1])}}}\n]<|END_ACTION|>', "", [NOW, OSLO]),
    ("nemotron", f"<TOOLCALL>[{written(OSLO)}, {written(NOW)}]</TOOLCALL>", "", [OSLO, NOW]),
    ("lfm2", "<|tool_call_start|>[now(), add(a=1)]<|tool_call_end|>Done.", "Done.", [NOW, ("add", {"a": 1})]),
    ("lfm2", "<|tool_call_start|>[now(), add(a='it's', b=\"x\"), get_weather(city='a', x='y'', tags=['b's', 'c'], "
     "n={'k'y': ''z''})]<|tool_call_end|>Done.", "Done.",
     [NOW, ("add", {"a": "it's", "b": "x"}),
      ("get_weather", {"city": "a', x='y'", "tags": ["b's", "c"], "n": {"k'y": "'z'"}})]),
    ("lfm2", "<|tool_call_start|>[now(), add(a=)]<|tool_call_end|>Done.", "Done.", [NOW]),
    *(("lfm2", f"<|tool_call_start|>{bad}<|tool_call_end|>", f"<|tool_call_start|>{bad}<|tool_call_end|>", [])
      for bad in ("[add(a='it's]", "[add(a='b' 'c)]", "[add(a=(1])]", "[]", "add", "[add(a=1+x)]")),
    ("pythonic", "[add(a=-007, b=0x0a, c=00, d=1.05, e=[10, 01], from='00', x0=1e05)]", "",
     [("add", {"a": -7, "b": 10, "c": 0, "d": 1.05, "e": [10, 1], "from": "00", "x0": 1e5})]),
    ("olmo3", "<function_calls>\nnow()\nadd(a=1, b='x')\n</function_calls>", "", [NOW, ("add", {"a": 1, "b": "x"})]),
    ("olmo3", "<function_calls>\n</function_calls>", "<function_calls>\n</function_calls>", []),
    ("tool_calls", f"<tool_calls>[\n {written(OSLO)},\n {written(NOW)}\n]</tool_calls>", "", [OSLO, NOW]),
    ("tool_calls", f"<tool_calls>\n{written(OSLO)}\n{written(NOW)}\n</tool_calls>", "", [OSLO, NOW]),
    ("tool_calls", '{"name": "now", "arguments": {}}', '{"name": "now", "arguments": {}}', []),
    ("phi4", f"Sure.\nfunctools[{written(OSLO)}, {written(NOW)}]", "Sure.", [OSLO, NOW]),
    ("phi4", f"<|tool_call|>[{written(NOW)}]<|/tool_call|>", "", [NOW]),
    ("phi4", "functools is a module", "functools is a module", []),
    ("gpt_oss", "I look.<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
     f"{json.dumps(OSLO[1])}<|call|>", "I look.", [OSLO]),
    ("gpt_oss", "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>", "", [NOW]),
    ("gigachat", f"function call<|role_sep|>\n{written(OSLO)}", "", [OSLO]),
    ("gigachat", "a function call", "a function call", []),
    ("granite_20b_fc", f"<function_call> {written(NOW)}<function_call> {written(OSLO)}", "", [NOW, OSLO]),
    ("longcat", f"<longcat_tool_call>\n{written(OSLO)}\n</longcat_tool_call>", "", [OSLO]),
    ("pythonic", '<|python_start|>[now(), add(a=1)]<|python_end|>', "", [NOW, ("add", {"a": 1})]),
    ("xlam", f"[{written(OSLO)}, {written(NOW)}]", "", [OSLO, NOW]),
    ("xlam", f"```json\n[{written(NOW)}]\n```", "", [NOW]),
    ("xlam", '{"name": "Bob"}', '{"name": "Bob"}', []),
    ("pythonic", "[exec(code='1')]", "[exec(code='1')]", []),
    ("generic", written(OSLO), "", [OSLO]),
    ("generic", f"[{written(NOW)}, {written(OSLO)}]", "", [NOW, OSLO]),
    ("generic", f"Sure.\n<tool_call>{written(OSLO)}</tool_call>", "Sure.", [OSLO]),
    ("generic", '{"name": "Bob"} {"x": 1}', '{"name": "Bob"} {"x": 1}', []),
    ("generic", "[TODO] no call", "[TODO] no call", []),
]  # fmt: skip


def read(kind: str, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]], int]:
    """Content, calls, and in how many pieces the arguments came."""
    parser, content, calls, n_pieces = ToolParser(PARSERS[kind], NAMES, SCHEMAS), "", [], 0
    for actual in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        content += actual.content
        for delta in actual.calls:
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


STREAMED = sorted(set(FORMATS) - {"pythonic", "lfm2", "olmo3", "functiongemma", "gemma4", "minimax_m3"})


@pytest.mark.parametrize("kind", STREAMED)
def test_arguments_are_streamed(kind: str) -> None:
    text = FORMATS[kind].example.replace("Oslo", "Oslo, the capital of Norway")
    assert read(kind, text)[2] > 20


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_chosen_by_its_template_and_reads_its_example(kind: str) -> None:
    named = FORMATS[kind]
    assert all(parser_for(f"a template with {sign}", "auto") is named.form for sign in named.signs)
    assert all(PARSERS[alias] is named.form for alias in named.aliases)
    assert not (named.form.special and named.form.begins[0].isalpha()), "it ends reasoning"
    for text, content in ((named.example, ""), (f"Sure.\n{named.example}", "Sure.")):
        if not content or named.form.begins[0] in text:
            assert read(kind, text)[:2] == (content, [("get_weather", '{"city": "Oslo"}')])


@pytest.mark.parametrize(("kind", "text", "content", "calls"), [case for case in CASES if case[3]])
def test_a_text_that_is_cut_off_has_no_call_that_was_not_written(
    kind: str, text: str, content: str, calls: list[Call]
) -> None:
    for at in range(len(text)):
        _, actual, _ = read(kind, [text[:at]])
        assert [name for name, _ in actual] == [name for name, _ in calls][: len(actual)]
        for _, arguments in actual[:-1]:
            json.loads(arguments)


def test_an_enforced_call_cut_off_before_its_name_is_no_content() -> None:
    call = written(NOW)
    for form, text in ((REQUIRED, f"[{call}"), (ENFORCED_HERMES, f"<tool_call>\n{call}")):
        begun = text.index('"now"') + len('"now"')
        for at in range(1, len(text)):
            reader = ToolParser(form, NAMES, SCHEMAS)
            actual = [reader.push(piece) for piece in text[:at]] + [reader.finish()]
            content = "".join(one.content for one in actual)
            mark = "<tool_call>"
            assert content == (text[:at] if form is ENFORCED_HERMES and at < len(mark) else "")
            assert any(one.calls for one in actual) == (at > begun)
