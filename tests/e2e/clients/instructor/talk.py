"""instructor: structured output in each of its modes that OpenAI's API has, streamed parts of it, errors."""

import sys

import instructor
from instructor.core import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)
ask = [{"role": "user", "content": "How warm is it in Rome?"}]


class Weather(BaseModel, extra="forbid"):
    """How warm it is."""

    city: str = Field(max_length=12)
    degrees: int = Field(ge=-50, le=50)


common = {"model": "ryzanstein-tiny", "messages": ask, "max_tokens": 400, "max_retries": 0}
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    asking = instructor.from_openai(client, mode=mode)
    answer = asking.chat.completions.create(response_model=Weather, **common)
    assert isinstance(answer, Weather), mode
    *_, last = asking.chat.completions.create_partial(response_model=Weather, **common)
    assert last.city is not None, mode

try:
    instructor.from_openai(client).chat.completions.create(response_model=Weather, **{**common, "model": "nope"})
except InstructorRetryException as error:
    assert "nope" in str(error)
else:
    raise AssertionError("nope")
