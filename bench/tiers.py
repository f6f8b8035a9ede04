"""Measures what KV tiers save: sessions of several turns whose prefixes are larger than the KV cache.

    python -m bench.tiers --out docs/kv-tiers.md
    python -m bench.tiers MODEL --sessions 200 --gib 16

Every session sends a turn, then all others do, so the KV cache has evicted a session's blocks before its next turn. The
readings are the times to the first token of later turns without tiers, with host memory, with a disk, and with both.
The default sizes compute 240,000 tokens of SmolLM2, four minutes at 1,000 tokens/s.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from ryzanstein.v1 import worker_pb2 as pb

from bench.evaluation.report import replace_between
from bench.reading import lower, write_readings
from bench.sleep import FirstToken, idle, serving
from bench.stats import median, percentile
from services.cli.stack.default_model import default_model
from services.worker.engine.base import Engine
from services.worker.engine.request import EngineRequest
from services.worker.settings import WorkerSettings

_MODEL = Path(default_model().model)
_ALPHABET = range(5, 4000)  # tokens of random prompts


@dataclass(frozen=True, slots=True)
class Replay:
    """The sizes of the replay."""

    sessions: int
    turns: int
    turn_tokens: int  # new tokens of a turn
    larger: float  # tokens of all sessions at their end, in sizes of the KV cache

    @property
    def kv_tokens(self) -> int:
        """The KV cache that the sessions do not fit, with room for one of them."""
        whole = self.sessions * self.turns * self.turn_tokens
        return max(int(whole / self.larger), 3 * self.turns * self.turn_tokens)

    def prompts(self, turn: int) -> Iterator[tuple[int, ...]]:
        """The sessions' prompts: those of the turn before, and new tokens."""
        for session in range(self.sessions):
            rng = random.Random(session)
            yield tuple(rng.choices(_ALPHABET, k=(turn + 1) * self.turn_tokens))


@contextmanager
def settings_of(mode: str, model: Path, replay: Replay, gib: float) -> Iterator[WorkerSettings]:
    """A worker with the tiers of a mode; the disk is a temporary folder."""
    with TemporaryDirectory(prefix="rz-bench-tiers-") as folder:
        yield WorkerSettings(
            model=str(model),
            kv_tokens=replay.kv_tokens,
            host_cache_gib=gib if mode in {"host", "both"} else 0.0,
            disk_cache=folder if mode in {"disk", "both"} else "",
            disk_cache_gib=gib,
            disk_cache_write_mb_per_s=2000.0,
        )


async def first_token_ms(engine: Engine, prompt: tuple[int, ...]) -> float:
    """Milliseconds to the first token of a prompt that is alone."""
    sink, began = FirstToken(), time.perf_counter()
    engine.submit(EngineRequest("r", prompt, pb.Sampling(max_tokens=1, ignore_eos=True)), sink)
    await sink.came.wait()
    elapsed_ms = (time.perf_counter() - began) * 1e3
    await idle(engine)
    return elapsed_ms


async def replay_in(mode: str, model: Path, replay: Replay, gib: float) -> list[float]:
    """Milliseconds to the first tokens of all turns but the first."""
    times = []
    with settings_of(mode, model, replay, gib) as settings:
        async with serving(settings) as engine:
            for turn in range(replay.turns):
                for prompt in replay.prompts(turn):
                    elapsed_ms = await first_token_ms(engine, prompt)
                    if turn:
                        times.append(elapsed_ms)
    return times


def table(model: Path, replay: Replay, times: Mapping[str, Sequence[float]]) -> str:
    """The sizes, and the milliseconds to first tokens by mode as a table in Markdown."""
    first = median(next(iter(times.values())))
    lines = [
        f"{model.stem}: {replay.sessions} sessions of {replay.turns} turns of {replay.turn_tokens} tokens, "
        f"{replay.larger:g} times the KV cache.",
        "",
        f"| tiers | first token of turns 2 to {replay.turns}, median | p95 | median, of the first row |",
        "|---|---|---|---|",
    ]
    for mode, ms in times.items():
        lines.append(f"| {mode} | {median(ms):.0f} ms | {percentile(ms, 95):.0f} ms | {median(ms) / first:.2f} |")
    return "\n".join(lines)


def main(
    model: Annotated[Path, typer.Argument(help="A folder or a GGUF file.")] = _MODEL,
    sessions: int = 24,
    turns: Annotated[int, typer.Option(min=2)] = 6,
    turn_tokens: Annotated[int, typer.Option(min=16, help="New tokens of a turn.")] = 256,
    larger: Annotated[float, typer.Option(help="Tokens of all sessions, in sizes of the KV cache.")] = 3.0,
    gib: Annotated[float, typer.Option(help="Size of each tier.")] = 2.0,
    modes: Annotated[
        str, typer.Option(help="The first one is what the others are compared with.")
    ] = "none,host,disk,both",
    out: Annotated[Path | None, typer.Option(help="Write the table into this page.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Replay the sessions in every mode."""
    replay = Replay(sessions, turns, turn_tokens, larger)
    times = {mode: asyncio.run(replay_in(mode, model, replay, gib)) for mode in modes.split(",")}
    written = table(model, replay, times)
    print(written)
    if out:
        replace_between(out, "first tokens with tiers", written)
    if json_file:
        name = "tiers/{}/first token of later turns"
        write_readings(json_file, [lower(name.format(mode), median(ms), "ms") for mode, ms in times.items()])


if __name__ == "__main__":
    typer.run(main)
