"""A model without a server: prompts in, tokens out. The first file to read of the worker.

    import asyncio

    from ryzanstein.v1.worker_pb2 import Sampling
    from tokenizers import Tokenizer

    from services.worker.native.offline import open_offline
    from services.worker.settings import WorkerSettings

    MODEL = "models/ryzanstein-tiny"


    async def main():
        tokenizer = Tokenizer.from_file(f"{MODEL}/tokenizer.json")
        texts = ["def fibonacci(n):", "The capital of France is"]
        async with open_offline(WorkerSettings(model=MODEL)) as engine:
            sampling = Sampling(max_tokens=32, stop_token_ids=engine.config.eos_token_ids)
            answers = await engine.generate([tokenizer.encode(text).ids for text in texts], sampling)
        for text, answer in zip(texts, answers):
            print(repr(text + tokenizer.decode(answer)))


    asyncio.run(main())

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
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.ranks.config import RankGroupConfig
from services.worker.engine.kv_events import KvEventLog
from services.worker.native.model_files import read_model_files
from services.worker.native.startup import group_config, scheduler_config
from services.worker.process.failure import RanksFailedError
from services.worker.process.rank_group import GroupStarted, RankGroup
from services.worker.protocol.plan import StepPlan, StepResult
from services.worker.scheduling.request import Request
from services.worker.scheduling.scheduler import Scheduler
from services.worker.settings import WorkerSettings


class OfflineEngine:
    """A scheduler and a group of ranks, with nothing around them."""

    def __init__(self, group: RankGroup, started: GroupStarted) -> None:
        self.config: RankGroupConfig = group.config
        self.scheduler = Scheduler(scheduler_config(group.config, started.n_blocks), KvEventLog())
        self._group = group

    async def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """The generated tokens of each prompt. Raises TooLongError, RanksFailedError."""
        requests = [Request(list(ids), len(ids), sampling, max_tokens=sampling.max_tokens) for ids in prompts]
        await self.run(requests)
        return [request.token_ids[request.n_prompt :] for request in requests]

    async def run(self, requests: Sequence[Request]) -> None:
        """Compute the requests together, to their end. Raises TooLongError, RanksFailedError."""
        for request in requests:
            self.scheduler.submit(request)
        async with aclosing(self._group.results()) as results:
            while not self.scheduler.idle:
                while self.plan() is not None:
                    pass
                result = await anext(results, None)
                if result is None:
                    raise RanksFailedError(await self._group.wait_failed())
                self.apply(result)

    def plan(self) -> StepPlan | None:
        """Hand the next step to the ranks; None while enough are in flight."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._group.submit(plan)
        return plan

    def apply(self, result: StepResult) -> None:
        """Take the result of the oldest step in flight."""
        self.scheduler.apply(result)


@asynccontextmanager
async def open_offline(settings: WorkerSettings) -> AsyncGenerator[OfflineEngine, None]:
    """Start ranks on a model folder as a worker with these settings does. Raises StartupError, RanksFailedError."""
    folder = Path(settings.model)
    files = await asyncio.to_thread(read_model_files, folder)
    group = RankGroup(group_config(settings, folder, files))
    started = await group.start()
    try:
        yield OfflineEngine(group, started)
    finally:
        await group.stop()
