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
    max_batched_tokens: int = 2048  # rows of one step
    max_in_flight: int = 2  # plans whose results are outstanding
    share_max_steps: int = 64  # longest wait for the blocks of a producer
    age_s: float = 30.0  # seconds of waiting that raise a request by one level of priority

    def __post_init__(self) -> None:
        if self.max_batched_tokens < self.max_running:
            raise ValueError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_running ({self.max_running}), "
                "or some running requests would never get their row"
            )
        if not self.caches and self.max_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_model_len "
                f"({self.max_model_len}), because this model computes a prompt in one step"
            )

    @property
    def caches(self) -> bool:
        """Whether there is a KV cache."""
        return self.n_blocks > 0
