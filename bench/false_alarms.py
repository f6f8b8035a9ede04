"""How often a healthy part is given up for silent while the machine has far more to do than it can.

    python -m bench.false_alarms --seconds 180 --spinning 4

Streams run on three workers without a pause while processes that only count have the cores, too. Nothing is hurt: every
resumed stream is a false alarm. The exit status is 1 when a client did not get all of its tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.serve import complete
from bench.stats import percentile
from tests.stack import running_stack

WORKERS, PROMPT_TOKENS, OUTPUT_TOKENS, VOCAB = 3, 32, 200, 4_000


@contextlib.contextmanager
def spinning(count: int) -> Iterator[None]:
    """Processes that take all they get."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def streams(url: str, count: int, seconds: float) -> tuple[list[str], list[float]]:
    """Streams until then: what was wrong with those that were not whole, and the longest gap of each in seconds."""
    rng, until = random.Random(0), time.monotonic() + seconds
    broken: list[str] = []
    gaps: list[float] = []

    async def client(index: int) -> None:
        while time.monotonic() < until:
            prompt = [rng.randrange(300, VOCAB) for _ in range(PROMPT_TOKENS)]
            fields = {"session_id": str(index), "return_token_ids": True}
            answer = await complete(url, "ryzanstein-tiny", prompt, OUTPUT_TOKENS, fields)
            if answer.error or len(answer.token_times) != OUTPUT_TOKENS:
                broken.append(answer.error or f"{len(answer.token_times)} tokens")
            times = answer.token_times
            gaps.append(max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0))

    await asyncio.gather(*(client(index) for index in range(count)))
    return broken, gaps


def main(
    seconds: Annotated[float, typer.Option(help="How long.")] = 180.0,
    spinners: Annotated[int, typer.Option("--spinning", help="Processes that only count.")] = 4,
    clients: Annotated[int, typer.Option(help="Streams at once.")] = 64,
) -> None:
    """Measure and print one line."""
    with tempfile.TemporaryDirectory(prefix="rz-") as folder:
        arguments = ("--workers", str(WORKERS), "--tensor-parallel", "1")
        with running_stack(Path(folder), *arguments) as stack, spinning(spinners):
            stack.wait_serving(WORKERS)
            before = stack.resumes()
            broken, gaps = asyncio.run(streams(stack.url, clients, seconds))
            alarms = stack.resumes() - before
    causes = ", ".join(f"{number} {cause}" for cause, number in alarms.items()) or "none"
    Console().print(
        f"{len(gaps)} streams of {OUTPUT_TOKENS} tokens, {clients} at once, beside {spinners} spinning processes: "
        f"{len(broken)} not whole, false alarms: {causes}; longest gap of a stream: "
        f"median {percentile(gaps, 50) * 1e3:.0f} ms, largest {max(gaps) * 1e3:.0f} ms",
        highlight=False,
    )
    if broken:
        Console(stderr=True).print(broken[0], highlight=False)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
