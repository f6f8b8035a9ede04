"""pydantic-ai: text, streams, tools with their way back, structured output by tool and by schema, errors."""

import asyncio
import sys
from typing import Annotated

from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

ASK = "How warm is it in Rome?"
# One client: retries would hide what is tested.
provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0))
model = OpenAIChatModel("ryzanstein-tiny", provider=provider)


class Weather(BaseModel, extra="forbid"):
    """How warm it is."""

    city: str = Field(max_length=12)
    degrees: int = Field(ge=-50, le=50)


async def text() -> None:
    agent = Agent(model)
    settings = {"max_tokens": 20, "temperature": 0}
    whole = await agent.run(ASK, model_settings=settings)
    async with agent.run_stream(ASK, model_settings=settings) as stream:
        assert await stream.get_output() == whole.output


async def structured() -> None:
    for output in (NativeOutput(Weather), ToolOutput(Weather, name="answer")):
        answer = await Agent(model, output_type=output).run(ASK, model_settings={"max_tokens": 300})
        assert isinstance(answer.output, Weather)


async def tools() -> None:
    """The model must call one of two: the tool, or the one that gives the answer. Which one is chance."""
    cities: list[str] = []
    agent = Agent(model, output_type=ToolOutput(Weather, name="answer"))

    @agent.tool_plain
    def get_weather(city: Annotated[str, Field(max_length=12)]) -> str:
        """How warm it is in a city."""
        cities.append(city)
        return "21 degrees"

    for seed in range(40):
        settings = {"max_tokens": 500, "temperature": 1.3, "seed": seed, "parallel_tool_calls": False}
        answer = await agent.run(ASK, model_settings=settings)
        assert isinstance(answer.output, Weather)
        if cities:
            return
    raise AssertionError("the tool was never called")


async def errors() -> None:
    try:
        await Agent(OpenAIChatModel("nope", provider=provider)).run(ASK)
    except ModelHTTPError as error:
        assert error.status_code == 404
        assert "nope" in str(error.body)
    else:
        raise AssertionError("nope")


async def main() -> None:
    await text()
    await structured()
    await tools()
    await errors()


asyncio.run(main())
