"""openai's Responses: text, streams, memory, tools, structured text, errors."""

import json
import sys
from typing import Literal

import openai
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

MODEL = "ryzanstein-tiny"
client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)
ASK = "How warm is it in Rome?"


class Weather(BaseModel):
    """The schema of a tool's arguments, and of an answer."""

    city: str = Field(max_length=12)
    unit: Literal["C", "F"]


# text, whole and streamed
short = {"model": MODEL, "input": ASK, "instructions": "Be brief.", "max_output_tokens": 20, "temperature": 0}
whole = client.responses.create(**short)
events = list(client.responses.create(**short, stream=True))
assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
assert [event.sequence_number for event in events] == list(range(len(events)))
assert events[0].type == "response.created"
assert events[-1].type in ("response.completed", "response.incomplete")
assert events[-1].response.output_text == whole.output_text

# memory
second = client.responses.create(model=MODEL, input="Why?", previous_response_id=whole.id, max_output_tokens=8)
assert second.previous_response_id == whole.id
assert second.usage.input_tokens > whole.usage.input_tokens
assert client.responses.retrieve(whole.id).output_text == whole.output_text
assert [item.role for item in client.responses.input_items.list(whole.id)] == ["user"]
client.responses.delete(whole.id)
try:
    client.responses.retrieve(whole.id)
except openai.NotFoundError as error:
    assert error.body["message"]
else:
    raise AssertionError("a deleted response is still there")

# structured text, read by the client, whole and streamed
parsed = client.responses.parse(model=MODEL, input=ASK, text_format=Weather, max_output_tokens=200)
assert isinstance(parsed.output_parsed, Weather)
with client.responses.stream(model=MODEL, input=ASK, text_format=Weather, max_output_tokens=200) as stream:
    stream.until_done()
assert isinstance(stream.get_final_response().output_parsed, Weather)

# tools, read by the client, and the way back by memory
tool = pydantic_function_tool(Weather, name="get_weather")  # in the form of chats: the client rewrites it
plain = {"type": "function", **tool["function"]}
must = {"model": MODEL, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
called = client.responses.parse(input=ASK, max_output_tokens=400, **must)
(call,) = [item for item in called.output if item.type == "function_call"]
assert isinstance(call.parsed_arguments, Weather)
result = {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps({"degrees": 21})}
answer = client.responses.create(
    model=MODEL, input=[result], previous_response_id=called.id, tools=[plain], tool_choice="none", max_output_tokens=8
)
assert [item.type for item in answer.output] == ["message"]

# tools, streamed
with client.responses.stream(input=ASK, max_output_tokens=400, **must) as stream:
    pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
(streamed,) = [item for item in stream.get_final_response().output if item.type == "function_call"]
assert "".join(pieces) == streamed.arguments
Weather.model_validate_json(streamed.arguments)

# errors
for fields, kind in (
    ({"model": "nope", "input": ASK}, openai.NotFoundError),
    ({"model": MODEL, "input": ASK, "temperature": -1}, openai.BadRequestError),
    (
        {"model": MODEL, "input": ASK, "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        openai.BadRequestError,
    ),
    ({"model": MODEL, "input": ASK, "previous_response_id": whole.id}, openai.BadRequestError),
):
    try:
        client.responses.create(**fields)
    except kind as error:
        assert error.body["message"]
    else:
        raise AssertionError(fields)
