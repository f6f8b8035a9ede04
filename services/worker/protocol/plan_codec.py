"""StepPlan as flat int32: chunks become columns, so that ranks need no Python object per chunk.

header    kind, step (2 words), counts of released, chunks, new blocks, proposals, saves, admissions,
          frames in the tower
columns   released | slot | start | n_tokens | draws | count of new blocks | count of proposals | new blocks | proposals
          | saves: slot, position, row
then      one record per admission: slot, n_prompt, embed, second_from, adapter, restore, n_spans, n_tokens,
          spans: position, lines, columns; tokens, sampling
          one record per frame in the tower: slot, position of its first row, first layer, layer after the last one,
          columns, bytes, pixels (none unless the first layer is 0)
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from ryzanstein.v1.worker_pb2 import Sampling

from services.worker.protocol.plan import Admission, StepPlan
from services.worker.protocol.words import (
    Kind,
    MalformedMessageError,
    WordCursor,
    Words,
    data_words,
    join64,
    split64,
)

_HEADER = 10
_ADMISSION = 8


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """An Admission with its tokens as an array."""

    slot: int
    sampling: Sampling
    token_ids: Words  # [n]
    n_prompt: int
    embed: bool
    second_from: int
    adapter: int
    restore: int
    spans: tuple[tuple[int, int, int], ...] = ()


class TowerView(NamedTuple):
    """A TowerWork with the frame's pixels as an array."""

    slot: int
    first: int  # position of the frame's first row
    start: int
    stop: int
    columns: int
    pixels: NDArray[np.uint8]  # [n]; [0] unless `start` is 0


@dataclass(frozen=True, slots=True)
class PlanView:
    """A StepPlan in columns. `new_blocks` and `proposals` concatenate those of the chunks."""

    step: int
    released: Words  # [n_released]
    admissions: tuple[AdmissionView, ...]
    slots: Words  # [n_chunks]
    starts: Words  # [n_chunks]
    n_tokens: Words  # [n_chunks]
    draws: Words  # [n_chunks], 0 or 1
    block_counts: Words  # [n_chunks]
    proposal_counts: Words  # [n_chunks]
    new_blocks: Words  # [sum of block_counts]
    proposals: Words  # [sum of proposal_counts]
    saves: Words  # [n_saves, 3], slot, position and row
    tower: tuple[TowerView, ...] = ()


def encode_plan(plan: StepPlan) -> memoryview:
    """Return the plan as bytes."""
    *numbers, new_blocks, proposals = zip(*plan.chunks, strict=True) if plan.chunks else ((), ())
    blocks, proposed = list(map(len, new_blocks)), list(map(len, proposals))
    values = [Kind.PLAN, *split64(plan.step), len(plan.released), len(blocks), sum(blocks), sum(proposed)]
    values += (len(plan.saves), len(plan.admissions), len(plan.tower))
    for column in (plan.released, *numbers, blocks, proposed):
        values += column
    for rows in (new_blocks, proposals, plan.saves):
        values += chain.from_iterable(rows)
    for admission in plan.admissions:
        _encode_admission(admission, values)
    words = array("i", values)
    for work in plan.tower:
        pixels = b"" if work.start else work.frame.pixels
        words.extend((work.slot, work.frame.first, work.start, work.stop, work.frame.columns, len(pixels)))
        words.frombytes(pixels + bytes(-len(pixels) % 4))
    return memoryview(words).cast("B")


def decode_plan(words: Words) -> PlanView:
    """Return a view of an encoded plan, which references the message. Raises MalformedMessageError."""
    if len(words) < _HEADER or words[0] != Kind.PLAN:
        raise MalformedMessageError("not a plan")
    low, high, *counts = words[1:_HEADER].tolist()
    n_released, n_chunks, n_blocks, n_proposals, n_saves, n_admissions, n_encoded = counts
    cursor = WordCursor(words, _HEADER)
    released = cursor.take(n_released)
    slots, starts, n_tokens, draws, blocks, proposed = cursor.take(6 * n_chunks).reshape(6, n_chunks)
    new_blocks, proposals = cursor.take(n_blocks), cursor.take(n_proposals)
    saves = cursor.take(3 * n_saves).reshape(n_saves, 3)
    admissions = tuple(_decode_admission(cursor) for _ in range(n_admissions))
    tower = tuple(_decode_tower(cursor) for _ in range(n_encoded))
    cursor.finish()
    columns = (slots, starts, n_tokens, draws, blocks, proposed, new_blocks, proposals, saves)
    return PlanView(join64(low, high), released, admissions, *columns, tower)


def view_plan(plan: StepPlan) -> PlanView:
    """Return the plan in columns, for a rank in the same process."""
    return decode_plan(np.frombuffer(encode_plan(plan), dtype=np.int32))


def _decode_tower(cursor: WordCursor) -> TowerView:
    slot, first, start, stop, columns, n_bytes = cursor.take(6).tolist()
    return TowerView(slot, first, start, stop, columns, cursor.take(-(-n_bytes // 4)).view(np.uint8)[:n_bytes])


def _encode_admission(admission: Admission, words: list[int]) -> None:
    words.extend((admission.slot, admission.n_prompt, admission.embed, admission.second_from))
    words.extend((admission.adapter, admission.restore, len(admission.spans), len(admission.token_ids)))
    words.extend(chain.from_iterable(admission.spans))
    words.extend(admission.token_ids)
    words.extend(data_words(admission.sampling.SerializeToString()))


def _decode_admission(cursor: WordCursor) -> AdmissionView:
    slot, n_prompt, embed, second_from, adapter, restore, n_spans, n_tokens = cursor.take(_ADMISSION).tolist()
    spans = tuple((first, lines, columns) for first, lines, columns in cursor.take(3 * n_spans).reshape(-1, 3).tolist())
    token_ids = cursor.take(n_tokens)
    try:
        sampling = Sampling.FromString(cursor.take_data())
    except DecodeError as error:
        raise MalformedMessageError(f"slot {slot}: {error}") from error
    return AdmissionView(slot, sampling, token_ids, n_prompt, bool(embed), second_from, adapter, restore, spans)
