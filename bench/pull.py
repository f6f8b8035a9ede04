"""Moving a prefix's KV between two workers against computing it again: time to the first token.

    python -m bench.make_checkpoint 100m /tmp/llama-100m
    python -m bench.pull /tmp/llama-100m --tokens 1024 --tokens 4096

Two worker servers on this machine, so the link is the loopback interface, and only one of them computes at a time.
Every prompt is random; one token is generated. The last column is what a router would decide by what the workers
tell it.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import grpc.aio
import numpy as np
import typer
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1 import worker_pb2_grpc

from bench.reading import Reading, lower, write_readings
from bench.stats import median
from services.common.ports import free_port
from services.common.rpc import open_channel
from services.router.breaker import BreakerLimits
from services.router.pool import Pool
from services.router.pulls import worthwhile_pulls
from services.router.snapshot import Query

START_S = 120.0


@dataclass(frozen=True)
class Worker:
    """A worker server in a process of its own."""

    address: str
    stub: worker_pb2_grpc.WorkerAsyncStub

    async def state(self) -> pb.WorkerState:
        """What routers hear."""
        async for state in self.stub.WatchState(pb.WatchStateRequest(watcher_id="bench")):
            return state
        raise RuntimeError(f"{self.address} tells no state")

    async def first_token_s(self, prompt: list[int], pull: pb.PullHint | None = None) -> tuple[float, int]:
        """Seconds from the submit to the first token, and how many prompt tokens were not computed."""
        call = self.stub.Connect()
        sampling = pb.Sampling(max_tokens=1, ignore_eos=True)
        submit = pb.Submit(request_id="r", attempt=1, prompt_ids=prompt, sampling=sampling, pull=pull)
        began = time.perf_counter()
        await call.write(pb.ConnectFrames(frames=[pb.ConnectFrame(submit=submit)]))
        try:
            async for step in call:
                for output in step.outputs:
                    if not output.ids:
                        raise RuntimeError(f"no token: {output}")
                    return time.perf_counter() - began, output.cached_tokens
        finally:
            call.cancel()
        raise RuntimeError("the stream ended")


@asynccontextmanager
async def worker(model: str, dtype: str, ranks: int, kv_tokens: int) -> AsyncIterator[Worker]:
    """Start a worker and wait until it serves; it needs no Redis for this."""
    port = free_port()
    settings = {
        "WORKER_ID": f"w{port}",
        "WORKER_PORT": port,
        "MODEL": model,
        "DTYPE": dtype,
        "TENSOR_PARALLEL": ranks,
        "KV_TOKENS": kv_tokens,
        "LOG_LEVEL": "error",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.worker.api",
        env=os.environ | {f"RYZANSTEIN_{name}": str(value) for name, value in settings.items()},
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        address = f"127.0.0.1:{port}"
        async with open_channel(address) as channel:
            started = Worker(address, worker_pb2_grpc.WorkerStub(channel))
            async with asyncio.timeout(START_S):
                while not await _measured(started):  # noqa: ASYNC110 - a process that starts sends no event
                    await asyncio.sleep(0.1)
            yield started
    finally:
        process.terminate()
        await process.wait()


async def _measured(started: Worker) -> bool:
    try:
        return (await started.state()).decode_step_ms > 0
    except grpc.aio.AioRpcError:
        return False


async def decides(source: Worker, target: Worker, tokens: int) -> bool:
    """Whether a router would have `target` pull `tokens` of a prompt that `source` holds."""
    pool = Pool("bench", saturation_s=30.0, clock=time.monotonic)
    for one in (source, target):
        state = await one.state()
        pool.add(state.worker_id, one.address, BreakerLimits())
        pool.update(state.worker_id, state, "bench")
    query = Query(tokens + 1, 1, matched_tokens=np.array([tokens, 0], dtype=float))
    pulls = worthwhile_pulls(pool.snapshot(), query)
    return pulls is not None and pulls.tokens[1] > 0


async def measure(source: Worker, target: Worker, tokens: int, rounds: int, vocab: int) -> list[Reading]:
    """Print a row for one length of prompt."""
    times: dict[str, list[float]] = {"computed": [], "pulled": [], "cached": []}
    identity = await source.state()
    hint = pb.PullHint(
        worker_id=identity.worker_id, incarnation=identity.incarnation, address=source.address, tokens=tokens
    )
    for _ in range(rounds):
        there, fresh = ([random.randrange(2, vocab) for _ in range(tokens + 1)] for _ in range(2))
        await source.first_token_s(there)
        for kind, prompt, pull in (("computed", fresh, None), ("pulled", there, hint), ("cached", there, None)):
            seconds, cached = await target.first_token_s(prompt, pull)
            if cached != (0 if kind == "computed" else tokens):
                raise RuntimeError(f"{kind}: {cached} of {tokens} tokens were not computed")
            times[kind].append(seconds)
    found = {kind: median(seconds) * 1e3 for kind, seconds in times.items()}
    state = await target.state()
    moved = tokens * state.kv_bytes_per_token
    verdict = "pull" if await decides(source, target, tokens) else "compute"
    print(
        f"{tokens:7d} {found['computed']:10.1f} {found['pulled']:10.1f} {found['cached']:10.1f} "
        f"{found['computed'] / found['pulled']:7.1f} {moved / 2**20:8.1f} {state.pull_bytes_per_s / 1e6:8.0f} "
        f"{state.prefill_tokens_per_s:9.0f}  {verdict}"
    )
    return [lower(f"pull/{tokens} tokens/first token when {kind}", ms, "ms") for kind, ms in found.items()]


async def run(model: str, tokens: list[int], rounds: int, dtype: str, ranks: int) -> list[Reading]:
    """All lengths, one after the other."""
    async with AsyncExitStack() as stack:
        source, target = [
            await stack.enter_async_context(worker(model, dtype, ranks, 4 * (max(tokens) + 64))) for _ in range(2)
        ]
        card = await target.stub.GetModelCard(pb.GetModelCardRequest())
        print(" tokens   computed     pulled     cached   ratio      MiB     MB/s  prefill/s  decision")
        readings: list[Reading] = []
        for n in tokens:
            readings += await measure(source, target, n, rounds, card.vocab_size)
        return readings


def main(
    model: Annotated[str, typer.Argument(help="A folder with a checkpoint.")],
    tokens: Annotated[list[int] | None, typer.Option(help="Length of the prefix, a multiple of 16.")] = None,
    rounds: int = 5,
    dtype: str = "bfloat16",
    ranks: int = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Print times to the first token in milliseconds: medians of the rounds."""
    readings = asyncio.run(run(model, tokens or [256, 1024, 4096], rounds, dtype, ranks))
    if json_file:
        write_readings(json_file, readings)


if __name__ == "__main__":
    typer.run(main)
