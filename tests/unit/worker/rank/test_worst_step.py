"""A GPU's KV cache takes what the worst step leaves, and what does not fit is named with what to lower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from services.compute.backends.base import DeviceMemory, MemoryReport
from services.compute.backends.collectives import SingleRank
from services.compute.backends.parking import Restore
from services.compute.backends.sizing import NotEnoughMemoryError
from services.compute.ranks.config import RankGroupConfig
from services.worker.rank.runner import Runner
from services.worker.rank.worst_step import KvBudget, first_steps, naming_what_to_lower, worst_steps
from tests.unit.compute.model.harness import lone_rank
from tests.unit.worker.rank.standin import StandinDecoder, standin_cache

GIB = 1 << 30
BLOCK = 2 << 20  # bytes of 16 tokens
CONFIG = RankGroupConfig("m", device="cuda", kv_fills=True, max_model_len=8192)


@dataclass
class FullGpu:
    """80 GiB, of which other processes have 1; torch keeps what is freed until it is released."""

    allocated: int = 0
    reserved: int = 0
    peak: int = 0

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        self.peak = max(self.peak, self.reserved)

    def free(self, size: int) -> None:
        self.allocated -= size

    def held(self) -> int:
        return self.allocated

    def release(self) -> None:
        self.reserved = self.allocated

    def rest(self) -> None:
        raise NotImplementedError

    def available(self, ranks: int) -> int:
        return 79 * GIB - self.reserved

    def park(self) -> Restore:
        raise NotImplementedError

    def pin(self, area: memoryview) -> None:
        raise NotImplementedError

    def report(self) -> MemoryReport:
        report = MemoryReport(80 * GIB, self.available(1), self.reserved, self.peak)
        self.peak = self.reserved
        return report


def budget(utilization: float = 0.9, weights: int = 16 * GIB) -> KvBudget:
    """Of a model whose steps take 3 GiB, of which 1 stays with captured steps."""
    gpu = FullGpu()
    assert isinstance(gpu, DeviceMemory)
    gpu.allocate(40 * GIB)  # loading took more than stays
    gpu.free(40 * GIB - weights - 2 * BLOCK)

    def rehearse() -> None:
        gpu.allocate(2 * GIB)
        gpu.allocate(1 * GIB)
        gpu.free(2 * GIB)

    return KvBudget.measured(gpu, rehearse, 2 * BLOCK, utilization)


def test_the_cache_takes_the_share_left_by_weights_and_steps() -> None:
    actual = budget()
    parts = actual.others, actual.weights, actual.workspace, actual.graphs
    assert parts == (1 * GIB, 16 * GIB, 2 * GIB, 1 * GIB)
    assert actual.left == int(72 * GIB) - 20 * GIB
    assert actual.n_blocks(CONFIG, BLOCK, actual.left) == 52 * 512 - 1  # without the null block
    assert budget(0.5).left == 20 * GIB
    assert actual.n_blocks(CONFIG, BLOCK // 64, actual.left) == (1 << 22) // 16, "more would only slow the server"
    assert actual.n_blocks(CONFIG, BLOCK, 10 * BLOCK * 129) == 1289, "the rank with the least decides"


def test_a_configured_size_is_kept_or_refused() -> None:
    changed = replace(CONFIG, kv_fills=False, kv_tokens=4096)
    assert budget().n_blocks(changed, BLOCK, 257 * BLOCK) == 256
    with pytest.raises(
        NotEnoughMemoryError, match=r"cache of 4,096 tokens needs 514 MiB but 512 MiB .*RYZANSTEIN_KV_TO"
    ):
        budget().n_blocks(changed, BLOCK, 256 * BLOCK)


def test_a_budget_without_room_names_the_parts_and_the_settings_to_lower() -> None:
    tight = budget(0.25)
    assert tight.left == 0
    message = (
        r"of 2,048 tokens needs 258 MiB but 0 MiB are left of 25% of 81,920 MiB \(weights 16,384, workspace 2,048, "
        r"graphs 1,024, CUDA and other processes 1,024 MiB\); lower RYZANSTEIN_MAX_BATCHED_TOKENS, .*"
        "raise RYZANSTEIN_GPU_MEMORY_UTILIZATION"
    )
    with pytest.raises(NotEnoughMemoryError, match=message):
        tight.n_blocks(CONFIG, BLOCK, tight.left)


def test_out_of_memory_names_the_settings_to_lower() -> None:
    def run_out() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has ...")

    with (
        pytest.raises(
            NotEnoughMemoryError, match=r"^a step: out of GPU memory; lower RYZANSTEIN_X \(CUDA out of memory\)$"
        ),
        naming_what_to_lower("a step", "RYZANSTEIN_X"),
    ):
        run_out()


@pytest.mark.parametrize(("max_batched_tokens", "max_model_len"), [(64, 40), (16, 100), (400, 40)])
def test_the_worst_steps_are_as_large_as_the_settings_allow(max_batched_tokens: int, max_model_len: int) -> None:
    config = replace(
        CONFIG, max_running=8, max_batched_tokens=max_batched_tokens, max_model_len=max_model_len, block_tokens=16
    )
    replayed = (8, 12)
    steps = worst_steps(config, replayed)
    captured, prompts, decodes, drawn = (step.chunks for step in steps if step.chunks)
    assert sum(chunk.n_tokens for chunk in captured) == 12
    assert decodes == drawn
    assert [step.admissions[0].sampling.top_p > 0 for step in steps if step.chunks] == [True, True, True, False]
    assert sum(chunk.n_tokens for chunk in prompts) == min(max_batched_tokens, 8 * (max_model_len - 1))
    assert all(chunk.start + chunk.n_tokens == max_model_len - 1 for chunk in (*prompts, *decodes))
    assert [chunk.n_tokens for chunk in decodes] == [1] * 8
    run: Callable[..., None] = Runner(
        StandinDecoder(SingleRank()),
        standin_cache(1, 16),
        lone_rank(),
        n_blocks=1,
        block_tokens=16,
        max_running=8,
        max_model_len=max_model_len,
        device=torch.device("cpu"),
    ).rehearse
    run(steps)  # one block suffices, and all slots are free again
    run(steps)
    first = first_steps(replace(config, max_running=6), (*replayed, 1 << 20))
    decodes, mixed = [[step.chunks for step in first if step.chunks][part] for part in (slice(10), slice(10, None))]
    assert [len(chunks) for chunks in decodes] == [1, 1, 2, 2, 4, 4, 6, 6, 1, 1]
    assert [sum(chunk.n_tokens for chunk in chunks) for chunks in mixed] == [8, 8, 12, 12]
    assert [sum(chunk.n_tokens == 1 for chunk in chunks) for chunks in mixed] == [0, 5, 0, 5]
    run(first)
    run(steps)


def test_the_worst_draws_sort_the_whole_vocabulary() -> None:
    worst = worst_steps(CONFIG, ())[0].admissions[0].sampling
    logits = 5 * torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    falling = (logits / worst.temperature).softmax(-1).sort(descending=True).values
    widest = 64 * 8**3  # candidates before the last widening of `filter_rows`
    assert falling[:widest].sum() < worst.top_p
