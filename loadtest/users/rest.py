"""Users of the OpenAI-compatible API: conversations, and completions of code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import gevent
from locust import HttpUser, task

from loadtest.timing import AnswerClock
from loadtest.traffic import choose_system_prompt, code_prompt, conversation
from loadtest.users.base import Person

_ABANDONED = 0.05  # share of completions that the user abandons
_ABANDON_AFTER = 5  # messages


def events_of(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON events of a server-sent event stream; raises EOFError if it ends without `[DONE]`."""
    for line in lines:
        if line == b"data: [DONE]":
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    raise EOFError("the stream ended before [DONE]")


def chat_text(event: dict[str, Any]) -> str:
    """The text of a chat event."""
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def completion_text(event: dict[str, Any]) -> str:
    """The text of a completion event."""
    return "".join(choice["text"] for choice in event["choices"])


class RestUser(HttpUser, Person):
    """Streams answers over HTTP."""

    abstract = True

    def stream(
        self, path: str, body: dict[str, Any], text_of: Callable[[dict[str, Any]], str], messages: int | None = None
    ) -> str:
        """Send a request, read the answer (or its first `messages`), report its times; return its text."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}, "session_id": self.session_id}
        name = path if messages is None else f"{path} (abandoned)"
        clock, text, tokens = AnswerClock(), "", 0
        with self.client.post(path, json=body, stream=True, catch_response=True, name=name) as response:
            if response.status_code != 200:
                response.failure(f"{response.status_code}: {response.text[:200]}")
                return ""
            try:
                for event in events_of(response.iter_lines()):
                    if "error" in event:
                        response.failure(event["error"]["message"])
                        return text
                    if added := text_of(event):
                        clock.arrived()
                        text += added
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                    if clock.messages == messages:
                        break
            except (EOFError, OSError) as error:
                response.failure(error)
                return text
            times = clock.times(tokens or clock.messages)
            # Locust's own time for a streamed response ends with the headers.
            response.request_meta["response_time"] = times.total
            response.request_meta["response_length"] = len(text.encode())
        self.report(name, times)
        return text


class ChatUser(RestUser):
    """A user that chats for a few turns, with think time between them, in one session."""

    weight = 5

    @task
    def talk(self) -> None:
        """Hold one conversation; every turn sends the history."""
        messages = [{"role": "system", "content": choose_system_prompt(self.rng)}]
        for turn in conversation(self.rng, self.think_s):
            gevent.sleep(turn.think_s)
            messages.append({"role": "user", "content": turn.text})
            body = {"messages": messages, "max_tokens": self.rng.choice((32, 64, 96)), "temperature": 0.7}
            answer = self.stream("/v1/chat/completions", body, chat_text)
            messages.append({"role": "assistant", "content": answer})


class CompletionUser(RestUser):
    """An editor that asks for the next lines of code. If the programmer types on, it abandons the answer."""

    weight = 3

    @task
    def complete(self) -> None:
        """Ask for one completion."""
        body = {"prompt": code_prompt(self.rng), "max_tokens": self.rng.choice((16, 32, 64)), "temperature": 0.2}
        abandoned = self.rng.random() < _ABANDONED
        self.stream("/v1/completions", body, completion_text, _ABANDON_AFTER if abandoned else None)
