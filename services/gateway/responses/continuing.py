"""The events of a response that a second gateway makes again: what clients may have read comes once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
_STATES = frozenset({"response.created", "response.queued", "response.in_progress"})


class DivergedError(Exception):
    """The second run does not write what the first one has published."""


@dataclass(slots=True)
class _Step:
    """An event, or the joined text of neighbouring deltas."""

    place: tuple[Any, ...]  # key that distinguishes it from other events
    text: str


def is_delta(event: Event) -> bool:
    """Whether an event only appends a text."""
    return str(event["type"]).endswith(".delta")


def place_of(event: Event) -> tuple[Any, ...]:
    """The subject of an event; deltas with the same place in a row are one text."""
    return event["type"], event.get("output_index"), event.get("content_index")


def joined(first: Event, second: Event) -> Event:
    """Two deltas of the same place as one."""
    whole = first | {"delta": first["delta"] + second["delta"]}
    if "logprobs" in first:
        whole["logprobs"] = [*first["logprobs"], *second["logprobs"]]
    return whole


class Continuation:
    """Leaves out of a run what has been published."""

    def __init__(self, published: Iterable[Event]) -> None:
        self._seen: set[str] = set()
        self._steps: deque[_Step] = deque()
        for event in published:
            if event["type"] in _STATES:
                self._seen.add(event["type"])
                continue
            step = _Step(place_of(event), event["delta"] if is_delta(event) else "")
            if is_delta(event) and self._steps and self._steps[-1].place == step.place:
                self._steps[-1].text += step.text
            else:
                self._steps.append(step)

    def new_part(self, event: Event) -> Event | None:
        """The part of an event that is not published yet, if there is one; raises DivergedError."""
        if event["type"] in _STATES:
            known = event["type"] in self._seen
            self._seen.add(event["type"])
            return None if known else event
        if not self._steps:
            return event
        if is_delta(event):
            return self._rest_of_delta(event)
        self._match(event)
        return None

    def _match(self, event: Event) -> None:
        if self._steps[0].place[0].endswith(".delta") and not self._steps[0].text:
            self._steps.popleft()  # all of its text has come again
        if not self._steps or self._steps.popleft().place != place_of(event):
            raise DivergedError(f"another event than {event['type']} was published")

    def _rest_of_delta(self, event: Event) -> Event | None:
        step, text = self._steps[0], event["delta"]
        if step.place != place_of(event):
            raise DivergedError(f"another event than {event['type']} was published")
        common = min(len(step.text), len(text))
        if step.text[:common] != text[:common]:
            raise DivergedError("another text was published")
        step.text, rest = step.text[common:], text[common:]
        if not rest:
            return None
        if len(self._steps) > 1:
            raise DivergedError("a shorter text was published")
        self._steps.clear()
        return event | {"delta": rest}
