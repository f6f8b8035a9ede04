"""anthropic: text, streams, tools with their way back, structured output, counted tokens, errors."""

import sys
from typing import Literal

import anthropic
from pydantic import BaseModel

MODEL = "ryzanstein-tiny"
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="unused", max_retries=0)
ask = [{"role": "user", "content": "How warm is it in Rome?"}]
TOOL = {
    "name": "get_weather",
    "description": "How warm it is in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
common = {"model": MODEL, "messages": ask, "max_tokens": 20, "extra_body": {"temperature": 0}}

# text, whole and streamed
whole = client.messages.create(**common, system="Be brief.")
with client.messages.stream(**common, system="Be brief.") as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == "".join(block.text for block in whole.content)
assert final.usage == whole.usage
counted = client.messages.count_tokens(model=MODEL, messages=ask, system="Be brief.")
assert counted.input_tokens == whole.usage.input_tokens

# tools, whole and streamed, and the way back
request = {**common, "max_tokens": 400, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}
message = client.messages.create(**request)
(call,) = [block for block in message.content if block.type == "tool_use"]
assert message.stop_reason == "tool_use"
assert call.input.keys() == {"city", "unit"}
with client.messages.stream(**request) as stream:
    streamed = stream.get_final_message()
assert [block.input for block in streamed.content if block.type == "tool_use"] == [call.input]
result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
history = [*ask, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
last = client.messages.create(**{**common, "messages": history, "tools": [TOOL], "tool_choice": {"type": "none"}})
assert last.stop_reason in ("end_turn", "max_tokens")

# its own loop of calls and results
warm = []


@anthropic.beta_tool
def is_warm(value: bool) -> str:
    """Say whether it is warm."""
    warm.append(value)
    return "noted"


forced = {"tools": [is_warm], "tool_choice": {"type": "tool", "name": "is_warm"}}
runner = client.beta.messages.tool_runner(**{**common, "max_tokens": 400}, **forced, max_iterations=2)
assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]
assert len(warm) == 2


class Answer(BaseModel):
    """A structured answer."""

    unit: Literal["C", "F"]
    certain: bool


# structured output, read by the client, and an answer whose beginning is given
parsed = client.messages.parse(**{**common, "max_tokens": 400}, output_format=Answer)
assert isinstance(parsed.parsed_output, Answer)
begun = client.messages.create(**{**common, "messages": [*ask, {"role": "assistant", "content": "It is"}]})
assert begun.usage.input_tokens > client.messages.count_tokens(model=MODEL, messages=ask).input_tokens
assert [model.id for model in client.models.list()] == [MODEL]

# errors
for fields, kind in (({"model": "nope"}, anthropic.NotFoundError), ({"max_tokens": -1}, anthropic.BadRequestError)):
    try:
        client.messages.create(**{**common, **fields})
    except kind as error:
        assert error.body["error"]["message"]
    else:
        raise AssertionError(fields)
