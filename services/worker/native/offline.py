"""A model without a server: texts in, texts out. The first file to read of the worker.

    from services.worker.native.offline import LLM

    llm = LLM("models/ryzanstein-tiny")
    print(llm.generate(["def fibonacci(n):", "class Stack:"], max_tokens=32))

`LLM` turns texts into tokens and back; `OfflineEngine` computes tokens. `plan` schedules a step, the ranks run it,
`apply` takes its result.

Three parts do the work, here and in the server:

- `scheduling/scheduler.py` decides what each step computes. `plan` gives the next step, `apply` takes its result.
- `process/rank_group.py` runs the ranks: processes that hold the weights and the KV cache and compute plans in order
  (`rank/runner.py`).
- `scheduling/request.py` is a request: its known tokens, and how many of them are computed. A prompt's tokens and
  generated tokens are the same to it, so there is no prefill phase and no decode phase.

The server adds requests that come and go, restarts of lost ranks, measured speeds and KV blocks of other workers
(`native/engine.py`, `native/pump.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any
from weakref import finalize

from ryzanstein.v1.worker_pb2 import Sampling
from tokenizers import Tokenizer

from services.compute.model.loading.folder import ModelFolder
from services.compute.ranks.config import RankGroupConfig
from services.worker.engine.errors import GenerationError
from services.worker.engine.kv_events import KvEventLog
from services.worker.engine.output import Output
from services.worker.native.startup import group_config, model_folder, read_model, scheduler_config
from services.worker.process.failure import RanksFailedError
from services.worker.process.rank_group import GroupStarted, RankGroup
from services.worker.protocol.plan import StepPlan, StepResult
from services.worker.scheduling.request import Request
from services.worker.scheduling.scheduler import Scheduler
from services.worker.settings import WorkerSettings


class LLM:
    """A model that completes texts in this process, its ranks in processes of their own, which end with it.

    `settings` are those of a worker (`WorkerSettings`), as in `LLM(model, tensor_parallel=2)`. Raises StartupError,
    RanksFailedError.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self._runner, opened = asyncio.Runner(), AsyncExitStack()
        self.close = finalize(self, _close, self._runner, opened)  # also at the end of the program
        chosen = WorkerSettings(model=model, **settings)
        self._engine: OfflineEngine = self._runner.run(opened.enter_async_context(open_offline(chosen)))
        files = self._engine.files
        self._tokenizer = Tokenizer.from_buffer(files.tokenizer.json)
        bos = self._tokenizer.token_to_id(files.tokenizer.special_tokens.get("bos_token", ""))
        self._begin = [bos] if files.tokenizer.add_bos_token and bos is not None else []

    def generate(self, prompts: Sequence[str], *, max_tokens: int = 64, **sampling: Any) -> list[str]:
        """Return the continuation of each prompt; all are computed together, greedily by default.

        `sampling` are fields of the message `Sampling`: `temperature`, `top_p`, `seed` and others. Raises TooLongError,
        RanksFailedError, GenerationError; ValueError for a field that does not exist.
        """
        ends = self._engine.files.eos_token_ids
        chosen = Sampling(max_tokens=max_tokens, **{"stop_token_ids": ends} | sampling)
        token_ids = self._runner.run(self._engine.generate([self._encode(text) for text in prompts], chosen))
        return [self._tokenizer.decode(ids) for ids in token_ids]

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text).ids
        return token_ids if token_ids[:1] == self._begin else [*self._begin, *token_ids]


def _close(runner: asyncio.Runner, opened: AsyncExitStack) -> None:
    with runner:
        runner.run(opened.aclose())


class OfflineEngine:
    """A scheduler and a group of ranks, with nothing around them."""

    def __init__(self, group: RankGroup, started: GroupStarted, files: ModelFolder) -> None:
        self.config: RankGroupConfig = group.config
        self.files = files
        self.scheduler = Scheduler(scheduler_config(group.config, started.n_blocks), KvEventLog())
        self.group = group

    async def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """The generated tokens of each prompt. Raises TooLongError, RanksFailedError, GenerationError."""
        requests = [Request(list(ids), len(ids), sampling, max_tokens=sampling.max_tokens) for ids in prompts]
        await self.run(requests)
        return [request.token_ids[request.n_prompt :] for request in requests]

    async def run(self, requests: Sequence[Request]) -> None:
        """Compute the requests together, to their end. Raises TooLongError, RanksFailedError, GenerationError."""
        failures: list[str] = []
        for request in requests:
            self.scheduler.submit(request)
        async with aclosing(self.group.results()) as results:
            while not self.scheduler.idle:
                while self.plan() is not None:
                    pass
                result = await anext(results, None)
                if result is None:
                    raise RanksFailedError(await self.group.wait_failed())
                failures += [output.failure for _, output in self.apply(result) if output.failure]
        if failures:
            raise GenerationError(failures[0])

    def plan(self) -> StepPlan | None:
        """Hand the next step to the ranks; None while enough are in flight."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.group.submit(plan)
        return plan

    def apply(self, result: StepResult) -> list[tuple[Request, Output]]:
        """Take the result of the oldest step in flight; returns the outputs of its requests."""
        return self.scheduler.apply(result)


@asynccontextmanager
async def open_offline(settings: WorkerSettings) -> AsyncGenerator[OfflineEngine, None]:
    """Start ranks on a model as a worker with these settings does. Raises StartupError, RanksFailedError."""
    folder = await model_folder(settings.model, settings.revision)
    files = await asyncio.to_thread(read_model, folder)
    group = RankGroup(group_config(settings, files))
    started = await group.start()
    try:
        yield OfflineEngine(group, started, files)
    finally:
        await group.stop()
