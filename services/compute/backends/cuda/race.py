"""The race between our products of few rows and torch's: run once, at the start, when a model's weights are there."""

from __future__ import annotations

import logging
import math
import subprocess
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from services.compute.backends.base import Linear
from services.compute.backends.collectives import Communicator
from services.compute.backends.cuda.skinny import MOST_ROWS, TILINGS, SkinnyLinear, Tiling, multiply, reads
from services.compute.backends.torch.ops import TorchLinear

logger = logging.getLogger(__name__)

Timer = Callable[[Callable[[], None]], float]  # seconds that what a function launches takes on the device

ROWS = tuple(1 << power for power in range(MOST_ROWS.bit_length()))  # that are raced: 1, 2, 4 ... 64
_LEAST_NUMBERS = 1 << 17  # of a weight that is raced; smaller ones are their launches
_PASS_BYTES = 256 << 20  # of weights that are read in a pass: more than a GPU caches, as in a step
_ADVANTAGE = 0.97  # of torch's time: ours must take less, since times vary
_TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2}  # of the largest number
_REPLAYS = 5


class GraphTimer:
    """Times launches as steps make them: in a graph, without the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], None]) -> float:
        """Return the shortest of several replays, in seconds."""
        stream, graph = self._stream, torch.cuda.CUDAGraph()  # one stream, as each takes a workspace of cuBLAS
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            run()  # compiles, and loads kernels, which nothing may do in a capture
        torch.cuda.current_stream(self._device).wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run()
        times = []
        for _ in range(_REPLAYS):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) / 1000)
        return float(min(times))


class SkinnyProducts:
    """Makes the linear layers of a model, and lets our kernel race torch's for each shape of weight and number of rows.

    Torch computes until the race, and after it where ours lost, differed, or was not raced. A choice never changes.
    """

    def __init__(self, kernels: Any, timer: Timer, device: torch.device) -> None:
        self._kernels, self._timer, self._device = kernels, timer, device
        self._waiting: dict[torch.Size, list[Tensor]] = {}  # weights of shapes that are not raced yet
        self._chosen: dict[torch.Size, tuple[Tiling | None, ...]] = {}  # by ROWS

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Return the product with `weight` [n_out, n_in]."""
        if weight.numel() < _LEAST_NUMBERS or not reads(weight):
            return TorchLinear(weight, bias)
        if weight.shape not in self._chosen:
            self._waiting.setdefault(weight.shape, []).append(weight)
        return SkinnyLinear(self._kernels, weight, bias, self.choose)

    def choose(self, shape: torch.Size, n_rows: int) -> Tiling | None:
        """Return how our kernel multiplies `n_rows` with a weight of `shape`; None: torch does."""
        chosen = self._chosen.get(shape)
        return None if chosen is None or not 0 < n_rows <= MOST_ROWS else chosen[(n_rows - 1).bit_length()]

    def race(self, comm: Communicator) -> None:
        """Race for the shapes that wait. Every rank of `comm` calls it; all choose the same, by the slowest rank."""
        own = {shape: self._race(weights) for shape, weights in self._waiting.items()}
        self._waiting.clear()
        for shape, seconds in _slowest(own, comm, self._device).items():
            self._chosen.setdefault(shape, _fastest(seconds))
            logger.info("products with %d x %d: %s", *shape, _explained(seconds, self._chosen[shape]))

    def _race(self, weights: list[Tensor]) -> Tensor:
        """Return the seconds of a product: [ROWS, torch's and those of TILINGS], infinite for what does not race."""
        weights = weights[: -(-_PASS_BYTES // weights[0].nbytes)]
        seconds = torch.empty(len(ROWS), 1 + len(TILINGS), dtype=torch.float64)
        for place, n_rows in enumerate(ROWS):
            x = torch.randn(n_rows, weights[0].shape[1], dtype=weights[0].dtype, device=self._device)
            seconds[place, 0] = self._time(weights, partial(F.linear, x))
            for number, tiling in enumerate(TILINGS, 1):
                seconds[place, number] = self._time_ours(weights, x, tiling)
        return seconds

    def _time_ours(self, weights: list[Tensor], x: Tensor, tiling: Tiling) -> float:
        def ours(weight: Tensor) -> Tensor:
            return multiply(self._kernels, x, weight, None, tiling, x.dtype)

        try:
            exact = F.linear(x, weights[0])
            error = ((ours(weights[0]) - exact).abs().max() / (1 + exact.abs().max())).item()
            if error <= _TOLERANCE[x.dtype]:
                return self._time(weights, ours)
            problem = f"it differs from torch's by {error:.2g}"
        except (self._kernels.TritonError, RuntimeError, subprocess.CalledProcessError, OSError) as reason:
            problem = str(reason)
        logger.warning("our product of %d rows with %s does not race: %s", len(x), tiling, problem)
        return math.inf

    def _time(self, weights: list[Tensor], product: Callable[[Tensor], Tensor]) -> float:
        def one_pass() -> None:
            for weight in weights:
                product(weight)

        return self._timer(one_pass) / len(weights)


def _slowest(own: dict[torch.Size, Tensor], comm: Communicator, device: torch.device) -> dict[torch.Size, Tensor]:
    """Return the longest times of all ranks, which may have different shapes: the same on every rank."""
    n_times = len(ROWS) * (1 + len(TILINGS))
    most = int(comm.all_gather(torch.tensor([len(own)], device=device)).max())
    if not most:
        return {}
    table = torch.zeros(most, 2 + n_times, dtype=torch.float64)  # rows of zeros stand for no shape
    for row, (shape, seconds) in zip(table, own.items(), strict=False):
        row.copy_(torch.cat((torch.tensor(shape), seconds.flatten())))
    found: dict[torch.Size, Tensor] = {}
    for row in comm.all_gather(table.to(device)).flatten(0, 1).cpu():
        shape, seconds = torch.Size(map(int, row[:2])), row[2:].view(len(ROWS), -1)
        if shape[0]:
            found[shape] = torch.maximum(found.get(shape, seconds), seconds)
    return found


def _fastest(seconds: Tensor) -> tuple[Tiling | None, ...]:
    """Return the winner for each of ROWS."""
    best = seconds[:, 1:].min(dim=1)
    won = best.values < _ADVANTAGE * seconds[:, 0]
    return tuple(TILINGS[number] if ours else None for ours, number in zip(won, best.indices, strict=True))


def _explained(seconds: Tensor, chosen: tuple[Tiling | None, ...]) -> str:
    """Return the winners in words, with the microseconds of ours and of torch's."""
    best = seconds[:, 1:].min(dim=1).values
    words = (
        f"{n_rows} rows {'torch' if tiling is None else 'ours'} ({1e6 * ours:.1f}, torch's {1e6 * theirs:.1f} us)"
        for n_rows, tiling, ours, theirs in zip(ROWS, chosen, best.tolist(), seconds[:, 0].tolist(), strict=True)
    )
    return "; ".join(words)
