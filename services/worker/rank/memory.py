"""Measures what a rank holds, and sizes its KV cache within what is left."""

from __future__ import annotations

import torch

from services.worker.backends.base import Memory
from services.worker.backends.collectives import Communicator
from services.worker.backends.sizing import blocks_for, require_memory
from services.worker.protocol.ledger import MemoryLedger
from services.worker.protocol.rank_config import RankGroupConfig


class MemoryMeter:
    """Bytes allocated by this process on its device."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._last = memory.held()

    def growth(self) -> int:
        """Return how many bytes were allocated since the last call."""
        held = self._memory.held()
        grown, self._last = max(0, held - self._last), held
        return grown

    def size_kv_cache(
        self, config: RankGroupConfig, bytes_per_token: int, comm: Communicator, device: torch.device
    ) -> int:
        """Return n_blocks, the same on every rank. Raises NotEnoughMemoryError."""
        block_bytes = bytes_per_token * config.block_size
        n_blocks = config.n_blocks or blocks_for(
            kv_tokens=config.kv_tokens,
            kv_bytes=config.kv_bytes,
            block_size=config.block_size,
            block_bytes=block_bytes,
            max_model_len=config.max_model_len,
        )
        # Every rank has loaded its weights once all have answered; the scarcest one decides.
        mine = torch.tensor([self._memory.available(config.ranks)], device=device)
        scarcest = int(comm.all_gather(mine).min())
        what = f"a KV cache of {n_blocks} blocks of {config.block_size} tokens ({block_bytes:,} bytes each, per rank)"
        require_memory((n_blocks + 1) * block_bytes, scarcest, what=what)
        return n_blocks

    def ledger(self, *, weights: int, workspace: int, kv_cache: int, ranks: int) -> MemoryLedger:
        """Return the ledger of what was measured."""
        return MemoryLedger(weights, workspace, kv_cache, self._memory.available(ranks))
