"""openai: text, streams, tools, structured output, errors."""

import json
import sys
from typing import Literal

import openai
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

MODEL = "ryzanstein-tiny"
client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)
ask = [{"role": "user", "content": "How warm is it in Rome?"}]


class Weather(BaseModel):
    """The schema of a tool's arguments, and of an answer."""

    city: str = Field(max_length=12)
    unit: Literal["C", "F"]


# text, whole and streamed
whole = client.chat.completions.create(model=MODEL, messages=ask, max_tokens=20, temperature=0)
chunks = list(client.chat.completions.create(model=MODEL, messages=ask, max_tokens=20, temperature=0, stream=True))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content

# structured output, read by the client
parsed = client.chat.completions.parse(model=MODEL, messages=ask, response_format=Weather, max_tokens=200)
assert isinstance(parsed.choices[0].message.parsed, Weather)

# tools, read by the client, and the way back
tool = pydantic_function_tool(Weather, name="get_weather")
called = client.chat.completions.parse(model=MODEL, messages=ask, tools=[tool], tool_choice="required", max_tokens=400)
calls = called.choices[0].message.tool_calls
assert calls
assert all(isinstance(call.function.parsed_arguments, Weather) for call in calls)
history = [*ask, called.choices[0].message]
history += [{"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 21})} for call in calls]
answer = client.chat.completions.create(model=MODEL, messages=history, tools=[tool], tool_choice="none", max_tokens=8)
assert answer.choices[0].message.content is not None

# tools, streamed
with client.chat.completions.stream(model=MODEL, messages=ask, tools=[tool], tool_choice="required") as events:
    final = events.get_final_completion().choices[0]
assert final.finish_reason == "tool_calls"
assert final.message.tool_calls[0].function.parsed_arguments

# errors
for model, fields, kind in (
    ("nope", {}, openai.NotFoundError),
    (MODEL, {"temperature": -1}, openai.BadRequestError),
    (MODEL, {"tool_choice": "required"}, openai.BadRequestError),
):
    try:
        client.chat.completions.create(model=model, messages=ask, **fields)
    except kind as error:
        assert error.body["message"]
    else:
        raise AssertionError(fields)
