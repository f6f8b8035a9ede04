"""A tensor-parallel group whose ranks are threads that meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from services.compute.backends.collectives import Communicator, SingleRank

Result = TypeVar("Result")


class BarrierRank:
    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[torch.Tensor | None]) -> None:
        self.rank, self.size, self.collectives = rank, size, None
        self._barrier, self._board = barrier, board

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._board[self.rank] = x
        self._barrier.wait(20)
        stacked = torch.stack([part for part in self._board if part is not None])
        self._barrier.wait(20)
        return stacked

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self.all_gather(x.clone()).float().sum(dim=0))


def on_ranks(size: int, body: Callable[[Communicator], Result]) -> list[Result]:
    """Run `body` on `size` ranks and return what each returned."""
    if size == 1:
        return [body(SingleRank())]
    barrier = threading.Barrier(size)
    board: list[torch.Tensor | None] = [None] * size
    results: dict[int, Result] = {}
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(BarrierRank(rank, size, barrier, board))
        except Exception as error:  # noqa: BLE001 - raised below, in the test's thread
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
