"""A published trace as a load: its arrivals, lengths and shared prefixes. The tokens, which no trace has, are drawn."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bench.fleet.workloads import FleetRequest
from services.planner.trace import TraceRequest, read_trace
from services.worker.simulated.language import Language

_BLOCKS_KEPT = 4096  # token lists of blocks that later requests share


@dataclass(frozen=True, slots=True)
class TracedWorkload:
    """The requests of a trace, once, so many times as fast as they came."""

    name: str
    language: Language
    vocabulary: Sequence[int]
    trace: Sequence[TraceRequest]
    faster: float = 1.0

    @classmethod
    def read(cls, path: Path, language: Language, faster: float) -> TracedWorkload:
        """Read a file in Mooncake's or Azure's format. Raises TraceError."""
        return cls(path.name, language, language.words, read_trace(path), faster)

    @property
    def rate(self) -> float:
        """Requests a second on average."""
        span_s = (self.trace[-1].at - self.trace[0].at) / self.faster
        return len(self.trace) / span_s if span_s else float(len(self.trace))

    @property
    def longest(self) -> int:
        """The tokens of the longest request, its answer included."""
        return max(one.prompt_tokens + one.answer_tokens for one in self.trace)

    def arrivals(self, rate: float, draw: random.Random) -> Iterator[tuple[float, FleetRequest]]:
        """The trace's own arrivals: `rate` and `draw` change nothing."""
        began = self.trace[0].at
        block_tokens = lru_cache(_BLOCKS_KEPT)(self._block)
        for number, source in enumerate(self.trace):
            shared = [token for block in source.blocks for token in block_tokens(block, source.block_tokens)]
            own = random.Random(f"request {number}").choices(self.vocabulary, k=source.prompt_tokens)
            prompt = [*shared, *own][: source.prompt_tokens]
            session = f"{source.tenant}/{source.session}" if source.session else ""
            request = FleetRequest.of(self.language, prompt, source.answer_tokens, session)
            yield (source.at - began) / self.faster, request

    def _block(self, block: int, n_tokens: int) -> list[int]:
        """The tokens of a block: equal blocks are equal prefixes."""
        return random.Random(f"block {block}").choices(self.vocabulary, k=n_tokens)
