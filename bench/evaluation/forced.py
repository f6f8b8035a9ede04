"""Forces a text through a model in process: its beginning as a prompt, its end token by token as decodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from ryzanstein.v1.worker_pb2 import Attention, Sampling
from torch import Tensor

from services.common.attention import DENSE, AttentionMode
from services.compute.backends.batch import StepBatch
from services.compute.backends.cpu.collectives import ReplayedLoneRank
from services.compute.backends.kv_format import find_kv_format
from services.compute.backends.opening import open_backend
from services.compute.ranks.config import RankGroupConfig
from services.compute.ranks.line import RankLine
from services.compute.ranks.segment import Segment
from services.worker.protocol.plan import Admission, Chunk, StepPlan
from services.worker.protocol.plan_codec import view_plan
from services.worker.rank.batching import lay_out
from services.worker.rank.loading import load
from services.worker.rank.slot_table import SlotTable

BLOCK_TOKENS = 16
_ROWS = 512  # rows of a prompt in a step
_DECODES = 32  # decodes in a step


class ForcedModel:
    """A model with a KV cache for one text of at most `max_tokens` tokens. Raises ModelError."""

    def __init__(self, model: Path, max_tokens: int, kv_dtype: str = "") -> None:
        """`kv_dtype`: name of a KV format; empty: numbers of the model's dtype."""
        self.n_blocks = -(-max_tokens // BLOCK_TOKENS)
        self.max_tokens = self.n_blocks * BLOCK_TOKENS
        config = RankGroupConfig(
            str(model), n_blocks=self.n_blocks, max_model_len=self.max_tokens, kv_format=kv_dtype, page_summaries=True
        )
        kv_format = find_kv_format(kv_dtype) if kv_dtype else None
        backend = open_backend(torch.bfloat16, torch.device("cpu"), kv_format)
        loaded = load(config, ReplayedLoneRank(RankLine(Segment.create("bench", 4096), 0, 0)), backend)
        self.decoder, self.cache = loaded.decoder, loaded.make_cache(self.n_blocks)

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int], start: int = 0) -> None:
        """Compute the keys and values of `token_ids` from the position `start` on, as a prompt."""
        for low in range(start, len(token_ids), _ROWS):
            high = min(low + _ROWS, len(token_ids))
            self.compute(self.lay_out(token_ids[:high], high, low, DENSE), rows=[high - low - 1])

    def decodes(self, token_ids: Sequence[int], n_prompt: int, mode: AttentionMode) -> Iterator[Tensor]:
        """Compute the tokens from `n_prompt` on as decodes; yield their logits, [n, vocab] a step.

        The tokens before must be in the cache.
        """
        for low in range(n_prompt, len(token_ids), _DECODES):
            yield self.compute(self.lay_out(token_ids[: low + _DECODES], n_prompt, low, mode))

    @torch.inference_mode()
    def compute(self, batch: StepBatch, rows: list[int] | None = None) -> Tensor:
        """Return the logits of a step's rows, or of some: [n, vocab]."""
        return self.decoder.logits(self.decoder.forward(batch, self.cache, rows))

    def lay_out(self, known: Sequence[int], n_prompt: int, start: int, mode: AttentionMode) -> StepBatch:
        """Return a step with the rows from `start` on."""
        table = SlotTable(1, self.max_tokens, BLOCK_TOKENS, self.n_blocks)
        attention = Attention(**asdict(mode))
        admission = Admission(0, Sampling(attention=attention), tuple(known), n_prompt)
        chunk = Chunk(0, start, len(known) - start, draws=True, new_blocks=tuple(range(1, self.n_blocks + 1)))
        plan = view_plan(StepPlan(0, admissions=(admission,), chunks=(chunk,)))
        table.admit(plan.admissions[0])
        table.extend(plan)
        numbers, _ = lay_out(table, plan, exact_chunks=False)
        return numbers.batch([torch.from_numpy(array) for array in numbers.arrays()])
