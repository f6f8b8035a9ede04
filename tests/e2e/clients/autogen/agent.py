"""autogen: an agent that calls a tool and reads its result, whole and streamed."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_ext.models.openai import OpenAIChatCompletionClient

url, name = sys.argv[1:]
cities: list[str] = []
INFO = {
    "vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True,
}  # fmt: skip


async def get_weather(city: str) -> str:
    """How warm it is in a city."""
    cities.append(city)
    return "21 in the shade"


async def main() -> None:
    client = OpenAIChatCompletionClient(model=name, base_url=f"{url}/v1", api_key="unused", model_info=INFO)
    for stream in (False, True):
        agent = AssistantAgent(
            "weather", client, tools=[get_weather], reflect_on_tool_use=True, model_client_stream=stream
        )
        *_, result = [item async for item in agent.run_stream(task="CALL get_weather?city=Rome")]
        assert isinstance(result, TaskResult)
        assert "21 in the shade" in result.messages[-1].content, result.messages
        assert stream or result.messages[-1].models_usage.prompt_tokens > 0
    assert cities == ["Rome"] * 2, cities
    await client.close()


asyncio.run(main())
