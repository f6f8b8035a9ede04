"""States of prefixes outlive their eviction and their worker: on a disk, and as tokens that a successor computes again.

One family for each kind of state.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from ryzanstein.v1 import worker_pb2 as pb

from services.worker.engine.kv_events import BlockPlace
from services.worker.kv_transfer import loader
from services.worker.kv_transfer.tiers import Tiers
from services.worker.native.startup import read_model
from services.worker.native.step_cost import StepTimer
from services.worker.scheduling.snapshots import Snapshots
from tests.integration.worker_engine.answers import ask, complete, submitted
from tests.integration.worker_engine.forked_engine import forked
from tests.integration.worker_engine.test_states import N_TOKENS, continuation
from tests.integration.worker_server.gateway import until
from tests.unit.compute.model.zoo import N_PIECES, write_with_tokenizer

LENGTH = 40
N_BLOCKS, N_STATES = 6, 2  # those with 61 + 40 tokens; states at 48, the prompt's last end of a block, and at 64


def prompt(seed: int, n: int) -> list[int]:
    return [(seed * 31 + place * 7) % N_PIECES for place in range(n)]


@pytest.fixture(autouse=True)
def _nothing_depends_on_the_speed_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    adapt = Snapshots.adapt
    monkeypatch.setattr(Snapshots, "adapt", lambda snapshots, _: adapt(snapshots, 0.0))
    monkeypatch.setattr(Tiers, "_is_slow", lambda *_: False)
    monkeypatch.setattr(StepTimer, "share_min_tokens", lambda *_: 1)
    monkeypatch.setattr(loader, "LEAST_S", loader.MOST_S)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("variant", "ranks"),
    [("lfm2", 1), ("zamba2", 2), ("qwen3_5", 1), ("minimax", 1), ("jamba", 2), ("kimi_linear", 1)],
)
async def test_evicted_states_are_loaded_and_a_drained_text_goes_on(variant: str, ranks: int, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = write_with_tokenizer(variant, folder)
    disk = {"disk_cache": str(tmp_path / "kv"), "disk_cache_gib": 0.1}
    opened = partial(forked, folder, tensor_parallel=ranks, max_running=4, kv_tokens=176, **disk)
    state_bytes = ranks * read_model(folder).spec.state(ranks).row_bytes(itemsize=4)
    async with opened() as engine:
        whole = await complete(engine, ask(prompt(1, 61), LENGTH, min_tokens=LENGTH))
        assert whole.ids[:N_TOKENS] == continuation(model, prompt(1, 61))
        block_bytes = 16 * engine.state().kv_bytes_per_token
        stored = (N_BLOCKS + N_STATES * -(-state_bytes // block_bytes)) * block_bytes
        await until(lambda: engine.transfers.places[BlockPlace.DISK].stored_bytes == stored)
        for seed in (2, 3):  # more than the rest of the KV cache
            await complete(engine, ask(prompt(seed, 100), N_TOKENS, min_tokens=N_TOKENS))
        hits = engine.counters.prefix_hit_tokens
        again = await complete(engine, ask(prompt(1, 61), LENGTH, min_tokens=LENGTH))
        assert again.ids == whole.ids
        assert engine.counters.prefix_hit_tokens - hits == 48
        drained = submitted(engine, ask(prompt(1, 61), LENGTH, min_tokens=LENGTH))
        await drained.until(6)
        await engine.drain(0.0)
        assert drained.handoff is not None
        assert drained.handoff.reason == pb.Handoff.REASON_DRAIN
        assert drained.ids == whole.ids[: len(drained.ids)]
        assert engine.state().pull_bytes_per_s == engine.state().standby_tokens == 0
    async with opened() as successor:
        resumed = ask(prompt(1, 61), LENGTH, generated=tuple(drained.ids), min_tokens=LENGTH)
        assert (await complete(successor, resumed)).ids == whole.ids[len(drained.ids) :]
        assert successor.counters.prefix_hit_tokens == 64
        assert successor.transfers.places[BlockPlace.DISK].failures.total() == 0
