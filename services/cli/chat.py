"""`ryzanstein chat`: a conversation in the terminal, over the public REST API."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from uuid import uuid4

import httpx
from rich.console import Console
from rich.prompt import Prompt

from services.cli.errors import CommandError
from services.cli.gateway import ask, authorization, error_message


@dataclass(slots=True)
class ChatSession:
    """A conversation: its turns, and the gateway and model that answer."""

    url: str
    model: str
    temperature: float
    max_tokens: int
    api_key: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    session: str = field(default_factory=lambda: uuid4().hex)

    def ask(self, text: str) -> Iterator[str]:
        """Send one user turn, yield the answer as it arrives, and store both."""
        self.messages.append({"role": "user", "content": text})
        answer: list[str] = []
        body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        headers = {"x-session-id": self.session} | authorization(self.api_key)
        url = f"{self.url}/v1/chat/completions"
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=120, trust_env=False) as response:
                if response.is_error:
                    response.read()
                    raise CommandError(error_message(response))
                for delta in _deltas(response.iter_lines()):
                    answer.append(delta)
                    yield delta
        except httpx.HTTPError as error:
            raise CommandError(f"{self.url} does not answer: {error}") from error
        self.messages.append({"role": "assistant", "content": "".join(answer)})


def _deltas(lines: Iterator[str]) -> Iterator[str]:
    """Text deltas of a chat stream; raises :class:`CommandError` for an error event."""
    for line in lines:
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise CommandError(event["error"]["message"])
        for choice in event["choices"]:
            if content := choice["delta"].get("content"):
                yield content


def first_model(url: str, api_key: str = "") -> str:
    """The first model that the gateway serves; raises :class:`CommandError` if the gateway does not answer."""
    models = ask("GET", url, "/v1/models", api_key, timeout=5)["data"]
    if not models:
        raise CommandError(f"{url} serves no model")
    return str(models[0]["id"])


def run(conversation: ChatSession) -> None:
    """In a terminal, prompt and answer until Ctrl-D; otherwise answer standard input as one question."""
    if not sys.stdin.isatty():
        _answer(conversation, sys.stdin.read())
        return
    console = Console(stderr=True)  # standard output is for answers alone
    console.print(f"Talking to [bold]{conversation.model}[/]; Ctrl-D ends.")
    while True:
        try:
            text = Prompt.ask("[bold cyan]you", console=console)
        except EOFError:
            console.print()
            return
        _answer(conversation, text)


def _answer(conversation: ChatSession, text: str) -> None:
    if not text.strip():
        return
    for delta in conversation.ask(text):
        sys.stdout.write(delta)
        sys.stdout.flush()
    sys.stdout.write("\n")
