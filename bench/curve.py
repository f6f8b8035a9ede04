"""Records how long the steps of a worker take, for simulated workers (`bench.engine --curve FILE`).

Decodes are timed at each batch size, with few keys and with many; prompts alone, at several numbers of rows, and one
long prompt, whose chunks attend to more and more keys.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ryzanstein.v1.worker_pb2 import Sampling

from bench.engine import MeasuredEngine, Workload, make_requests, open_engine, summarise
from bench.stats import median
from bench.suite.machine import machine
from services.compute.model.loading.folder import open_folder
from services.compute.ranks.config import RankGroupConfig
from services.worker.simulated.curve import CurvePoint, StepCurve

_SHORT, _LONG = 16, 512  # prompt tokens of decodes with few keys, and with many
_OUTPUTS = 32
_CHUNKS = 4  # chunks of the long prompt
_ROWS = (16, 64, 256, 1024, 2048, 4096)


async def record(config: RankGroupConfig, batches: Sequence[int], model: str, rounds: int) -> StepCurve:
    """Record the curve of the worker that `config` describes; its sizes follow from `batches`."""
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
    async with open_engine(sized, Workload(_SHORT, 8, Sampling())) as engine:
        recorder = _Recorder(engine, rounds)
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
        decode=_points(batches, short),
        decode_key_s=max(0.0, median(added)),
        prefill=_points(rows, prefills),
        prefill_key_s=prefill_key_s,
    )


def gpu_name(ranks: int) -> str:
    """The name of the first GPU, and the number of GPUs in use."""
    import torch

    return f"{torch.cuda.get_device_name(0)}, {ranks} GPUs"


class _Recorder:
    def __init__(self, engine: MeasuredEngine, rounds: int) -> None:
        self._engine, self._rounds = engine, rounds
        self._seed = itertools.count(10_000)  # no two runs share a prefix

    async def decode_s(self, batch: int, prompt_tokens: int) -> float:
        """Median seconds of a step of `batch` decodes after prompts of this length."""
        measured = []
        for _ in range(self._rounds):
            workload = Workload(prompt_tokens, _OUTPUTS, Sampling())
            requests = make_requests(batch, workload, self._engine.vocab_size, next(self._seed))
            steps = await self._engine.measure(requests)
            measured.append(summarise(batch, prompt_tokens, steps, 0.0).step_us / 1e6)
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
        """Keys, seconds and rows of the steps of one prompt."""
        request = make_requests(1, Workload(tokens, 1, Sampling()), self._engine.vocab_size, next(self._seed))
        began, measured = time.perf_counter(), []
        for step in await self._engine.measure(request):
            (chunk,) = step.plan.chunks
            keys = chunk.n_tokens * (chunk.start + chunk.n_tokens / 2)
            measured.append((keys, step.returned - began, chunk.n_tokens))
            began = step.returned
        return measured


def _points(rows: Sequence[int], seconds: Sequence[float]) -> tuple[CurvePoint, ...]:
    """Points whose times do not fall with the rows: what does is noise."""
    return tuple(CurvePoint(rows=n, seconds=s) for n, s in zip(rows, itertools.accumulate(seconds, max), strict=True))
