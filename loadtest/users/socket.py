"""Users of the WebSocket API, `/v1/stream`: one connection for many generations."""

from __future__ import annotations

import json
from itertools import count

import websocket
from locust import task
from locust.env import Environment

from loadtest.timing import AnswerClock
from loadtest.traffic import choose_system_prompt, conversation
from loadtest.users.base import Person

_NAME = "/v1/stream chat"
_TIMEOUT_S = 60


class SocketUser(Person):
    """A chat page: connects once, sends many questions, and reconnects after a lost connection."""

    weight = 1

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._socket: websocket.WebSocket | None = None
        self._names = (f"g{number}" for number in count())

    def on_stop(self) -> None:
        """Close the connection."""
        self._disconnect()

    @task
    def ask(self) -> None:
        """Ask one question; report an error and reconnect."""
        clock, text, error = AnswerClock(), "", None
        try:
            text, tokens = self._generate(clock)
        except (OSError, websocket.WebSocketException, RuntimeError) as problem:
            error, tokens = problem, 0
            self._disconnect()
        times = clock.times(tokens)
        self.report_request("WS", _NAME, times.total, len(text.encode()), error)
        if error is None:
            self.report(_NAME, times)

    def _generate(self, clock: AnswerClock) -> tuple[str, int]:
        socket, name, text = self._connected(), next(self._names), ""
        question = next(conversation(self.rng, self.think_s)).text
        messages = [
            {"role": "system", "content": choose_system_prompt(self.rng)},
            {"role": "user", "content": question},
        ]
        request = {"messages": messages, "max_tokens": 64, "temperature": 0.7}
        socket.send(json.dumps({"type": "start", "id": name, "kind": "chat", "request": request}))
        while True:
            message = json.loads(socket.recv())
            match message["type"]:
                case "token" if message["text"]:
                    clock.arrived()
                    text += message["text"]
                case "done":
                    return text, message["usage"]["completion_tokens"]
                case "error":
                    raise RuntimeError(message["error"]["message"])

    def _connected(self) -> websocket.WebSocket:
        if self._socket is None:
            url = str(self.host).replace("http", "ws", 1) + "/v1/stream"
            self._socket = websocket.create_connection(
                url, timeout=_TIMEOUT_S, header=[f"X-Session-Id: {self.session_id}"]
            )
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
