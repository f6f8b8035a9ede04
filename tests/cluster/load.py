"""Clients that ask again and again while something happens to the cluster, and what each of them got."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
import time
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

import httpx

from bench.soaking.load import Case, Served, ask, make_cases, open_client, references
from bench.soaking.texts import Answer

SHORT_TOKENS = 8
_START_S = 60


@dataclass(frozen=True)
class Traffic:
    """Concurrent requests of clients, and their answers in an undisturbed run, which later answers must equal."""

    url: str
    streams: list[Case]
    shorts: list[Case]
    expected: list[Answer]  # answers of `streams`, then of `shorts`

    @classmethod
    def undisturbed(
        cls,
        url: str,
        *,
        streams: int = 16,
        tokens: int = 200,
        shorts: int = 4,
        short_tokens: int = SHORT_TOKENS,
        seed: int = 0,
        model: str = "ryzanstein-tiny",
    ) -> Self:
        """Ask everything once while nothing happens."""
        long, short = (
            [replace(case, model=model) for case in make_cases(count, length, start)]
            for count, length, start in ((streams, tokens, seed), (shorts, short_tokens, seed + 1))
        )

        async def run() -> list[Answer]:
            async with open_client(url, 8) as client:
                return await references(client, [*long, *short], 8)

        return cls(url, long, short, asyncio.run(run()))

    @property
    def cases(self) -> list[Case]:
        """All of them, in the order of `expected`."""
        return [*self.streams, *self.shorts]


@dataclass
class ClusterLoad:
    """All clients of a :class:`Traffic` ask their cases in a thread of its own until the block ends.

    Every case has a client. Those with short answers open a connection for each, as a script does; the others keep
    theirs. Each rests for `pause_s` after an answer. Leaving the block waits for the answers under way.
    """

    traffic: Traffic
    pause_s: float = 0.0
    served: list[Served] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _begun: set[int] = field(default_factory=set)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while len(self._begun) < len(self.traffic.cases):
            if time.monotonic() > deadline:
                self._end()
                raise AssertionError(f"{len(self._begun)} clients had an answer after {_START_S} s: {self.failures()}")
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def failures(self) -> list[str]:
        """Errors and answers with changed bytes."""
        wrong = []
        for served in self.served:
            if served.error:
                wrong.append(f"case {served.case}, {served.began:.1f} to {served.ended:.1f}: {served.error}")
            elif served.answer != self.traffic.expected[served.case]:
                wrong.append(f"case {served.case}: the bytes are others than those of the undisturbed run")
        return wrong

    def assert_unharmed(self) -> None:
        """No request failed, no byte changed."""
        wrong = self.failures()
        assert not wrong, f"{len(wrong)} of {len(self.served)} requests:\n" + "\n".join(wrong[:10])
        assert self.served

    def figures(self) -> dict[str, float]:
        """Requests, failures, and what clients waited in vain, in seconds."""
        good = [served for served in self.served if not served.error]
        pauses = [served.longest_pause for served in good]
        return {
            "requests": len(self.served),
            "failed": len(self.failures()),
            "ttft_median": round(statistics.median(served.ttft for served in good), 2),
            "ttft_worst": round(max(served.ttft for served in good), 2),
            "pause_worst": round(max(pauses), 2),
        }

    def _end(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    async def _run(self) -> None:
        traffic = self.traffic
        async with open_client(traffic.url, len(traffic.streams)) as stored, asyncio.TaskGroup() as group:
            for index, case in enumerate(traffic.streams):
                group.create_task(self._repeat(index, case, stored))
            for index, case in enumerate(traffic.shorts, len(traffic.streams)):
                group.create_task(self._repeat(index, case, None))

    async def _repeat(self, index: int, case: Case, stored: httpx.AsyncClient | None) -> None:
        for _ in itertools.count():
            if stored is not None:
                self.served.append(await ask(stored, index, case))
            else:
                async with open_client(self.traffic.url, 1) as client:
                    self.served.append(await ask(client, index, case))
            self._begun.add(index)
            if self._over.is_set():
                return
            await asyncio.sleep(self.pause_s)
