"""Sizes a GPU's KV cache: the memory left by the weights and the worst step, which is computed once to measure it.

A step's worst case is known from the limits of the settings; what it takes in memory is not: it depends on kernels,
on torch's allocator, and on captured steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import torch
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.backends.base import DeviceMemory
from services.compute.backends.sizing import NotEnoughMemoryError, least_kv_tokens
from services.compute.ranks.config import RankGroupConfig
from services.worker.protocol.plan import Admission, Chunk, StepPlan

_MIB = 1 << 20
_DECODED_KEYS = 1 << 19  # total of the measured decodes; more keys add little to attention's memory
_MOST_TOKENS = 1 << 22  # limit of a cache that takes all free memory: the server keeps a record of every block
# The worst case for sampling memory: a nearly uniform distribution, which makes top-p sort the whole vocabulary.
_SAMPLING = Sampling(temperature=100.0, top_p=0.99)
_KINDS = (_SAMPLING, Sampling(temperature=1.0))  # [0] is drawn outside the captured step, [1] inside it
_FEW_KEYS, _MANY_KEYS = 16, 1024
_Piece = tuple[Admission, Chunk]  # one sequence's part of a step
LOWER_STEP = "RYZANSTEIN_MAX_BATCHED_TOKENS, RYZANSTEIN_MAX_RUNNING or RYZANSTEIN_MAX_MODEL_LEN"
LOWER_WEIGHTS = "RYZANSTEIN_DTYPE, or use more ranks (RYZANSTEIN_TENSOR_PARALLEL) or a smaller model"


@dataclass(frozen=True, slots=True)
class KvBudget:
    """A GPU's memory, divided. Bytes."""

    total: int
    utilization: float
    others: int  # the CUDA context, libraries, other processes
    weights: int  # and other tensors that stay, such as slots of adapters
    workspace: int  # peak memory of the worst steps
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
        block_bytes = max(1, block_bytes)  # 0 for layers without keys
        fitting = min(left // block_bytes - 1, _MOST_TOKENS // config.block_tokens)  # one is the null block
        least = -(-least_kv_tokens(config.max_model_len, config.max_model_len) // config.block_tokens)
        n_wanted = None if config.kv_fills else config.blocks_wanted
        if left // block_bytes - 1 >= (n_wanted or least):
            return n_wanted or fitting
        needed = ((n_wanted or least) + 1) * block_bytes
        raise NotEnoughMemoryError(
            f"a KV cache of {(n_wanted or least) * config.block_tokens:,} tokens needs {needed / _MIB:,.0f} MiB but "
            f"{max(0, left) / _MIB:,.0f} MiB are left of {self.explain()}; lower "
            f"{'RYZANSTEIN_KV_TOKENS, ' if n_wanted else ''}{LOWER_STEP}, raise RYZANSTEIN_GPU_MEMORY_UTILIZATION, or "
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
        shown = ", ".join(f"{name} {size / _MIB:,.0f}" for name, size in parts.items())
        return f"{self.utilization:.0%} of {self.total / _MIB:,.0f} MiB ({shown} MiB)"


def worst_steps(config: RankGroupConfig, replayed_rows: Sequence[int]) -> tuple[StepPlan, ...]:
    """Return the steps that take most memory, all in block 1: steps full of prompts, and those of all decodes.

    Prompts end, and decodes stand, at the last positions that the settings allow. A device may capture decodes in two
    ways, with their draws and without, and steps with prompts of up to `replayed_rows`.
    """
    longest, most = config.max_model_len - 1, config.max_batched_tokens
    keys = max(1, min(longest, _DECODED_KEYS // config.max_running))
    rows = [n for n in replayed_rows if n < most][-1:]
    prompts = [_prompts(config, range(config.max_running), n_rows, longest, longest) for n_rows in (*rows, most)]
    decodes = [_decodes(config, config.max_running, keys, sampling) for sampling in _KINDS]
    return _in_turn([*prompts, *decodes])


def first_steps(config: RankGroupConfig, replayed_rows: Sequence[int]) -> tuple[StepPlan, ...]:
    """Return steps of every size that a captured step has, all in block 1, so that no request waits for a capture.

    Decodes of every number, at last with more keys than one program of the attention reads, if sequences may be as
    long; then prompts of `replayed_rows`, alone and with the largest number of decodes.
    """
    keys, longest = min(_FEW_KEYS, config.max_model_len - 1), min(_MANY_KEYS, config.max_model_len - 1)
    rows = [1 << power for power in range((config.max_running - 1).bit_length() + 1)]
    sizes = [*((min(n, config.max_running), keys) for n in rows), (1, longest)]
    steps = [_decodes(config, n_rows, n_keys, sampling) for (n_rows, n_keys), sampling in product(sizes, _KINDS)]
    for n_rows in replayed_rows:
        if n_rows <= config.max_batched_tokens and longest > 1:
            steps.append(_prompts(config, range(config.max_running), n_rows, longest, 0))
            decodes = _decodes(config, min(config.max_running - 1, n_rows - 2), keys, _SAMPLING)
            slots = range(len(decodes), config.max_running)
            steps.append(decodes + _prompts(config, slots, n_rows - len(decodes), longest, 0))
    return _in_turn(steps)


def _decodes(config: RankGroupConfig, n_rows: int, n_keys: int, sampling: Sampling) -> list[_Piece]:
    return [_piece(config, slot, n_keys, 1, sampling) for slot in range(n_rows)]


def _prompts(config: RankGroupConfig, slots: Iterable[int], n_rows: int, longest: int, known: int) -> list[_Piece]:
    """Return pieces of prompts with `n_rows` rows or as many as fit, each of `longest` rows at most.

    `known`: the tokens of a prompt up to the end of its piece, at least.
    """
    chunks = []
    for slot in slots:
        if n_rows <= 0:
            break
        n = min(n_rows, longest)
        chunks.append(_piece(config, slot, max(known, n), n))
        n_rows -= n
    return chunks


def _in_turn(steps: Sequence[Sequence[_Piece]]) -> tuple[StepPlan, ...]:
    """Return plans that compute the steps, and release their slots."""
    plans = []
    for pieces in steps:
        admissions, chunks = zip(*pieces, strict=True)
        plans.append(StepPlan(0, admissions=admissions, chunks=chunks))
        plans.append(StepPlan(0, released=tuple(chunk.slot for chunk in chunks)))
    return tuple(plans)


def _piece(config: RankGroupConfig, slot: int, n_known: int, n_rows: int, sampling: Sampling = _SAMPLING) -> _Piece:
    n_blocks = -(-n_known // config.block_tokens)
    admission = Admission(slot, sampling, (0,) * n_known, n_prompt=n_known)
    return admission, Chunk(slot, n_known - n_rows, n_rows, draws=True, new_blocks=(1,) * n_blocks)


@contextmanager
def naming_what_to_lower(during: str, lower: str) -> Iterator[None]:
    """Raise NotEnoughMemoryError with `lower` where a GPU's memory does not suffice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ", 1)[0]
        raise NotEnoughMemoryError(f"{during}: out of GPU memory; lower {lower} ({reason})") from error
