"""Places of rows in images: however a prompt is cut, a row turns by its line and column, a later text by one number."""

from __future__ import annotations

import numpy as np
import pytest
from ryzanstein.v1.worker_pb2 import Sampling

from services.worker.protocol.plan import Admission, Chunk, StepPlan
from services.worker.protocol.plan_codec import view_plan
from services.worker.rank.batching import lay_out
from services.worker.rank.places import SlotPlaces, places_of
from services.worker.rank.slot_table import SlotTable

SPANS = ((2, 2, 3), (9, 1, 1), (11, 3, 1))
# Two of a text, six of an image of two lines, a text's, one of an image, a text's, three of an image, then texts.
TIMES = [0, 1, *[2] * 6, 5, 6, 7, *[8] * 3, 11, 12]
LINES = [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10, 11, 12]
COLUMNS = [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 8, 8, 11, 12]
N = len(TIMES)


def test_places_are_those_of_the_models_training() -> None:
    places, shift = places_of(SPANS)
    assert places.tolist() == [of[: N - 2] for of in (TIMES, LINES, COLUMNS)]
    assert shift == TIMES[-1] - (N - 1)


@pytest.mark.parametrize("cuts", [[], [1, 2, 3], [5, 8, 9, 10], [13, 14, 15], list(range(1, N))])
def test_rows_have_their_places_beside_a_text(cuts: list[int]) -> None:
    table, slots = SlotTable(4, 40, 4, 40), SlotPlaces()
    start, actual = 0, list[list[int]]()
    for step, end in enumerate([*cuts, N]):
        blocks = tuple(range(-(-start // 4) + 1, -(-end // 4) + 1))
        admissions = (Admission(2, Sampling(), (5,) * N, N, spans=SPANS), Admission(1, Sampling(), (7,) * N, N))
        text = Chunk(1, step, 1, draws=False, new_blocks=(20 + step // 4,) if step % 4 == 0 else ())
        chunks = (Chunk(2, start, end - start, draws=False, new_blocks=blocks), text)
        view = view_plan(StepPlan(step, admissions=admissions if not step else (), chunks=chunks))
        for admission in view.admissions:
            table.admit(admission)
            slots.admit(admission.slot, admission.spans)
        table.extend(view)
        numbers, layout = lay_out(table, view, exact_chunks=True)
        placed = slots.placed(numbers, layout)
        of_rows = np.tile(placed.positions, (3, 1)) if placed.places is None else placed.places
        images = layout.slots.tolist().index(2)
        last = int(layout.row_ends[images])
        actual += of_rows[:, last - (end - start) : last].T.tolist()
        texts = int(layout.row_ends[1 - images]) - 1
        assert of_rows[:, texts].tolist() == [step] * 3
        flat = [(a, b, c) for a, b, c in actual[start:end]]
        assert (placed.places is None) == all(a == b == c for a, b, c in flat), "a text's rows need one number each"
        start = end
    assert actual == [list(row) for row in zip(TIMES, LINES, COLUMNS, strict=True)]
    slots.release(2)
    assert slots.placed(numbers, layout) is numbers
