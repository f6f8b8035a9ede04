"""Rows of images: a frame is encoded in the step that needs its first row, and kept until its last one is computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from services.compute.backends.batch import FrameRows, ImageRows, long_tensor
from services.worker.protocol.plan_codec import FrameView
from services.worker.rank.batching import BatchLayout
from services.worker.rank.slot_table import MalformedPlanError

Tower = Callable[[Tensor], Tensor]  # pixels of a frame, uint8 [n] -> [frame_tokens, hidden_size]


class SlotImages:
    """The states of frames by slot and by the position of their first row."""

    def __init__(self, tower: Tower | None) -> None:
        """`tower` None: the model reads text only."""
        self._tower = tower
        self._states: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)

    def encode(self, frames: Sequence[FrameView]) -> None:
        """Encode a plan's frames. Raises MalformedPlanError if the model reads text only."""
        for frame in frames:
            if self._tower is None:
                raise MalformedPlanError(f"slot {frame.slot}: a frame for a model that reads text only")
            self._states[frame.slot][frame.first] = self._tower(torch.from_numpy(frame.pixels.copy()))

    def release(self, slot: int) -> None:
        """Forget the frames of a slot."""
        self._states.pop(slot, None)

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
