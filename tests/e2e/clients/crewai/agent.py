"""crewai: a crew of one whose agent calls a tool and reads its result."""

import os
import sys

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

url, name = sys.argv[1:]
cities: list[str] = []


@tool("get_weather")
def get_weather(city: str) -> str:
    """How warm it is in a city."""
    cities.append(city)
    return "21 in the shade"


llm = LLM(model=name, provider="openai", base_url=f"{url}/v1", api_key="unused")
agent = Agent(role="reporter", goal="Reports the weather", backstory="None.", llm=llm, tools=[get_weather])
task = Task(description="CALL get_weather?city=Rome", expected_output="How warm it is", agent=agent)
result = Crew(agents=[agent], tasks=[task]).kickoff()
assert cities == ["Rome"], cities
assert "21 in the shade" in result.raw, result.raw
