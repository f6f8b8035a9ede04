"""smolagents: text, streams, a tool's call, structured text, errors."""

import json
import sys
from typing import ClassVar

import openai
from smolagents import OpenAIModel, Tool

ASK = [{"role": "user", "content": "How warm is it in Rome?"}]
options = {"api_base": f"{sys.argv[1]}/v1", "api_key": "unused", "client_kwargs": {"max_retries": 0}, "retry": False}
model = OpenAIModel("ryzanstein-tiny", **options, temperature=0)


class Weather(Tool):
    """A tool."""

    name = "get_weather"
    description = "How warm it is in a city."
    inputs: ClassVar = {"city": {"type": "string", "description": "where", "maxLength": 12}}
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"21 degrees in {city}"


# text, whole and streamed
whole = model.generate(ASK, max_tokens=20)
pieces = [delta.content or "" for delta in model.generate_stream(ASK, max_tokens=20)]
assert "".join(pieces) == whole.content
assert whole.token_usage.output_tokens > 0

# a tool: this library demands a call
called = model.generate(ASK, tools_to_call_from=[Weather()], max_tokens=300)
(call,) = called.tool_calls[:1]
assert call.function.name == "get_weather"
arguments = call.function.arguments
assert isinstance((json.loads(arguments) if isinstance(arguments, str) else arguments)["city"], str)

# structured text
schema = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}}
assert isinstance(json.loads(model.generate(ASK, response_format=form, max_tokens=200).content)["degrees"], int)

# errors
try:
    OpenAIModel("nope", **options).generate(ASK)
except openai.NotFoundError as error:
    assert "nope" in str(error)
else:
    raise AssertionError("nope")
