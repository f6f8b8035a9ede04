"""Records how long the steps of a worker take, for simulated workers (`bench.engine --curve FILE`).

Decodes are timed at each batch size, with few keys and with many; prompts alone, at several numbers of rows, and one
long prompt, whose chunks attend to more and more keys. The engine serves a gateway, a router and a coordinator
meanwhile (`bench.served_engine`), as it does where its curve will be used.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.served_engine import ServedEngine, open_served
from bench.stats import median
from bench.suite.machine import machine
from bench.worker_cores import WorkerCores
from services.compute.model.loading.folder import open_folder
from services.compute.ranks.config import RankGroupConfig
from services.worker.simulated.curve import CurvePoint, StepCurve

_SHORT, _LONG = 16, 512  # prompt tokens of decodes with few keys, and with many
_OUTPUTS = 32
_CHUNKS = 4  # chunks of the long prompt
_WARM_UP = (4, 16, 8)  # requests, their prompt tokens and their answers' tokens
_ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


async def record(
    config: RankGroupConfig, batches: Sequence[int], model: str, rounds: int, cores: WorkerCores
) -> StepCurve:
    """Record the curve of the worker that `config` describes; its sizes follow from `batches`.

    This process is the worker's server, so it stays on the cores of workers.
    """
    positions = open_folder(Path(config.model_path), whole=False).spec.max_positions
    longest = min(_CHUNKS * config.max_batched_tokens, positions) - _OUTPUTS
    context = min(_LONG, longest - _OUTPUTS)
    tokens = max(max(batches) * (context + _OUTPUTS + config.block_tokens), longest + config.block_tokens)
    sized = replace(
        config,
        max_model_len=longest + _OUTPUTS,
        kv_tokens=tokens,
        kv_fills=False,
        max_running=max(*batches, config.max_running),
    )
    async with open_served(sized, cores) as engine:
        recorder = _Recorder(engine, rounds)
        await recorder.warm_up()
        short = [await recorder.decode_s(batch, _SHORT) for batch in batches]
        long = [await recorder.decode_s(batch, context) for batch in batches]
        rows = [rows for rows in _ROWS if rows <= min(config.max_batched_tokens, longest)]
        prefills = [await recorder.prefill_s(n) for n in rows]
        prefill_key_s = await recorder.prefill_key_s(longest)
    added = [
        (more - less) / (batch * (context - _SHORT)) for batch, less, more in zip(batches, short, long, strict=True)
    ]
    where = machine()
    return StepCurve(
        machine=f"{where['processor']}, {where['cores']} cores" if config.device == "cpu" else gpu_name(config.ranks),
        model=model,
        device="cuda" if config.device == "cuda" else "cpu",
        dtype=config.dtype,
        tensor_parallel=config.ranks,
        kv_tokens=0,
        decode=_points(batches, short),
        decode_key_s=max(0.0, median(added)),
        prefill=prefill_points(rows, prefills, prefill_key_s),
        prefill_key_s=prefill_key_s,
    )


def gpu_name(ranks: int) -> str:
    """The name of the first GPU, and the number of GPUs in use."""
    import torch

    return f"{torch.cuda.get_device_name(0)}, {ranks} GPUs"


class _Recorder:
    def __init__(self, engine: ServedEngine, rounds: int) -> None:
        self._engine, self._rounds = engine, rounds
        self._random = random.Random(0)  # no two prompts share a prefix

    def _prompts(self, n: int, n_tokens: int) -> list[list[int]]:
        return [[self._random.randrange(self._engine.vocab_size) for _ in range(n_tokens)] for _ in range(n)]

    async def warm_up(self) -> None:
        """Compute a few requests, which are not measured."""
        n_requests, prompt_tokens, output_tokens = _WARM_UP
        await self._engine.run(self._prompts(n_requests, prompt_tokens), output_tokens)

    async def decode_s(self, batch: int, prompt_tokens: int) -> float:
        """Median seconds of a step of `batch` decodes after prompts of this length."""
        measured = []
        for _ in range(self._rounds):
            _, steps = await self._engine.run(self._prompts(batch, prompt_tokens), _OUTPUTS)
            pairs = [pair for pair in itertools.pairwise(steps) if {step.n_rows for step in pair} == {batch}]
            measured.append(median([later.ended - earlier.ended for earlier, later in pairs]))
        return median(measured)

    async def prefill_s(self, rows: int) -> float:
        """Median seconds of a step with a prompt of `rows` tokens."""
        return median([(await self._chunks(rows))[0][1] for _ in range(self._rounds)])

    async def prefill_key_s(self, tokens: int) -> float:
        """Seconds that a key adds, by the first and the last full chunk of a prompt of `tokens` tokens."""
        slopes = []
        for _ in range(self._rounds):
            chunks = await self._chunks(tokens)
            full = [(keys, seconds) for keys, seconds, rows in chunks if rows == chunks[0][2]]
            (few, first_s), (many, last_s) = full[0], full[-1]
            slopes.append(max(0.0, last_s - first_s) / (many - few) if many > few else 0.0)
        return median(slopes)

    async def _chunks(self, tokens: int) -> list[tuple[float, float, int]]:
        """Keys, seconds and rows of the steps of one prompt; the first from its arrival on."""
        began, steps = await self._engine.run(self._prompts(1, tokens), 1)
        measured, start = [], 0
        for step in steps:
            measured.append((step.n_rows * (start + step.n_rows / 2), step.ended - began, step.n_rows))
            began, start = step.ended, start + step.n_rows
        return measured


def prefill_points(rows: Sequence[int], seconds: Sequence[float], key_s: float) -> tuple[CurvePoint, ...]:
    """The points of prompts, without what the keys add that their own rows are for each other.

    The curve adds that for the keys of every step. At least a quarter is left: a key may be measured as too slow.
    """
    without = [max(s - key_s * n * n / 2, s / 4) for n, s in zip(rows, seconds, strict=True)]
    return _points(rows, without)


def _points(rows: Sequence[int], seconds: Sequence[float]) -> tuple[CurvePoint, ...]:
    """Points whose times do not fall with the rows: what does is noise."""
    return tuple(CurvePoint(rows=n, seconds=s) for n, s in zip(rows, itertools.accumulate(seconds, max), strict=True))
