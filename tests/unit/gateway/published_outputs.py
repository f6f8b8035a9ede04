"""Answers in the exact forms that models write, with contents of our own: docs/reference/parsers.toml says whence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

Call = tuple[str, object]

SCHEMAS = {
    "get_weather": {
        "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"},
            "meta": {"type": "object"},
        }
    },
    "write_file": {"properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    "now": {},
    "bash": {"properties": {"command": {"type": "string"}}, "required": ["command"]},
}  # fmt: skip
OSLO: Call = ("get_weather", {"city": "Oslo", "days": 3})
CODE = "if x:\n    y()\n"  # a text whose last line break matters to tools that edit files
FILE: Call = ("write_file", {"path": "a.py", "text": CODE})
NOW: Call = ("now", {})
SED = "sed -n '3,5p' a.py"  # a command with quotes, which models also write within quotes
BASH: Call = ("bash", {"command": SED})
ARGS = json.dumps(OSLO[1])
ASKED = f'{{"name": "get_weather", "arguments": {ARGS}}}'
NOTHING = '{"name": "now", "arguments": {}}'
M3 = "]<]minimax[>["
THINK = "<think>"


@dataclass(frozen=True, slots=True)
class Published:
    """An answer; `template` has the signs of the model's reasoning, whose mark the prompt may have opened."""

    parser: str
    text: str
    calls: Sequence[Call] = ()
    content: str = ""
    reasoning: str = ""
    template: str = ""
    inside: bool = False


def _dsml(word: str, block: str) -> str:
    """A file and the weather in the markup of DeepSeek and GigaChat."""
    given = (("path", "true", "a.py"), ("text", "true", CODE)), (("city", "true", "Oslo"), ("days", "false", "3"))
    invoked = "".join(
        f'<{word}invoke name="{name}">\n'
        + "".join(f'<{word}parameter name="{key}" string="{kind}">{text}</{word}parameter>\n' for key, kind, text in of)
        + f"</{word}invoke>\n"
        for name, of in zip(("write_file", "get_weather"), given, strict=True)
    )
    return f"<{word}{block}>\n{invoked}</{word}{block}>"


ANSWERS = (
    Published("deepseek_v41", f"First.</think>\n\n{_dsml('｜DSML｜ ', 'calls')}", (FILE, OSLO), "", "First.", THINK,
              True),
    Published("deepseek_v32", f"Sure, I look! {_dsml('｜DSML｜', 'function_calls')}", (FILE, OSLO), "Sure, I look!"),
    Published("gigachat35", f"<think>First.</think>\n\nI look.\n\n{_dsml('｜GCML｜', 'tool_calls')}", (FILE, OSLO),
              "I look.", "First.", THINK),
    Published("step3", "I look.\n\n<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>write_file\n"
              '<steptml:invoke name="write_file"><steptml:parameter name="path">a.py</steptml:parameter>'
              f'<steptml:parameter name="text">{CODE}</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
              '<｜tool_sep｜><｜tool_call_begin｜><steptml:invoke name="now"></steptml:invoke><｜tool_call_end｜>'
              "<｜tool_calls_end｜>", (FILE, NOW), "I look."),
    Published("minimax_m3", f'I do it.\n{M3}<tool_call>\n{M3}<invoke name="get_weather">{M3}<city>Oslo{M3}</city>'
              f'{M3}<meta>{M3}<tag>a{M3}</tag>{M3}<tag>b{M3}</tag>{M3}</meta>{M3}</invoke>\n'
              f'{M3}<invoke name="write_file">{M3}<path>a.py{M3}</path>{M3}<text>{CODE}{M3}</text>{M3}</invoke>\n'
              f"{M3}</tool_call>", (("get_weather", {"city": "Oslo", "meta": {"tag": ["a", "b"]}}), FILE), "I do it."),
    Published("minimax_m2", 'I look. <minimax:tool_call><invoke name="write_file"><parameter name="path">a.py'
              f'</parameter><parameter name="text">{CODE}</parameter></invoke><invoke name="get_weather">'
              '<parameter name="city">Oslo</parameter><parameter name="days">3</parameter></invoke>'
              "</minimax:tool_call>", (FILE, OSLO), "I look."),
    Published("muse", " to=self<|message|>First.<|eom|><|start|>assistant to=write_file<|message|>"
              '<atem:function_calls>\n<atem:invoke name="write_file">\n<atem:parameter name="path">a.py'
              "</atem:parameter>\n"
              f'<atem:parameter name="text">{CODE}</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>'
              '<|start|>assistant to=now<|message|><atem:function_calls>\n<atem:invoke name="now">\n</atem:invoke>\n'
              "</atem:function_calls><|eot|>", (FILE, NOW), "", "First.", "<atem:function_calls>"),
    Published("muse", " to=self<|message|>The form is <atem:function_calls>\n<atem:invoke name=\"now\">, so I call now "
              'to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
              '<atem:parameter name="city">Oslo</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
              (("get_weather", {"city": "Oslo"}),), "",
              'The form is <atem:function_calls>\n<atem:invoke name="now">, so I call now ', "<atem:function_calls>"),
    Published("dots", 'ok<dots_function_call><invoke name="get_weather"><parameter name="city">Oslo</parameter>'
              '<parameter name="days">3</parameter></invoke><invoke name="now"></invoke></dots_function_call>'
              f'<dots_function_call>{json.dumps({"name": FILE[0], "arguments": FILE[1]})}</dots_function_call>',
              (OSLO, NOW, FILE), "ok"),
    Published("minicpm5", 'Before.\n<function name="get_weather"><param name="city">Oslo</param>'
              '<param name="days">3</param></function>\n<function name="write_file"><param name="path">a.py</param>'
              f'<param name="text"><![CDATA[{CODE}]]></param></function>\n', (OSLO, FILE), "Before."),
    Published("kimi_k3", "First.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>"
              '<|open|>tools<|sep|><|open|>call tool="write_file" index="1"<|sep|>'
              '<|open|>argument key="path" type="string"<|sep|>a.py<|close|>argument<|sep|>'
              f'<|open|>argument key="text" type="string"<|sep|>{CODE}<|close|>argument<|sep|><|close|>call<|sep|>'
              f'<|open|>call tool="get_weather" index="2"<|sep|><|open|>json type="object"<|sep|>{ARGS}'
              "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
              (FILE, OSLO), "I look.", "First.", "<|open|>", True),
    Published("solar_open2", "<|think:start|>First.<|think:end|>Sure.<|tool_call:start|>write_file\n"
              "<|tool_arg:start|>path<|tool_arg:value|>a.py<|tool_arg:end|>\n"
              f"<|tool_arg:start|>text<|tool_arg:value|>{CODE}<|tool_arg:end|>\n<|tool_call:end|>\n"
              "<|tool_call:start|>now\n<|tool_call:end|>", (FILE, NOW), "Sure.", "First.", "<|think:start|>"),
    Published("hy_v3", "I look.<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n"
              "<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
              "<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>", (OSLO, NOW), "I look."),
    Published("hy_v3", "First.</think:opensource>I look.<tool_calls:opensource><tool_call:opensource>get_weather"
              "<arg_key:opensource>city</arg_key:opensource><arg_value:opensource>Oslo</arg_value:opensource>"
              "<arg_key:opensource>days</arg_key:opensource><arg_value:opensource>3</arg_value:opensource>"
              "</tool_call:opensource><tool_call:opensource>now</tool_call:opensource></tool_calls:opensource>",
              (OSLO, NOW), "I look.", "First.", "<think:opensource>", True),
    Published("k2_horizon", "Before <ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key>"
              "<ifm|arg_value>Oslo</ifm|arg_value><ifm|arg_key>days</ifm|arg_key><ifm|arg_value>3</ifm|arg_value>"
              "</ifm|tool_call>\n<ifm|tool_call>now</ifm|tool_call></ifm|tool_calls>", (OSLO, NOW), "Before"),
    Published("longcat", "I look.\n<longcat_tool_call>write_file\n<longcat_arg_key>path</longcat_arg_key>\n"
              "<longcat_arg_value>a.py</longcat_arg_value>\n<longcat_arg_key>text</longcat_arg_key>\n"
              f"<longcat_arg_value>{CODE}</longcat_arg_value>\n</longcat_tool_call>\n"
              f"<longcat_tool_call>\n{ASKED}\n</longcat_tool_call>", (FILE, OSLO), "I look."),
    Published("seed_oss", "<seed:think>The budget is 512.</seed:cot_budget_reflect>\nThe format is <seed:tool_call>\n"
              "<function=get_weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>. So I call.\n"
              "<seed:cot_budget_reflect>I have used 131 tokens.</seed:cot_budget_reflect></seed:think>\n"
              f"<seed:tool_call>\n<function=write_file>\n<parameter=path>a.py</parameter>\n<parameter=text>{CODE}"
              "</parameter>\n</function>\n</seed:tool_call>", (FILE,), "",
              "The budget is 512.</seed:cot_budget_reflect>\nThe format is <seed:tool_call>\n"
              "<function=get_weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>. So I call.\n"
              "<seed:cot_budget_reflect>I have used 131 tokens.</seed:cot_budget_reflect>", "<seed:think>"),
    Published("glm", "<think>First.</think>I look.<tool_call>write_file<arg_key>path</arg_key><arg_value>a.py"
              f"</arg_value><arg_key>text</arg_key><arg_value>{CODE}</arg_value></tool_call><tool_call>now</tool_call>",
              (FILE, NOW), "I look.", "First.", THINK),
    Published("qwen3_coder", "I look.\n\n<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n"
              f"<parameter=text>\n{CODE}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n"
              "</function>\n</tool_call>", (FILE, NOW), "I look."),
    Published("qwen3_coder", "Sure! I look.<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n"
              '</parameter>\n<parameter=meta>\n{"a": 10, \n "b": 20}\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
              "</function>\n</tool_call>", (("get_weather", {"city": "Oslo", "meta": {"a": 10, "b": 20}, "days": 3}),),
              "Sure! I look."),
    Published("mistral", f'I look{{[TOOL_CALLS]bash{json.dumps(BASH[1])}[TOOL_CALLS]get_weather{ARGS}', (BASH, OSLO),
              "I look{"),
    Published("mistral", f'Hello[TOOL_CALLS]  [ {{"arguments" : {ARGS}, "name":"get_weather" }} ]', (OSLO,), "Hello"),
    Published("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGS}, "id": "428427bd5"}}, {NOTHING}]',
              (OSLO, NOW)),
    Published("deepseek", f"I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGS}"
              "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
              (OSLO, NOW), "I look."),
    Published("kimi_k2", "I look. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0 "
              f"<|tool_call_argument_begin|>{ARGS}<|tool_call_end|><|tool_call_begin|>functions.now:1 "
              "<|tool_call_argument_begin|>{} <|tool_call_end|><|tool_calls_section_end|>", (OSLO, NOW), "I look."),
    Published("kimi_k2", f"I look. <|tool_calls_section_begin|><|tool_call_begin|>0 <|tool_call_argument_begin|>{ARGS}"
              f"<|tool_call_end|><|tool_call_begin|>call_1<|tool_call_argument_begin|>{json.dumps(BASH[1])}"
              "<|tool_call_end|><|tool_calls_section_end|>", (OSLO, BASH), "I look."),
    Published("functiongemma", "I look. <start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:3}"
              "<end_function_call><start_function_call>call:now{}<end_function_call>", (OSLO, NOW), "I look."),
    Published("functiongemma", "<start_function_call>call:get_weather{city:<escape>7<escape>,days:<escape>3<escape>}"
              "<end_function_call>", (("get_weather", {"city": "7", "days": 3}),)),
    Published("gemma4", 'I look. <|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'
              '<|tool_call>call:get_weather{meta:{<|"|>3<|"|>:<|"|>a<|"|>}}<tool_call|>',
              (OSLO, ("get_weather", {"meta": {"3": "a"}})), "I look."),
    Published("apertus", f'I look. <|tools_prefix|>[{{"get_weather": {ARGS}}}, {{"now": {{}}}}]<|tools_suffix|>',
              (OSLO, NOW), "I look."),
    Published("inkling", "<|content_thinking|>First.<|end_message|><|message_model|>get_weather"
              '<|content_invoke_tool_json|>{"name":"get_weather","args":{"city":"Oslo","days":3}}<|end_message|>'
              "<|content_model_end_sampling|>", (OSLO,), "", "First.", "<|content_thinking|>"),
    Published("internlm", f'I look. <|action_start|><|plugin|>{{"name": "get_weather", "parameters": {ARGS}}}'
              "<|action_end|>", (OSLO,), "I look."),
    Published("cohere", "<|START_THINKING|>I call a tool.<|END_THINKING|><|START_ACTION|>[\n    "
              f'{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {ARGS}}}\n]<|END_ACTION|>',
              (OSLO,), "", "I call a tool.", "<|START_THINKING|>"),
    Published("nemotron", f"<think>\nFirst.\n</think>\nI look.<TOOLCALL>[{ASKED}, {NOTHING}]</TOOLCALL>", (OSLO, NOW),
              "I look.", "\nFirst.\n", THINK),
    Published("nemotron", f'<TOOLCALL>[{{"name": "get_weather", "arguments": {json.dumps(ARGS)}}}]</TOOLCALL>',
              (OSLO,)),
    Published("lfm2", f"<|tool_call_start|>[write_file(path='a.py', text='{CODE}'), "
              "get_weather(city='Oslo', tags={'a'})]<|tool_call_end|>\nDone.",
              (FILE, ("get_weather", {"city": "Oslo", "tags": ["a"]})), "Done."),
    Published("lfm2", f"<|tool_call_start|> [bash(command='{SED}'), get_weather(city='Oslo', days=03), "
              "bash(command='python3 -c \"import a\nprint(a.b(3*x, c='\\,'))\"')]<|tool_call_end|>",
              (BASH, OSLO, ("bash", {"command": "python3 -c \"import a\nprint(a.b(3*x, c='\\,'))\""}))),
    Published("olmo3", "<function_calls>get_weather(city='Oslo', days=3)\nnow()</function_calls>", (OSLO, NOW)),
    Published("tool_calls", f" Sure!<tool_calls>[\n    {ASKED},\n    {NOTHING}\n]</tool_calls>", (OSLO, NOW), " Sure!"),
    Published("phi4", f"functools[\n  {ASKED},\n  {NOTHING}\n]", (OSLO, NOW)),
    Published("gpt_oss", "<|channel|>analysis<|message|>First.<|end|><|start|>assistant<|channel|>commentary "
              'to=functions.get_weather <|constrain|>json<|message|>{\n  "city": "Oslo",\n  "days": 3\n}<|call|>',
              (OSLO,), "", "First.", "<|channel|> analysis"),
    Published("gigachat", f"I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{ASKED}", (OSLO,), "I look."),
    Published("gigachat", f"I look.<|function_call|>{ASKED}", (OSLO,), "I look."),
    Published("granite", f'<|tool_call|> [{{"arguments": {ARGS}, "name": "get_weather"}}, {NOTHING}]', (OSLO, NOW)),
    Published("granite_20b_fc", f"I look.\n<function_call> {json.dumps(dict(json.loads(ASKED)), indent=2)}\n"
              f"<function_call> {NOTHING}", (OSLO, NOW), "I look."),
    Published("hermes", f'\n<tool_call>\n{{ "arguments": {ARGS}, "name": "get_weather"}}\n</tool_call> \n<tool_call>\n'
              '{ "arguments": {}, "name": "now"}\n</tool_call> ', (OSLO, NOW)),
    Published("hermes", f'I look.<tool_call>{{"name": "get_weather", "arguments": {json.dumps(ARGS)}}}</tool_call>'
              f"<tool_call>{NOTHING}</tool_call>", (OSLO, NOW), "I look."),
    Published("hermes", f"First.\n</think>\n\n<tool_call>\n{ASKED}\n</tool_call>\n", (OSLO,), "", "First.\n",
              "<think> <response>", True),
    Published("pythonic", "[get_weather(city='Martha\\'s \\\"bay\\\"', tags=['a', None, True], meta={'a': {}}, "
              "days=3), now()]",
              (("get_weather", {"city": "Martha's \"bay\"", "tags": ["a", None, True], "meta": {"a": {}}, "days": 3}),
               NOW)),
    Published("llama3_json", f'{{"name": "get_weather", "parameters": {ARGS}}} ; '
              f'{{"name": "now", "parameters": {{}}}};\n{{"name": "bash", "arguments": {json.dumps(BASH[1])}}} '
              "I used {bash} for this.", (OSLO, NOW, BASH), "I used {bash} for this."),
    Published("xlam", f"I look.\n```json\n[{ASKED}]\n```", (OSLO,), "I look."),
    Published("", "First.\n</think>\n\n<response>\nFour.\n</response>", (), "Four.", "First.\n",
              "<think> <response>", True),
    Published("", "<think>\nFirst.\n</think>\n<answer>\nFour.\n</answer>", (), "Four.", "\nFirst.\n",
              "<think> <answer>"),
    Published("", "<|channel>thought\nFirst.\nThen.<channel|>Four.", (), "Four.", "\nFirst.\nThen.", "<|channel>"),
    Published("", "<ifm|think>First.</ifm|think>Four.", (), "Four.", "First.", "<ifm|think>"),
    Published("", "<|inner_prefix|>First.<|inner_suffix|>Four.", (), "Four.", "First.", "<|inner_prefix|>"),
    Published("", "<mm:think>First.</mm:think>Four.", (), "Four.", "First.", "<mm:think>"),
    Published("", "</mm:think>Four.", (), "Four.", "", "<mm:think>"),
    Published("", "First.\n</longcat_think>\nFour.", (), "Four.", "First.\n", "<longcat_think>", True),
    Published("", "◁think▷First.◁/think▷Four.", (), "Four.", "First.", "◁think▷"),
    Published("", "[THINK]First\nthen.[/THINK]Four\nand.", (), "Four\nand.", "First\nthen.", "[THINK]"),
    Published("", "<reasoning>First.</reasoning>Four.", (), "Four.", "First.", "<reasoning>"),
    Published("", "Here is my thought process:First.Here is my response:Four.", (), "Four.", "First.",
              "Here is my thought process:"),
)  # fmt: skip
