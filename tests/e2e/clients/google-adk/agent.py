"""google-adk: an agent that calls a tool and reads its result, whole and streamed, with a memory."""

import asyncio
import sys

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

url, name = sys.argv[1:]
cities: list[str] = []


def get_weather(city: str) -> dict:
    """How warm it is in a city."""
    cities.append(city)
    return {"degrees": "21 in the shade"}


async def main() -> None:
    model = LiteLlm(model=f"openai/{name}", api_base=f"{url}/v1", api_key="unused")
    agent = LlmAgent(name="weather", model=model, instruction="Be brief.", tools=[get_weather])
    runner = InMemoryRunner(agent=agent, app_name="weather")
    session = await runner.session_service.create_session(app_name="weather", user_id="u")
    for mode in (StreamingMode.NONE, StreamingMode.SSE):
        message = types.Content(role="user", parts=[types.Part(text="CALL get_weather?city=Rome")])
        texts: list[str] = []
        config = RunConfig(streaming_mode=mode)
        async for event in runner.run_async(user_id="u", session_id=session.id, new_message=message, run_config=config):
            if event.is_final_response() and event.content:
                texts += [part.text or "" for part in event.content.parts or ()]
        assert "21 in the shade" in "".join(texts), (mode, texts)
    assert cities == ["Rome"] * 2, cities


asyncio.run(main())
