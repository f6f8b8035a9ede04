"""openai-agents over chat completions: text, streams, a tool and its result, an answer by a schema, errors."""

import asyncio
import sys
from typing import Annotated

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

ASK = "How warm is it in Rome?"
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)
model = OpenAIChatCompletionsModel("ryzanstein-tiny", client)
cities: list[str] = []


class Weather(BaseModel, extra="forbid"):
    """How warm it is."""

    city: str = Field(max_length=12)
    degrees: int = Field(ge=-50, le=50)


@function_tool
def get_weather(city: Annotated[str, Field(max_length=12)]) -> str:
    """How warm it is in a city."""
    cities.append(city)
    return "21 degrees"


async def text() -> None:
    agent = Agent("talker", model=model, model_settings=ModelSettings(max_tokens=20, temperature=0))
    whole = await Runner.run(agent, ASK)
    streamed = Runner.run_streamed(agent, ASK)
    kinds = {event.type async for event in streamed.stream_events()}
    assert "raw_response_event" in kinds
    assert streamed.final_output == whole.final_output


async def structured() -> None:
    agent = Agent("reporter", model=model, output_type=Weather, model_settings=ModelSettings(max_tokens=300))
    assert isinstance((await Runner.run(agent, ASK)).final_output, Weather)


async def tools() -> None:
    """Called once, as required; then the model may answer."""
    settings = ModelSettings(max_tokens=300, tool_choice="required", parallel_tool_calls=False, temperature=0)
    agent = Agent("asker", model=model, tools=[get_weather], model_settings=settings)
    answer = await Runner.run(agent, ASK)
    assert len(cities) == 1
    assert isinstance(answer.final_output, str)
    streamed = Runner.run_streamed(agent, ASK)
    names = [event.name async for event in streamed.stream_events() if event.type == "run_item_stream_event"]
    assert names[:2] == ["tool_called", "tool_output"]
    assert len(cities) == 2


async def errors() -> None:
    try:
        await Runner.run(Agent("lost", model=OpenAIChatCompletionsModel("nope", client)), ASK)
    except openai.NotFoundError as error:
        assert "nope" in error.message
    else:
        raise AssertionError("nope")


async def main() -> None:
    await text()
    await structured()
    await tools()
    await errors()


asyncio.run(main())
