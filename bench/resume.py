"""Measures how long streams with long texts pause when their worker is killed, without and with copies at a standby.

    python -m bench.resume --out docs/kv-tiers.md
    python -m bench.make_checkpoint 15m MODEL && python -m bench.resume MODEL --streams 64 --prompt-tokens 8000

Each session's first request computes its prompt, and the next ones, all together, are the streams: while prompts are
computed, a stream would end before the last one begins. The busiest worker is killed once every stream has some of its
tokens. The exit status is 1 if a client did not get all its tokens, or others with copies than without. With the
default sizes both modes compute 80,000 tokens of prompts of SmolLM2 and 800 steps: five minutes at 1,000 tokens/s.
Each worker's KV cache has room for all streams twice.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from bench.evaluation.report import replace_between
from bench.reading import Reading, lower, write_readings
from bench.serve import Answer, complete
from bench.soaking.faults import Fault, FaultKind, strike
from bench.stats import median, percentile
from services.cli.stack.default_model import default_model
from tests.stack import RunningStack, running_stack

_MODEL = Path(default_model().model)
MODES = {"without copies": 0, "with copies": 1}  # shortest text that is copied


@dataclass(frozen=True)
class Plan:
    """The parameters of a round."""

    model: Path
    workers: int
    streams: int
    prompt_tokens: int
    output_tokens: int
    kill_at: int  # tokens of every stream
    mb_per_s: float

    def prompts(self) -> list[list[int]]:
        """Prompts without a common prefix, the same in every round."""
        rng = random.Random(0)
        return [[rng.randrange(300, 4_000) for _ in range(self.prompt_tokens)] for _ in range(self.streams)]

    def variables(self, copied_from: int) -> dict[str, str]:
        """Settings: the KV cache of each worker has room for all streams, and for as many copies."""
        tokens = 2 * self.streams * (self.prompt_tokens + self.output_tokens)
        return {
            "RYZANSTEIN_KV_TOKENS": str(tokens),
            "RYZANSTEIN_MAX_RUNNING": str(self.streams),
            "RYZANSTEIN_SATURATION_S": "3600",  # all prompts come at once
            "RYZANSTEIN_STANDBY_TOKENS": str(copied_from),
            "RYZANSTEIN_STANDBY_MB_PER_S": str(self.mb_per_s),
        }


def pause_ms(answer: Answer, killed_at: float) -> float:
    """The longest gap between two tokens of a moved stream of which the second came after the kill."""
    times = [answer.began + at for at in answer.token_times]
    return 1e3 * max(later - earlier for earlier, later in pairwise(times) if later > killed_at)


async def run(stack: RunningStack, plan: Plan) -> tuple[list[Answer], float]:
    """All answers, and when the busiest worker was killed, by time.perf_counter."""
    name = await asyncio.to_thread(stack.model)

    prompts, answers = plan.prompts(), [Answer() for _ in range(plan.streams)]

    async def stream(index: int, n_output: int, answer: Answer) -> None:
        fields = {
            "session_id": f"s{index}",
            "return_token_ids": True,
            "stream_options": {"include_workers": True},
        }
        await complete(stack.url, name, prompts[index], n_output, fields, answer=answer)

    await asyncio.gather(*(stream(index, 1, Answer()) for index in range(plan.streams)))
    clients = [asyncio.create_task(stream(index, plan.output_tokens, answer)) for index, answer in enumerate(answers)]
    while any(len(answer.token_ids) < plan.kill_at and not answer.total for answer in answers):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    await asyncio.to_thread(strike, stack, Fault(FaultKind.KILL_WORKER, await asyncio.to_thread(stack.busiest)))
    killed_at = time.perf_counter()
    await asyncio.gather(*clients)
    return answers, killed_at


def measure(plan: Plan) -> dict[str, list[float]]:
    """Pauses of the moved streams by mode. Raises RuntimeError for texts that are short or differ."""
    pauses: dict[str, list[float]] = {}
    texts: list[list[list[int]]] = []
    for mode, copied_from in MODES.items():
        os.environ.update(plan.variables(copied_from))
        with (
            tempfile.TemporaryDirectory(prefix="rz-") as folder,
            running_stack(Path(folder), "--workers", str(plan.workers), model=str(plan.model)) as stack,
        ):
            stack.wait_serving(plan.workers)
            answers, killed_at = asyncio.run(run(stack, plan))
        if short := [each for each in answers if each.error or len(each.token_ids) != plan.output_tokens]:
            raise RuntimeError(f"{mode}: {len(short)} streams are not whole: {short[0].error or 'too short'}")
        pauses[mode] = [pause_ms(each, killed_at) for each in answers if len(each.workers) > 1]
        texts.append([each.token_ids for each in answers])
    if texts[0] != texts[1]:
        raise RuntimeError("texts with copies differ from those without")
    return pauses


def readings(pauses: dict[str, Sequence[float]]) -> list[Reading]:
    """Medians and 95th percentiles."""
    return [
        lower(f"resume/{mode}/pause, {which}", value, "ms")
        for mode, values in pauses.items()
        for which, value in (("median", median(values)), ("p95", percentile(values, 95)))
    ]


def table(plan: Plan, pauses: Mapping[str, Sequence[float]]) -> str:
    """The sizes, and the pauses by mode as a table in Markdown."""
    lines = [
        f"{plan.model.stem}: {plan.streams} streams with prompts of {plan.prompt_tokens:,} tokens on "
        f"{plan.workers} workers.",
        "",
        "| | moved streams | pause, median | p95 |",
        "|---|---|---|---|",
    ]
    for mode, ms in pauses.items():
        lines.append(f"| {mode} | {len(ms)} | {median(ms):,.0f} ms | {percentile(ms, 95):,.0f} ms |")
    return "\n".join(lines)


def main(
    model: Annotated[Path, typer.Argument(help="A folder or a GGUF file.")] = _MODEL,
    workers: Annotated[int, typer.Option(min=2)] = 2,
    streams: Annotated[int, typer.Option(min=1)] = 8,
    prompt_tokens: int = 4_096,
    output_tokens: int = 400,
    kill_at: Annotated[int, typer.Option(help="Tokens that every stream has at the kill.")] = 200,
    mb_per_s: Annotated[float, typer.Option(help="Rate of the copies.")] = 1_000.0,
    out: Annotated[Path | None, typer.Option(help="Write the table into this page.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the readings there.")] = None,
) -> None:
    """Kill a worker of a model once in each mode."""
    plan = Plan(model, workers, streams, prompt_tokens, output_tokens, kill_at, mb_per_s)
    pauses = measure(plan)
    if not all(pauses.values()):
        raise SystemExit("the kill met no stream: choose more output tokens, or an earlier moment")
    written = table(plan, pauses)
    print(written)
    if out:
        replace_between(out, "pauses of resumed texts", written)
    if json_file:
        write_readings(json_file, readings(pauses))


if __name__ == "__main__":
    typer.run(main)
