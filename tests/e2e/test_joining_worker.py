"""A worker that is started beside a running installation, as the operations guide says: it gets work, sessions stay."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import redis

from services.cli.stack.default_model import TINY_MODEL
from services.common.keys import RedisKeys
from services.router.sessions import decode
from tests.stack import START_S, RunningStack, running_stack

SESSIONS = [f"talk-{i}" for i in range(6)]
PROMPT_TOKENS = 700
CLIENTS = 3  # one more than workers; few, so that the newcomer starts beside them


def prompt_of(session: str, tokens: int = PROMPT_TOKENS) -> list[int]:
    rng = random.Random(session)
    return [rng.randrange(300, 4_000) for _ in range(tokens)]


@contextlib.contextmanager
def joining(stack: RunningStack, name: str, log: Path) -> Iterator[None]:
    variables = {
        "RYZANSTEIN_REDIS_URL": f"unix://{stack.folder / 'redis.sock'}",
        "RYZANSTEIN_NAMESPACE": f"up-{stack.port}",
        "RYZANSTEIN_MODEL": str(TINY_MODEL),
        "RYZANSTEIN_TENSOR_PARALLEL": "1",
        "RYZANSTEIN_WORKER_ID": name,
    }
    with log.open("wb") as output:
        command = [sys.executable, "-m", "services.worker.api"]
        process = subprocess.Popen(command, env=os.environ | variables, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=180)


class Talk:
    """Asks in sessions, and knows which worker holds them."""

    def __init__(self, stack: RunningStack) -> None:
        self._url = f"{stack.url}/v1/completions"
        self._redis = redis.Redis(unix_socket_path=str(stack.folder / "redis.sock"))
        self._keys = RedisKeys(f"up-{stack.port}")
        self.numbers = itertools.count()

    def worker_of(self, session: str) -> str:
        held = self._redis.get(self._keys.session("", session))
        assert isinstance(held, bytes), f"{session} is not bound"
        binding = decode(held).binding
        assert binding is not None
        return binding.worker_id

    async def ask(self, session: str, prompt: list[int], tokens: int) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "session_id": session}
        async with httpx.AsyncClient(timeout=120) as client:
            answered = await client.post(self._url, json=body)
        assert answered.status_code == httpx.codes.OK, answered.text
        usage: dict[str, Any] = answered.json()["usage"]
        return usage

    async def keep_opening_sessions(self, served: asyncio.Event, newcomer: str) -> None:
        """One client of the load: a new session after every answer, until one of them is at `newcomer`."""
        while not served.is_set():
            session = f"load-{next(self.numbers)}"
            await self.ask(session, prompt_of(session, 40), 24)
            if self.worker_of(session) == newcomer:
                served.set()


def test_a_worker_that_joins_under_load_gets_work_and_sessions_stay(tmp_path: Path) -> None:
    async def main(stack: RunningStack) -> None:
        talk = Talk(stack)
        for session in SESSIONS:
            await talk.ask(session, prompt_of(session), 2)
        homes = {session: talk.worker_of(session) for session in SESSIONS}
        served = asyncio.Event()
        with joining(stack, "newcomer", tmp_path / "newcomer.log"):
            async with asyncio.timeout(START_S), asyncio.TaskGroup() as load:
                for _ in range(CLIENTS):
                    load.create_task(talk.keep_opening_sessions(served, "newcomer"))
            stack.wait_serving(3)
            for session in SESSIONS:
                usage = await talk.ask(session, [*prompt_of(session), 300, 301], 2)
                where = f"{session}: from {homes[session]} to {talk.worker_of(session)}"
                assert usage["prompt_tokens_details"]["cached_tokens"] == PROMPT_TOKENS // 16 * 16, where
            assert {session: talk.worker_of(session) for session in SESSIONS} == homes

    # KV cache for all of the load: eviction would take from a session that stays.
    with running_stack(tmp_path, "--workers", "2", "--tensor-parallel", "1", "--kv-tokens", "131072") as stack:
        stack.wait_serving(2)
        asyncio.run(main(stack))
