"""Tokens that are drawn on the device and not yet read by the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.compute.backends.draws import DrawNumbers, DrawRows
from services.compute.backends.transfers import Ints, Pending, Transfers
from services.compute.sampling.sampler import Sampler
from services.worker.rank.batching import DrawingRows
from services.worker.rank.slot_table import SlotTable


class DrawnTokens:
    """Each slot's last token on the device, where the following step reads it.

    Until the host has read a token, the slot table holds a reference in its place: -1 - slot.
    """

    def __init__(self, table: SlotTable, sampler: Sampler, transfers: Transfers, device: torch.device) -> None:
        self._table, self._sampler, self._transfers = table, sampler, transfers
        self.spare = table.max_running
        self._last = torch.zeros(table.max_running + 1, dtype=torch.int64, device=device)

    def numbers(self, drawing: DrawingRows) -> DrawNumbers | None:
        """Return what `drawing` draws by; None if there are no such rows, or if a draw needs the host."""
        return self._sampler.numbers(drawing.slots, drawing.positions) if len(drawing.rows) else None

    def resolve(self, token_ids: Tensor) -> Tensor:
        """Return `token_ids` [n] with the tokens that references in it stand for."""
        return torch.where(token_ids < 0, self._last[(-1 - token_ids).clamp_(min=0)], token_ids)

    def draw(self, logits: Tensor, draws: DrawRows) -> Tensor:
        """Draw a token per row of `logits` [n, vocab_local]: [n] int64. The following step finds them."""
        token_ids = self._sampler.draw_on_device(logits, draws)
        self._last.index_copy_(0, draws.slots, token_ids.clamp(min=0))  # NO_TOKEN: the server ends the request
        return token_ids

    def begin(self, token_ids: Tensor, drawing: DrawingRows) -> Pending:
        """Put references to the drawn `token_ids` [n_rows] into the table, and begin to read them."""
        self._table.append(drawing.slots, drawing.positions, -1 - drawing.slots)
        return self._transfers.down(token_ids)

    def read(self, tokens: Pending, drawing: DrawingRows) -> Ints:
        """Wait for the tokens of `begin`, and replace their references in the table."""
        token_ids = tokens.values()
        self._table.settle(drawing.slots, drawing.positions, np.maximum(token_ids, 0))
        return token_ids
