"""Measures what KV tiers save and cost: sessions of several turns, sessions that fit the KV cache, and a restart.

    python -m bench.tiers --out docs/kv-tiers.md
    python -m bench.tiers MODEL --sessions 200 --turn-tokens 96 --gib 4

Turns: every session sends a turn, then all others do, so the KV cache has evicted a session's blocks before its next
turn. The readings are the times to the first token of later turns without tiers, with host memory, a disk, and both.
Fitting sessions: the KV cache holds all of them, so tiers only cost; workers of all modes take turns at equal batches,
three in a row, so that the copies of one fall into the next one, and not into the turn of another worker. Every other
round has the opposite order, and throughputs are compared within a round. Restart:
first tokens of prompts before a worker with a disk has seen them, and after its restart. The default sizes compute
300,000 tokens of SmolLM2, five minutes at 1,000 tokens/s.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from ryzanstein.v1 import worker_pb2 as pb

from bench.evaluation.report import replace_between
from bench.reading import Reading, higher, lower, write_readings
from bench.sleep import FirstToken, idle, serving
from bench.stats import median, percentile
from services.cli.stack.default_model import default_model
from services.common.blockhash import HASH_BLOCK_TOKENS
from services.worker.engine.base import Engine
from services.worker.engine.request import EngineRequest
from services.worker.settings import WorkerSettings

_MODEL = Path(default_model().model)
_ALPHABET = range(5, 4000)  # tokens of random prompts
_BATCH, _BATCH_PROMPT, _BATCH_OUTPUT = 4, 512, 32  # requests of a batch, and tokens of each
_IN_A_ROW = 3  # batches

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of all parts."""

    model: Path
    sessions: int
    turns: int
    first_tokens: int  # tokens of a session's first turn
    turn_tokens: int  # new tokens of each later one
    larger: float  # tokens of all sessions at their end, in sizes of the KV cache
    gib: float  # size of each tier
    rounds: int  # turns of each worker at batches of fitting sessions
    prefix_tokens: int  # known part of a prompt after a restart

    @property
    def kv_tokens(self) -> int:
        """The KV cache that the sessions do not fit, with room for one of them."""
        session = self.prompt_tokens(self.turns - 1)
        return max(int(self.sessions * session / self.larger), 3 * session)

    def prompt_tokens(self, turn: int) -> int:
        """Tokens of a session's prompt in a turn; 0 is the first."""
        return self.first_tokens + turn * self.turn_tokens

    def turn(self, turn: int) -> Iterator[Prompt]:
        """The sessions' prompts: those of the turn before, and new tokens."""
        for session in range(self.sessions):
            yield a_prompt(session, self.prompt_tokens(turn))


def a_prompt(seed: int, n_tokens: int) -> Prompt:
    """Random tokens; a longer prompt of the same seed begins with a shorter one."""
    return tuple(random.Random(seed).choices(_ALPHABET, k=n_tokens))


@contextmanager
def settings_of(mode: str, sizes: Sizes, kv_tokens: int) -> Iterator[WorkerSettings]:
    """A worker with the tiers of a mode; the disk is a temporary folder."""
    with TemporaryDirectory(prefix="rz-bench-tiers-") as folder:
        yield WorkerSettings(
            model=str(sizes.model),
            kv_tokens=kv_tokens,
            host_cache_gib=sizes.gib if mode in {"host", "both"} else 0.0,
            disk_cache=folder if mode in {"disk", "both"} else "",
            disk_cache_gib=sizes.gib,
            disk_cache_write_mb_per_s=2000.0,
        )


def submit(engine: Engine, prompt: Prompt, n_output: int) -> FirstToken:
    """Begin a request."""
    sink = FirstToken()
    engine.submit(EngineRequest("r", prompt, pb.Sampling(max_tokens=n_output, ignore_eos=True)), sink)
    return sink


async def first_token_ms(engine: Engine, prompt: Prompt) -> float:
    """Milliseconds to the first token of a prompt that is alone."""
    began = time.perf_counter()
    await submit(engine, prompt, 1).came.wait()
    elapsed_ms = (time.perf_counter() - began) * 1e3
    await idle(engine)
    return elapsed_ms


async def replay_in(mode: str, sizes: Sizes) -> list[float]:
    """Milliseconds to the first tokens of all turns but the first."""
    times = []
    with settings_of(mode, sizes, sizes.kv_tokens) as settings:
        async with serving(settings) as engine:
            for turn in range(sizes.turns):
                for prompt in sizes.turn(turn):
                    elapsed_ms = await first_token_ms(engine, prompt)
                    if turn:
                        times.append(elapsed_ms)
    return times


async def fitting_in(modes: Sequence[str], sizes: Sizes) -> dict[str, list[float]]:
    """Seconds of every turn by mode, while the KV cache holds all blocks."""
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    kv_tokens = (sizes.rounds + 1) * _IN_A_ROW * _BATCH * (_BATCH_PROMPT + 2 * _BATCH_OUTPUT)
    async with AsyncExitStack() as stack:
        engines = {}
        for mode in modes:
            settings = stack.enter_context(settings_of(mode, sizes, kv_tokens))
            engines[mode] = await stack.enter_async_context(serving(settings))
        known: list[Prompt] = []
        for index in range(sizes.rounds + 1):
            prompts = [a_prompt(len(known) + seed, _BATCH_PROMPT) for seed in range(_IN_A_ROW * _BATCH)]
            known += prompts
            for mode in modes if index % 2 else reversed(modes):
                engine, began = engines[mode], time.perf_counter()
                for first in range(0, len(prompts), _BATCH):
                    for prompt in prompts[first : first + _BATCH]:
                        submit(engine, prompt, _BATCH_OUTPUT)
                    await idle(engine)
                if index:  # the first turn warms the worker up
                    seconds[mode].append(time.perf_counter() - began)
                await stored(engine, known)
    return seconds


async def stored(engine: Engine, prompts: Sequence[Prompt]) -> None:
    """Wait until each tier of the engine holds all complete blocks of the prompts."""
    n_blocks = sum(len(prompt) // HASH_BLOCK_TOKENS for prompt in prompts)
    with engine.changes.watch() as changed:
        while any(len(hashes) < n_blocks for hashes in engine.offloaded_hashes().values()):
            await changed.wait()
            changed.clear()


async def restarted(sizes: Sizes, n_prompts: int = 3) -> tuple[list[float], list[float]]:
    """Milliseconds to the first tokens of prompts that no worker knows, and of the same ones after a restart."""
    prompts = [a_prompt(seed, sizes.prefix_tokens) for seed in range(n_prompts)]
    kv_tokens = 2 * n_prompts * sizes.prefix_tokens + 1024  # no block is evicted before it is stored
    with settings_of("disk", sizes, kv_tokens) as settings:
        async with serving(settings) as engine:
            cold = [await first_token_ms(engine, prompt) for prompt in prompts]
            await stored(engine, prompts)
        async with serving(settings) as engine:
            await stored(engine, prompts)  # the folder is read in the background
            return cold, [await first_token_ms(engine, prompt) for prompt in prompts]


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of all parts."""

    turns: Mapping[str, Sequence[float]]  # milliseconds to first tokens of later turns, by mode
    fitting: Mapping[str, Sequence[float]]  # seconds of turns at batches by mode, in the order of rounds
    cold: Sequence[float]  # milliseconds to first tokens
    known: Sequence[float]  # the same after a restart

    def tokens_per_s(self, mode: str) -> float:
        """Throughput of fitting sessions."""
        return _IN_A_ROW * _BATCH * (_BATCH_PROMPT + _BATCH_OUTPUT) / median(self.fitting[mode])

    def relative(self, mode: str) -> float:
        """Throughput of fitting sessions in parts of the first mode's in the same round, median."""
        first = self.fitting[next(iter(self.fitting))]
        return median([of_first / own for of_first, own in zip(first, self.fitting[mode], strict=True)])

    def readings(self) -> Iterator[Reading]:
        """All medians."""
        for mode, ms in self.turns.items():
            yield lower(f"tiers/{mode}/first token of later turns", median(ms), "ms")
            yield higher(f"tiers/{mode}/tokens of sessions that fit", self.tokens_per_s(mode), "tokens/s")
            yield higher(f"tiers/{mode}/throughput of sessions that fit", self.relative(mode), "")
        yield lower("tiers/disk/first token without blocks", median(self.cold), "ms")
        yield lower("tiers/disk/first token after a restart", median(self.known), "ms")

    def tables(self, sizes: Sizes) -> str:
        """The sizes and the results in Markdown."""
        reference = next(iter(self.turns))
        first = median(self.turns[reference])
        lines = [
            f"{sizes.model.stem}: {sizes.sessions} sessions of {sizes.turns} turns, the first of {sizes.first_tokens} "
            f"tokens and later ones of {sizes.turn_tokens}, {sizes.larger:g} times the KV cache; and batches of "
            f"{_BATCH} requests that all fit it.",
            "",
            f"| tiers | first token of turns 2 to {sizes.turns}, median | p95 | median, of the first row "
            "| throughput where all fits | of the first row |",
            "|---|---|---|---|---|---|",
        ]
        for mode, ms in self.turns.items():
            lines.append(
                f"| {mode} | {median(ms):.0f} ms | {percentile(ms, 95):.0f} ms | {median(ms) / first:.2f} "
                f"| {self.tokens_per_s(mode):,.0f} tokens/s | {self.relative(mode):.3f} |"
            )
        cold, known = median(self.cold), median(self.known)
        lines += [
            "",
            f"| a prompt of {sizes.prefix_tokens:,} tokens | first token, median | of the first row |",
            "|---|---|---|",
            f"| computed | {cold:,.0f} ms | 1.00 |",
            f"| after a restart, from the disk | {known:,.0f} ms | {known / cold:.2f} |",
        ]
        return "\n".join(lines)


async def measure(modes: Sequence[str], sizes: Sizes) -> Measured:
    """Run all parts."""
    turns = {mode: await replay_in(mode, sizes) for mode in modes}
    return Measured(turns, await fitting_in(modes, sizes), *await restarted(sizes))


def main(
    model: Annotated[Path, typer.Argument(help="A folder or a GGUF file.")] = _MODEL,
    sessions: int = 18,
    turns: Annotated[int, typer.Option(min=2)] = 6,
    first_tokens: Annotated[int, typer.Option(min=16, help="Tokens of a session's first turn.")] = 256,
    turn_tokens: Annotated[int, typer.Option(min=16, help="New tokens of each later turn.")] = 256,
    larger: Annotated[float, typer.Option(help="Tokens of all sessions, in sizes of the KV cache.")] = 3.0,
    gib: Annotated[float, typer.Option(help="Size of each tier.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each worker at batches that fit.")] = 4,
    prefix_tokens: Annotated[int, typer.Option(min=16, help="Prompt that a restarted worker knows.")] = 4000,
    modes: Annotated[
        str, typer.Option(help="The first one is what the others are compared with.")
    ] = "none,host,disk,both",
    out: Annotated[Path | None, typer.Option(help="Write the tables into this page.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Measure all parts in every mode."""
    sizes = Sizes(model, sessions, turns, first_tokens, turn_tokens, larger, gib, rounds, prefix_tokens)
    measured = asyncio.run(measure(modes.split(","), sizes))
    written = measured.tables(sizes)
    print(written)
    if out:
        replace_between(out, "first tokens with tiers", written)
    if json_file:
        write_readings(json_file, measured.readings())


if __name__ == "__main__":
    typer.run(main)
