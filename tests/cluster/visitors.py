"""Clients of features that the load does not use: sessions, kept responses, WebSockets, bursts of long prompts."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx
import websockets

MODEL = "ryzanstein-tiny"
PAUSE_S = 3.0
SESSIONS = 6
BURST = 12
LONG = "The list of all names that a module exports is sorted. " * 60
ROUNDS_PER_BURST = 4


@dataclass
class Visitors:
    """One of each comes by every few seconds until the block ends; what went wrong is in `failures`."""

    url: str
    visits: int = 0
    failures: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="visitors")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread:
            self._thread.join()

    def _run(self) -> None:
        for number in itertools.count():
            self._visit(self._session, number)
            self._visit(self._kept, number)
            self._visit(self._socket, number)
            if number % ROUNDS_PER_BURST == 0:
                with ThreadPoolExecutor(BURST) as pool:
                    for place in range(BURST):
                        pool.submit(self._visit, self._long, number * BURST + place)
            if self._over.wait(PAUSE_S):
                return

    def _visit(self, errand: Callable[[int], None], number: int) -> None:
        self.visits += 1
        try:
            errand(number)
        except (httpx.HTTPError, websockets.WebSocketException, OSError, AssertionError) as error:
            self.failures.append(f"{errand.__name__} {number}: {error!r}")

    def _session(self, number: int) -> None:
        body = {"prompt": "def fibonacci(n):\n" * 8, "max_tokens": 8, "session_id": f"visitor-{number % SESSIONS}"}
        self._post("/v1/completions", body)

    def _kept(self, number: int) -> None:
        self._post("/v1/responses", {"input": f"What is a list of {number}?", "max_output_tokens": 8})

    def _long(self, number: int) -> None:
        """Every second prompt begins as others do: a worker that has not computed that yet may fetch it."""
        self._post("/v1/completions", {"prompt": (LONG if number % 2 else f"{number} {LONG}"), "max_tokens": 4})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        answer = httpx.post(f"{self.url}{path}", json={"model": MODEL, **body}, timeout=60)
        assert answer.is_success, f"{answer.status_code}: {answer.text[:300]}"

    def _socket(self, number: int) -> None:
        asyncio.run(self._generate(number))

    async def _generate(self, number: int) -> None:
        async with websockets.connect(f"{self.url.replace('http', 'ws', 1)}/v1/stream") as socket:
            request = {"model": MODEL, "prompt": "def ", "max_tokens": 20, "ignore_eos": True}
            await socket.send(
                json.dumps({"type": "start", "id": str(number), "kind": "completion", "request": request})
            )
            while (message := json.loads(await socket.recv()))["type"] not in ("done", "error"):
                pass
        assert message["type"] == "done", message
