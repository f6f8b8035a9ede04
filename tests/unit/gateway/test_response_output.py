"""The events of a response, read by the official client, give the items that the response has."""

from __future__ import annotations

from typing import Any

import pytest
from openai._models import construct_type_unchecked
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent

from services.gateway.api.ignored import Ignored
from services.gateway.generation.output import OutputChunk
from services.gateway.generation.tokens import FinishReason
from services.gateway.http.responses.output import OutputItems
from services.gateway.http.responses.tools import ToolOffer
from services.gateway.tools.calls import CallDelta

FIRST, SECOND = CallDelta(0, "get", "", "call00001"), CallDelta(1, "now", "{}", "call00002")
CASES: dict[str, tuple[list[OutputChunk], list[tuple[str, str, str]]]] = {
    "text": (
        [OutputChunk("He"), OutputChunk("llo"), OutputChunk(finish=FinishReason.STOP)],
        [("message", "completed", "Hello")],
    ),
    "nothing": ([OutputChunk(finish=FinishReason.STOP)], [("message", "completed", "")]),
    "cut text": ([OutputChunk("He", finish=FinishReason.LENGTH)], [("message", "incomplete", "He")]),
    "reasoning and text in one piece": (
        [
            OutputChunk(reasoning="so", ids=[1, 2], reasoning_tokens=2),
            OutputChunk("A", reasoning="!", ids=[3, 5], reasoning_tokens=1),
            OutputChunk("B", ids=[4], finish=FinishReason.STOP),
        ],
        [("reasoning", "completed", "so!"), ("message", "completed", "AB")],
    ),
    "cut reasoning": ([OutputChunk(reasoning="so", finish=FinishReason.LENGTH)], [("reasoning", "incomplete", "so")]),
    "calls": (
        [
            OutputChunk("Wait.", calls=[FIRST]),
            OutputChunk(calls=[CallDelta(0, arguments='{"a":')]),
            OutputChunk(calls=[CallDelta(0, arguments="1}"), SECOND]),
            OutputChunk(finish=FinishReason.TOOL_CALLS),
        ],
        [
            ("message", "completed", "Wait."),
            ("function_call", "completed", '{"a":1}'),
            ("function_call", "completed", "{}"),
        ],
    ),
    "text after a call": (
        [OutputChunk(calls=[SECOND]), OutputChunk("Done.", finish=FinishReason.TOOL_CALLS)],
        [("function_call", "completed", "{}"), ("message", "completed", "Done.")],
    ),
}


def text_of(item: dict[str, Any]) -> str:
    return str(item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


@pytest.mark.parametrize("name", CASES)
def test_events_and_items_agree(name: str) -> None:
    chunks, expected = CASES[name]
    output = OutputItems("00", None, ToolOffer(Ignored()))
    events = [event for chunk in chunks for event in output.add(chunk)]
    events += list(output.close())
    assert [(item["type"], item["status"], text_of(item)) for item in output.items] == expected
    assert output.reasoning_tokens == (3 if "one piece" in name else 0)
    calls = [item for item in output.items if item["type"] == "function_call"]
    assert [item["name"] for item in calls] == [name for name in ("get", "now") if name in str(chunks)][: len(calls)]
    assert len({item["call_id"] for item in calls}) == len(calls)
    state: ResponseStreamState[None] = ResponseStreamState(input_tools=omit, text_format=omit)
    begun = {"id": "resp_00", "object": "response", "output": [], "status": "in_progress"}
    done = begun | {"output": output.items, "status": "completed"}
    whole = [{"type": "response.created", "response": begun}, *events, {"type": "response.completed", "response": done}]
    for number, event in enumerate(whole):
        numbered: Any = event | {"sequence_number": number}
        read: Any = construct_type_unchecked(value=numbered, type_=ResponseStreamEvent)
        state.handle_event(read)
    ended = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert ended == output.items
    deltas = ["" for _ in output.items]
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] += event["delta"]
    assert deltas == [text for _, _, text in expected]


def test_events_of_open_responses_differ_in_the_names_of_reasoning_alone() -> None:
    chunks, _ = CASES["reasoning and text in one piece"]
    read = []
    for open_names in (False, True):
        output = OutputItems("00", None, ToolOffer(Ignored()), open_names=open_names)
        read.append([event for chunk in chunks for event in output.add(chunk)] + list(output.close()))
    assert read[1] != read[0]
    shared = [event | {"type": event["type"].replace("reasoning_text.", "reasoning.")} for event in read[0]]
    assert read[1] == shared
