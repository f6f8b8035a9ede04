"""A simulated rank's state of its requests: known tokens, block tables, and KV, which is a hash for each block."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.token_logprobs import TokenLogprobs
from services.worker.protocol.plan import Admission, Chunk, SlotResult, StepPlan
from services.worker.simulated.language import Language

_UNWRITTEN = b"never written"


@dataclass(slots=True)
class _Sequence:
    token_ids: array[int]  # known, drawn ones included
    n_prompt: int
    sampling: Sampling
    embed: bool
    root: bytes  # instead of the KV before the first block
    blocks: list[int]


class Sequences:
    """The slots and the KV cache of simulated ranks; computes plans at once."""

    def __init__(self, language: Language, n_blocks: int, embedding_size: int) -> None:
        """`embedding_size`: numbers of an embedding."""
        self._language, self._embedding_size = language, embedding_size
        self._slots: dict[int, _Sequence] = {}
        self._caches = n_blocks > 0
        self.kv = [_UNWRITTEN] * (n_blocks + 1)  # by block; the null block is never read

    def compute(self, plan: StepPlan, roots: dict[int, bytes]) -> tuple[tuple[SlotResult, ...], float]:
        """The results of a plan, and the number of keys that its decodes attend to. `roots`: of adapters, by slot."""
        for slot in plan.released:
            self._slots.pop(slot, None)
        for admission in plan.admissions:
            self._slots[admission.slot] = _admitted(admission, roots)
        results = tuple([result for chunk in plan.chunks if (result := self._compute(chunk)) is not None])
        return results, float(sum(chunk.start for chunk in plan.chunks if chunk.n_tokens == 1 or chunk.proposals))

    def forget_kv(self) -> None:
        """Lose the contents of all blocks."""
        self.kv = [_UNWRITTEN] * len(self.kv)

    def _compute(self, chunk: Chunk) -> SlotResult | None:
        sequence = self._slots[chunk.slot]
        sequence.blocks += chunk.new_blocks
        if chunk.proposals:
            return self._result(chunk.slot, sequence, tuple(self._verified(sequence, chunk)))
        end = chunk.start + chunk.n_tokens
        self._write(sequence, chunk.start, end)
        scores = tuple(self._prompt_scores(sequence, chunk.start, end))
        if sequence.embed:
            pooled = self._embedding(sequence) if end == len(sequence.token_ids) else ()
            return SlotResult(chunk.slot, prompt_logprobs=scores, pooled=pooled)
        if not chunk.draws:
            return SlotResult(chunk.slot, prompt_logprobs=scores) if scores else None
        return self._result(chunk.slot, sequence, (self._draw(sequence),), scores)

    def _verified(self, sequence: _Sequence, chunk: Chunk) -> Iterator[int]:
        """Draw a token at every row, up to the first that differs from the proposal."""
        for row, proposal in enumerate((*chunk.proposals, -1), start=chunk.start):
            self._write(sequence, row, row + 1)
            token = self._draw(sequence)
            yield token
            if token != proposal:
                return

    def _draw(self, sequence: _Sequence) -> int:
        known = sequence.token_ids
        start = len(known) // self._language.block_tokens * self._language.block_tokens
        token = self._language.draw(
            self._parent(sequence, start), known[start:], len(known) - sequence.n_prompt, sequence.sampling
        )
        known.append(token)
        return token

    def _write(self, sequence: _Sequence, start: int, end: int) -> None:
        """Write the KV of the blocks that the positions [start, end) complete."""
        size = self._language.block_tokens
        if not self._caches:
            return
        for block in range(start // size, end // size):
            begin = block * size
            parent = self._parent(sequence, begin)
            self.kv[sequence.blocks[block]] = self._language.chain(parent, sequence.token_ids[begin : begin + size])

    def _parent(self, sequence: _Sequence, start: int) -> bytes:
        """The KV of the block that ends at position `start`."""
        return self.kv[sequence.blocks[start // self._language.block_tokens - 1]] if start else sequence.root

    def _embedding(self, sequence: _Sequence) -> tuple[float, ...]:
        return self._language.embedding(self._language.chain(sequence.root, sequence.token_ids), self._embedding_size)

    def _result(
        self, slot: int, sequence: _Sequence, drawn: tuple[int, ...], scores: tuple[TokenLogprobs, ...] = ()
    ) -> SlotResult:
        sampling = sequence.sampling
        if not sampling.HasField("logprobs"):
            return SlotResult(slot, drawn, prompt_logprobs=scores)
        return SlotResult(slot, drawn, tuple(self._language.score(token, sampling.logprobs) for token in drawn), scores)

    def _prompt_scores(self, sequence: _Sequence, start: int, end: int) -> Iterator[TokenLogprobs]:
        """Log-probabilities of the prompt tokens that follow the rows [start, end)."""
        if sequence.sampling.HasField("prompt_logprobs"):
            for token in sequence.token_ids[start + 1 : min(end + 1, sequence.n_prompt)]:
                yield self._language.score(token, sequence.sampling.prompt_logprobs)


def _admitted(admission: Admission, roots: dict[int, bytes]) -> _Sequence:
    return _Sequence(
        array("I", admission.token_ids),
        admission.n_prompt,
        admission.sampling,
        admission.embed,
        roots.get(admission.adapter, b""),
        [],
    )
