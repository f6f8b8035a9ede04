"""Measures the time from the command `ryzanstein up` to a client's first token.

python -m bench.start --rounds 5
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from bench.reading import lower, write_readings
from bench.serve import complete
from bench.stats import median
from services.common.ports import free_port


async def first_token(model: str, arguments: list[str]) -> float:
    """Seconds from the start of the command to the first answer's first token; raises RuntimeError if it ends."""
    port = free_port()
    command = str(Path(sys.executable).with_name("ryzanstein"))
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        command, "up", "--port", str(port), *arguments, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        while process.returncode is None:
            answer = await complete(f"http://127.0.0.1:{port}", model, [300, 301, 302], 2)
            if answer.token_times and not answer.error:
                return time.perf_counter() - began - (answer.total - answer.token_times[0])
            await asyncio.sleep(0.05)
        raise RuntimeError(f"ryzanstein up ended with status {process.returncode}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await process.wait()


def main(
    rounds: int = 5,
    model: Annotated[str, typer.Option(help="The name that is served.")] = "smollm2-135m-instruct",
    arguments: Annotated[str, typer.Option(help="Passed on to `ryzanstein up`.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Print every round and the median."""
    seconds = [asyncio.run(first_token(model, arguments.split())) for _ in range(rounds)]
    print(f"first token after {median(seconds):.2f} s (median of {', '.join(f'{s:.2f}' for s in seconds)})")
    if json_file:
        write_readings(json_file, [lower("start/from the command to the first token", median(seconds), "s")])


if __name__ == "__main__":
    typer.run(main)
