"""Tokens that are drawn on the device and not yet read by the host."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.backends.transfers import Ints, Pending, Transfers
from services.worker.rank.batching import DrawingRows
from services.worker.rank.slot_table import SlotTable


class DrawnTokens:
    """Each slot's last token on the device, where the following step reads it.

    Until the host has read a token, the slot table holds a reference in its place: -1 - slot.
    """

    def __init__(self, table: SlotTable, transfers: Transfers, device: torch.device) -> None:
        self._table, self._transfers = table, transfers
        self._last = torch.zeros(table.max_running, dtype=torch.int64, device=device)

    def resolve(self, token_ids: Tensor) -> Tensor:
        """Return `token_ids` [n] with the tokens that references in it stand for."""
        return torch.where(token_ids < 0, self._last[(-1 - token_ids).clamp_(min=0)], token_ids)

    def put(self, token_ids: Tensor, drawing: DrawingRows) -> Pending:
        """Keep `token_ids` [n_draws] of different slots, put references into the table, and begin to read them."""
        (slots,) = self._transfers.up([drawing.slots])
        self._last.index_copy_(0, slots, token_ids)
        self._table.append(drawing.slots, drawing.positions, -1 - drawing.slots)
        return self._transfers.down(token_ids)

    def read(self, tokens: Pending, drawing: DrawingRows) -> Ints:
        """Wait for the tokens of `put`, and replace their references in the table."""
        token_ids = tokens.values()
        self._table.settle(drawing.slots, drawing.positions, token_ids)
        return token_ids
