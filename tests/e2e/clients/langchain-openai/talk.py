"""langchain-openai: text, streams, bound tools, structured output, errors."""

import sys

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

llm = ChatOpenAI(
    base_url=f"{sys.argv[1]}/v1",
    api_key="unused",
    model="ryzanstein-tiny",
    temperature=0,
    max_tokens=300,
    max_retries=0,
)


class Weather(BaseModel, extra="forbid"):
    """How warm it is."""

    city: str = Field(max_length=12)
    degrees: int = Field(ge=-50, le=50)


class City(BaseModel, extra="forbid"):
    """Where."""

    city: str = Field(max_length=12)


@tool(args_schema=City)
def get_weather(city: str) -> str:
    """How warm it is in a city."""
    return f"21 degrees in {city}"


# text, whole and streamed
short = llm.bind(max_tokens=20)
whole = short.invoke("How warm is it in Rome?")
assert "".join(chunk.content for chunk in short.stream("How warm is it in Rome?")) == whole.content
assert whole.usage_metadata["output_tokens"] > 0

# structured output, in all of its ways
for method in ("json_schema", "function_calling"):
    answer = llm.with_structured_output(Weather, method=method).invoke("How warm is it in Rome?")
    assert isinstance(answer, Weather)

# tools, whole and streamed, and the way back
bound = llm.bind_tools([get_weather], tool_choice="get_weather", strict=True)
ask = HumanMessage("How warm is it in Rome?")
message = bound.invoke([ask])
(call,) = message.tool_calls
result = get_weather.invoke(call)
assert isinstance(result, ToolMessage)
assert short.invoke([ask, message, result]).content is not None
gathered = None
for chunk in bound.stream([ask]):
    gathered = chunk if gathered is None else gathered + chunk
assert gathered.tool_calls[0]["args"] == call["args"]

# errors
try:
    ChatOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", model="nope", max_retries=0).invoke("Hello")
except openai.NotFoundError as error:
    assert "nope" in str(error)
else:
    raise AssertionError("nope")
