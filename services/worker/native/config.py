"""The configuration of the native engine."""

from __future__ import annotations

from dataclasses import dataclass

from services.compute.ranks.config import RankGroupConfig
from services.compute.ranks.memory import worker_account
from services.worker.adapters.slots import AdapterSources
from services.worker.engine.request import AdapterRef
from services.worker.engine.state import EngineFacts
from services.worker.kv_transfer.neighbours import NO_PULLS, NeighbourLimits
from services.worker.kv_transfer.opening import NO_TIERS, TierSizes
from services.worker.process.rank_group import GroupStarted
from services.worker.scheduling.admission import Capacity


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and limits of one engine."""

    ranks: RankGroupConfig
    max_batched_tokens: int
    prefill_step_s: float  # seconds by which prompts may lengthen a step of decodes
    neighbours: NeighbourLimits = NO_PULLS
    recovery_limit_s: float = 0.0  # longest time of repeated attempts to restart lost ranks; 0: no limit
    adapters: AdapterSources | None = None  # None: no room for adapters
    pinned: tuple[AdapterRef, ...] = ()  # adapters of the settings that keep their slots
    tiers: TierSizes = NO_TIERS  # places of KV blocks below the device

    def facts(self, started: GroupStarted) -> EngineFacts:
        """Facts for observers after the ranks have started."""
        positions = started.n_blocks * self.ranks.block_tokens
        if not self.ranks.caches:
            positions = self.ranks.max_model_len
        return EngineFacts(
            vocab_size=started.model.vocab_size,
            hidden_size=started.model.hidden_size,
            max_request_tokens=Capacity(self.ranks.max_model_len, positions).max_request_tokens,
            startup_s=started.phases,
            memory=worker_account(started.memory, self.ranks.ranks, self.tiers.host_bytes),
            weight_formats=started.model.weight_formats,
        )
