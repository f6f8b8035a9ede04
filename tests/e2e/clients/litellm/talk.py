"""litellm: text, streams, tools, structured output, errors."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # it would look for prices on the network

import litellm
from pydantic import BaseModel, Field

BASE = {"api_base": f"{sys.argv[1]}/v1", "api_key": "unused", "num_retries": 0, "temperature": 0}
ask = [{"role": "user", "content": "How warm is it in Rome?"}]


class Weather(BaseModel, extra="forbid"):
    """An answer."""

    city: str = Field(max_length=12)
    degrees: int = Field(ge=-50, le=50)


# For vLLM litellm takes `additionalProperties` away.
PARAMETERS = Weather.model_json_schema() | {"maxProperties": 2}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}

for model in ("openai/ryzanstein-tiny", "hosted_vllm/ryzanstein-tiny"):
    common = {**BASE, "model": model, "messages": ask}
    # text, whole and streamed
    whole = litellm.completion(**common, max_tokens=20)
    chunks = list(litellm.completion(**common, max_tokens=20, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content

    # structured output
    answer = litellm.completion(**common, max_tokens=200, response_format=Weather)
    Weather.model_validate_json(answer.choices[0].message.content)

    # tools, streamed, and the way back
    request = {**common, "tools": [TOOL], "tool_choice": "required", "max_tokens": 400}
    rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**request, stream=True)))
    message = rebuilt.choices[0].message
    assert message.tool_calls
    assert message.tool_calls[0].function.name == "get_weather"
    Weather.model_validate_json(message.tool_calls[0].function.arguments)
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 21})} for call in message.tool_calls
    ]
    history = [*ask, message.model_dump(), *results]
    last = litellm.completion(**{**common, "messages": history}, tools=[TOOL], tool_choice="none", max_tokens=8)
    assert last.choices[0].message.content is not None

    # errors
    for fields, kind in (
        ({"model": model.replace("tiny", "none")}, litellm.NotFoundError),
        ({"max_tokens": -1}, litellm.BadRequestError),
    ):
        try:
            litellm.completion(**{**common, **fields})
        except kind as error:
            assert str(error)
        else:
            raise AssertionError(fields)
