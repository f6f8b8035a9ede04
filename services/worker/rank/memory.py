"""Measures a rank's memory, and sizes its KV cache within the available memory."""

from __future__ import annotations

import logging

import torch

from services.compute.backends.base import Memory
from services.compute.backends.collectives import Communicator
from services.compute.backends.sizing import least_kv_tokens, require_memory
from services.compute.ranks.config import RankGroupConfig

logger = logging.getLogger(__name__)


class MemoryMeter:
    """Bytes allocated by this process on its device."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.process = self._last = memory.held()  # bytes before the model is loaded

    def growth(self) -> int:
        """Return the number of bytes allocated since the last call."""
        held = self._memory.held()
        grown, self._last = max(0, held - self._last), held
        return grown

    def size_kv_cache(
        self, config: RankGroupConfig, bytes_per_token: int, later: int, comm: Communicator, device: torch.device
    ) -> int:
        """Return n_blocks, the same on every rank; leaves `later` bytes free. Raises NotEnoughMemoryError."""
        steps = "the workspace of a step" + (" with adapters in all slots" if config.adapter_slots else "")
        if not config.caches:
            require_memory(later, self._memory.available(config.ranks), what=steps)
            return 0
        block_bytes = bytes_per_token * config.block_tokens
        n_wanted = config.blocks_wanted
        # After the all-gather every rank has loaded its weights; the rank with the least memory decides.
        mine = torch.tensor([self._memory.available(config.ranks)], device=device)
        scarcest = int(comm.all_gather(mine).min())
        n_blocks = n_wanted
        if config.kv_fits:
            least = least_kv_tokens(n_wanted * config.block_tokens, config.max_model_len) // config.block_tokens
            n_blocks = min(n_wanted, max(least, (scarcest - later) // max(1, block_bytes) - 1))
        what = (
            f"a KV cache of {n_blocks} blocks of {config.block_tokens} tokens ({block_bytes:,} bytes each, per rank) "
            f"and {steps}"
        )
        require_memory((n_blocks + 1) * block_bytes + later, scarcest, what=what)
        if n_blocks < n_wanted:
            tokens, wanted = n_blocks * config.block_tokens, n_wanted * config.block_tokens
            logger.warning("the KV cache has %d tokens instead of %d: there is no memory for more", tokens, wanted)
        return n_blocks
