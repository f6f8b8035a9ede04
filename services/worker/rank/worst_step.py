"""Sizes a GPU's KV cache: what is left beside weights and the worst step, which is computed once to measure it.

A step's worst case is known from the limits of the settings; what it takes in memory is not: it depends on kernels,
on torch's allocator, and on captured steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import torch
from ryzanstein.v1.worker_pb2 import Sampling

from services.worker.backends.base import DeviceMemory
from services.worker.backends.sizing import NotEnoughMemoryError, least_kv_tokens
from services.worker.protocol.plan import Admission, Chunk, StepPlan
from services.worker.protocol.rank_config import RankGroupConfig

_MIB = 1 << 20
_DECODED_KEYS = 1 << 19  # of all rows of the decodes that are measured; with more keys attention takes little more
_MOST_TOKENS = 1 << 22  # in a cache that takes what is left: the server keeps a record of every block
_SAMPLING = Sampling(temperature=1.0, top_k=50, top_p=0.9)  # what needs most memory to draw
_KINDS = (_SAMPLING, Sampling(temperature=1.0))  # of draws: captured steps end before the first, and hold the second
_FEW_KEYS, _MANY_KEYS = 16, 1024
LOWER_STEP = "RYZANSTEIN_MAX_BATCHED_TOKENS, RYZANSTEIN_MAX_RUNNING or RYZANSTEIN_MAX_MODEL_LEN"
LOWER_WEIGHTS = "RYZANSTEIN_DTYPE, or use more ranks (RYZANSTEIN_TENSOR_PARALLEL) or a smaller model"


@dataclass(frozen=True, slots=True)
class KvBudget:
    """A GPU's memory, divided. Bytes."""

    total: int
    utilization: float
    others: int  # the CUDA context, libraries, other processes
    weights: int  # and other tensors that stay, such as slots of adapters
    workspace: int  # of the worst steps
    graphs: int  # captured steps

    @classmethod
    def measured(cls, memory: DeviceMemory, rehearse: Callable[[], None], cache: int, utilization: float) -> KvBudget:
        """Divide the memory by what `rehearse` takes, which computes the worst steps in a KV cache of `cache` bytes."""
        memory.release()
        before = memory.report()
        rehearse()
        peak = memory.report().peak
        memory.release()
        after = memory.report()
        return cls(
            after.total,
            utilization,
            others=max(0, after.total - after.free - after.reserved),
            weights=before.reserved - cache,
            workspace=max(0, peak - after.reserved),
            graphs=max(0, after.reserved - before.reserved),
        )

    @property
    def left(self) -> int:
        """Bytes for the KV cache; negative if there is not even room for the rest."""
        taken = self.others + self.weights + self.workspace + self.graphs
        return int(self.total * self.utilization) - taken

    def n_blocks(self, config: RankGroupConfig, block_bytes: int, left: int) -> int:
        """Return the blocks of a cache in `left` bytes, which are those of the rank with the least.

        The configured number if there is one. Raises NotEnoughMemoryError.
        """
        fitting = min(left // block_bytes - 1, _MOST_TOKENS // config.block_tokens)  # one is the null block
        least = -(-least_kv_tokens(config.max_model_len, config.max_model_len) // config.block_tokens)
        asked = None if config.kv_fills else config.blocks_wanted
        if left // block_bytes - 1 >= (asked or least):
            return asked or fitting
        needed = ((asked or least) + 1) * block_bytes
        raise NotEnoughMemoryError(
            f"a KV cache of {(asked or least) * config.block_tokens:,} tokens needs {needed / _MIB:,.0f} MiB but "
            f"{max(0, left) / _MIB:,.0f} MiB are left of {self.explain()}; lower "
            f"{'RYZANSTEIN_KV_TOKENS, ' if asked else ''}{LOWER_STEP}, raise RYZANSTEIN_GPU_MEMORY_UTILIZATION, or "
            "use more ranks"
        )

    def explain(self) -> str:
        """Return the parts in words."""
        parts = {
            "weights": self.weights,
            "workspace": self.workspace,
            "graphs": self.graphs,
            "CUDA and other processes": self.others,
        }
        said = ", ".join(f"{name} {size / _MIB:,.0f}" for name, size in parts.items())
        return f"{self.utilization:.0%} of {self.total / _MIB:,.0f} MiB ({said} MiB)"


def worst_steps(config: RankGroupConfig) -> tuple[StepPlan, ...]:
    """Return the steps that take most memory, all in block 1: a step full of prompts, and those of all decodes.

    Prompts end, and decodes stand, at the last positions that the settings allow. A device may capture decodes in two
    ways, with their draws and without.
    """
    longest = config.max_model_len - 1
    prompts: list[tuple[Admission, Chunk]] = []
    left = config.max_batched_tokens
    while left > 0 and len(prompts) < config.max_running:
        n_rows = min(left, longest)
        prompts.append(_piece(config, len(prompts), longest, n_rows))
        left -= n_rows
    keys = max(1, min(longest, _DECODED_KEYS // config.max_running))
    decodes = ([_piece(config, slot, keys, 1, sampling) for slot in range(config.max_running)] for sampling in _KINDS)
    steps = []
    for pieces in (prompts, *decodes):
        admissions, chunks = zip(*pieces, strict=True)
        steps.append(StepPlan(0, admissions=admissions, chunks=chunks))
        steps.append(StepPlan(0, released=tuple(chunk.slot for chunk in chunks)))
    return tuple(steps)


def first_steps(config: RankGroupConfig) -> tuple[StepPlan, ...]:
    """Return decodes of every size that a captured step has, all in block 1, so that no request waits for a capture.

    The last ones have more keys than one program of the attention reads, if sequences may be as long.
    """
    keys, longest = min(_FEW_KEYS, config.max_model_len - 1), min(_MANY_KEYS, config.max_model_len - 1)
    rows = [1 << power for power in range((config.max_running - 1).bit_length() + 1)]
    steps = []
    sizes = [*((min(n, config.max_running), keys) for n in rows), (1, longest)]
    for (n_rows, n_keys), sampling in product(sizes, _KINDS):
        pieces = [_piece(config, slot, n_keys, 1, sampling) for slot in range(n_rows)]
        admissions, chunks = zip(*pieces, strict=True)
        steps.append(StepPlan(0, admissions=admissions, chunks=chunks))
        steps.append(StepPlan(0, released=tuple(range(n_rows))))
    return tuple(steps)


def _piece(
    config: RankGroupConfig, slot: int, n_known: int, n_rows: int, sampling: Sampling = _SAMPLING
) -> tuple[Admission, Chunk]:
    n_blocks = -(-n_known // config.block_tokens)
    admission = Admission(slot, sampling, (0,) * n_known, n_prompt=n_known)
    return admission, Chunk(slot, n_known - n_rows, n_rows, n_draws=1, new_blocks=(1,) * n_blocks)


@contextmanager
def naming_what_to_lower(during: str, lower: str) -> Iterator[None]:
    """Raise NotEnoughMemoryError with `lower` where a GPU's memory does not suffice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = str(error).split(". ", 1)[0]
        raise NotEnoughMemoryError(f"{during}: out of GPU memory; lower {lower} ({said})") from error
