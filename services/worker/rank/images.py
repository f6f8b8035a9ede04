"""Rows of images: steps encode a frame, some layers each, and its rows are kept until the last one is computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from services.compute.backends.batch import FrameRows, ImageRows, long_tensor
from services.worker.protocol.plan_codec import TowerView
from services.worker.rank.batching import BatchLayout
from services.worker.rank.slot_table import MalformedPlanError


class Tower(Protocol):
    """Encodes a frame of an image, layer by layer."""

    @property
    def n_layers(self) -> int:
        """Number of layers, at least 1."""

    @property
    def places(self) -> bool:
        """Whether rows turn by their line and column in the frame."""

    def __call__(self, x: Tensor, start: int, stop: int, columns: int) -> Tensor:
        """Compute the layers from `start` to `stop` of a frame with `columns` rows side by side.

        `x`: for layer 0 a frame's pixels, uint8 [n], then what the layers before returned. Returns the frame's rows,
        [frame_tokens, (1 + n_deep) * hidden_size], if `stop` is `n_layers`.
        """


class _UnderWay(NamedTuple):
    first: int  # position of the frame's first row
    n_layers: int  # computed so far
    x: Tensor


class SlotImages:
    """The states of frames by slot and by the position of their first row."""

    def __init__(self, tower: Tower | None) -> None:
        """`tower` None: the model reads text only."""
        self._tower = tower
        self._states: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)
        self._under_way: dict[int, _UnderWay] = {}  # by slot

    def encode(self, tower: Sequence[TowerView]) -> None:
        """Compute a plan's layers of the tower.

        Raises MalformedPlanError if the model reads text only, or if layers do not follow those of the plans before.
        """
        for work in tower:
            if self._tower is None:
                raise MalformedPlanError(f"slot {work.slot}: a frame for a model that reads text only")
            x = self._tower(self._input(work), work.start, work.stop, work.columns)
            if work.stop < self._tower.n_layers:
                self._under_way[work.slot] = _UnderWay(work.first, work.stop, x)
            else:
                self._states[work.slot][work.first] = x

    def _input(self, work: TowerView) -> Tensor:
        if not work.start:
            return torch.from_numpy(work.pixels.copy())
        begun = self._under_way.pop(work.slot, None)
        if begun is None or (begun.first, begun.n_layers) != (work.first, work.start):
            raise MalformedPlanError(
                f"slot {work.slot}: layer {work.start} of a frame at {work.first} follows no other"
            )
        return begun.x

    def release(self, slot: int) -> None:
        """Forget the frames of a slot."""
        self._states.pop(slot, None)
        self._under_way.pop(slot, None)

    def rows(self, layout: BatchLayout) -> ImageRows | None:
        """Return the rows of a step that are parts of frames, and forget the frames that end in it."""
        if not self._states:
            return None
        rows: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        states: list[Tensor] = []
        of_frames: list[FrameRows] = []
        for index in range(len(layout.slots)):
            slot, start, end = int(layout.slots[index]), int(layout.starts[index]), int(layout.ends[index])
            frames = self._states.get(slot, {})
            for first, encoded in list(frames.items()):
                low, high = max(first, start), min(first + len(encoded), end)
                first_row = low + int(layout.row_ends[index]) - end
                if low < high:
                    rows.append(np.arange(high - low) + first_row)
                    states.append(encoded[low - first : high - first])
                    of_frames.append(FrameRows(index, first_row, high - low, high))
                if high == first + len(encoded):
                    del frames[first]
            if not frames:
                self._states.pop(slot, None)
        if not rows:
            return None
        together = torch.cat(states)
        on_device = long_tensor(np.concatenate(rows)).to(together.device, non_blocking=True)
        return ImageRows(on_device, together, tuple(of_frames))
