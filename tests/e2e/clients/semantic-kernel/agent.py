"""semantic-kernel: an agent whose plugin is called and whose result is read, whole and streamed."""

import asyncio
import sys

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

url, name = sys.argv[1:]
cities: list[str] = []


class Weather:
    """A plugin."""

    @kernel_function(description="How warm it is in a city")
    def get(self, city: str) -> str:
        cities.append(city)
        return "21 in the shade"


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    service = OpenAIChatCompletion(ai_model_id=name, async_client=client)
    agent = ChatCompletionAgent(service=service, name="weather", instructions="Be brief.", plugins=[Weather()])
    ask = "CALL Weather-get?city=Rome"
    whole = await agent.get_response(messages=ask)
    assert "21 in the shade" in str(whole.message), whole
    pieces = [str(piece.message) async for piece in agent.invoke_stream(messages=ask)]
    assert "21 in the shade" in "".join(pieces), pieces
    assert cities == ["Rome"] * 2, cities


asyncio.run(main())
