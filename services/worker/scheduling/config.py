"""Sizes and policies of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes are in tokens unless named otherwise."""

    n_blocks: int  # usable KV blocks, the null block excluded; 0: nothing is cached, and prompts are computed whole
    block_tokens: int
    max_model_len: int
    max_running: int = 64  # slots
    # Rows of one step: at least max_running, so that every running request gets its row, and without a cache
    # max_model_len, because a prompt is then computed in one step.
    max_batched_tokens: int = 2048
    max_in_flight: int = 2  # plans whose results are outstanding
    share_max_steps: int = 64  # longest wait for the blocks of a producer
    speculation: bool = False  # decodes carry proposals where that pays
    has_state: bool = False  # layers keep a state of each slot, without which blocks continue no text
    snapshots: int = 0  # states that prefixes can be continued from
    snapshot_s: float = 0.0  # seconds that a copy of a state takes
    row_cost: int = 0  # rows of a prompt that cost as much as the tower of a row of an image
    frame_layers: int = 1  # layers of the tower, which steps share among them
    frame_tokens: int = 0  # rows of a frame that one step computes together; 0: a step may end within a frame
    age_s: float = 30.0  # seconds of waiting that raise a request by one level of priority

    @property
    def caches(self) -> bool:
        """Whether there is a KV cache."""
        return self.n_blocks > 0

    @property
    def reuses(self) -> bool:
        """Whether blocks of one request serve others."""
        return self.caches and (not self.has_state or self.snapshots > 0)
