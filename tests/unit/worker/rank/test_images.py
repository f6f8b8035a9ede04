"""Rows of images on a rank: however a prompt is cut, every row gets its frame's state."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.backends.batch import ImageRows
from services.worker.protocol.plan import Admission, Chunk, Frame, StepPlan, TowerWork
from services.worker.protocol.plan_codec import view_plan
from services.worker.rank.batching import lay_out
from services.worker.rank.images import SlotImages
from services.worker.rank.slot_table import MalformedPlanError, SlotTable

ROWS = 6


class CountingStates:
    """States that say which row of which frame they are, [ROWS, 1], once each of the layers was computed in order."""

    n_layers, places = 3, False

    def __call__(self, x: torch.Tensor, start: int, stop: int, columns: int) -> torch.Tensor:
        x = x if start else 100.0 * x[:1, None] + torch.arange(ROWS)[:, None]
        for layer in range(start, stop):
            x = 2 * x + layer
        return x if stop < self.n_layers else (x - 4) / 8


def sent(slot: int, frame: Frame, start: int = 0, stop: int = CountingStates.n_layers) -> TowerWork:
    return TowerWork(slot, frame, start, stop)


FRAMES = (Frame(3, ROWS, bytes([1, 0, 0])), Frame(9, ROWS, bytes([2, 0, 0])), Frame(17, ROWS, bytes([3, 0, 0])))
EXPECTED = {frame.first + row: 100.0 * frame.pixels[0] + row for frame in FRAMES for row in range(ROWS)}


@pytest.mark.parametrize("cuts", [[], [5], [3, 9, 17], [4, 5, 6, 7, 8, 9, 10], [20, 22]])
def test_rows_have_the_states_of_their_frames(cuts: list[int]) -> None:
    table, images = SlotTable(4, 40, 4, 40), SlotImages(CountingStates())
    seen: dict[int, float] = {}
    bounds = [*cuts, 25]
    start = 0
    for step, end in enumerate(bounds):
        tower = tuple(sent(2, frame) for frame in FRAMES if start <= frame.first < end)
        blocks = tuple(range(-(-start // 4) + 1, -(-end // 4) + 1))
        chunks = [Chunk(2, start, end - start, draws=end == 25, new_blocks=blocks)]
        admissions = [Admission(2, Sampling(), tuple(range(25)), 25)] if not step else []
        if not step:  # a neighbour of text, whose rows stand before or behind
            admissions.append(Admission(1, Sampling(), (7, 8, 9), 3))
            chunks.append(Chunk(1, 0, 3, draws=True, new_blocks=(30,)))
        view = view_plan(StepPlan(step, admissions=tuple(admissions), chunks=tuple(chunks), tower=tower))
        for admission in view.admissions:
            table.admit(admission)
        table.extend(view)
        images.encode(view.tower)
        numbers, layout = lay_out(table, view, exact_chunks=True)
        if (rows := images.rows(layout)) is not None:
            placed = _by_position(rows, numbers.positions, numbers.token_ids)
            for frame in rows.frames:
                own = range(frame.first, frame.first + frame.n_rows)
                assert [int(numbers.positions[row]) for row in own] == list(range(frame.end - frame.n_rows, frame.end))
                assert set(own) <= set(rows.rows.tolist())
                assert layout.slots[frame.sequence] == 2
            assert sum(frame.n_rows for frame in rows.frames) == len(rows.rows)
            assert not placed.keys() & seen.keys()
            seen |= placed
        start = end
    assert seen == EXPECTED
    images.encode(())
    assert images.rows(layout) is None, "frames whose rows are computed are forgotten"


def _by_position(
    rows: ImageRows,
    positions: np.ndarray[tuple[int], np.dtype[np.int64]],
    ids: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> dict[int, float]:
    chosen = rows.rows.tolist()
    assert [int(positions[row]) for row in chosen] == [int(ids[row]) for row in chosen], "a row of the neighbour"
    return dict(zip((int(positions[row]) for row in chosen), rows.states[:, 0].tolist(), strict=True))


def encode(images: SlotImages, *works: TowerWork) -> None:
    images.encode(view_plan(StepPlan(0, tower=works)).tower)


def shown(images: SlotImages) -> ImageRows | None:
    """The rows of images in a chunk of slot 0 up to position 9."""
    table = SlotTable(1, 40, 4, 40)
    chunk = Chunk(0, 0, 9, draws=True, new_blocks=(1, 2, 3))
    view = view_plan(StepPlan(1, admissions=(Admission(0, Sampling(), (1,) * 9, 9),), chunks=(chunk,)))
    table.admit(view.admissions[0])
    table.extend(view)
    return images.rows(lay_out(table, view, exact_chunks=True)[1])


@pytest.mark.parametrize("cuts", [[0, 3], [0, 1, 3], [0, 1, 2, 3]])
def test_frame_is_encoded_in_parts_beside_another_frame(cuts: list[int]) -> None:
    images = SlotImages(CountingStates())
    for start, stop in itertools.pairwise(cuts):
        encode(images, sent(0, FRAMES[0], start, stop), sent(1, FRAMES[1]))
    rows = shown(images)
    assert rows is not None
    assert rows.states[:, 0].tolist() == [100.0 + row for row in range(ROWS)]


@pytest.mark.parametrize("stop", [2, 3])
def test_released_slot_forgets_its_frames(stop: int) -> None:
    images = SlotImages(CountingStates())
    encode(images, sent(0, FRAMES[0], 0, stop))
    images.release(0)
    assert shown(images) is None
    with pytest.raises(MalformedPlanError, match="layer 2 of a frame at 3 follows no other"):
        encode(images, sent(0, FRAMES[0], 2, 3))


@pytest.mark.parametrize("wrong", [sent(0, FRAMES[0], 2, 3), sent(0, FRAMES[1], 1, 3), sent(1, FRAMES[0], 1, 3)])
def test_layers_without_the_layers_before_are_malformed(wrong: TowerWork) -> None:
    images = SlotImages(CountingStates())
    encode(images, sent(0, FRAMES[0], 0, 1))
    with pytest.raises(MalformedPlanError, match="follows no other"):
        encode(images, wrong)


def test_frame_for_a_model_of_text_is_malformed() -> None:
    with pytest.raises(MalformedPlanError, match="reads text only"):
        encode(SlotImages(None), sent(0, FRAMES[0]))
