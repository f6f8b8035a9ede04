"""The race for products of few rows, with launches that are put down and times that are given: who computes what."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F

from services.compute.backends.collectives import Communicator, SingleRank
from services.compute.backends.cuda import backend
from services.compute.backends.cuda.ops import CudaOps
from services.compute.backends.cuda.race import ROWS, GraphTimer, SkinnyProducts
from services.compute.backends.cuda.skinny import TILINGS, SkinnyLinear
from services.compute.backends.opening import open_backend
from services.compute.backends.torch.backend import TorchBackend
from services.compute.model.build import load_model
from tests.unit.compute.model.harness import run_ranks
from tests.unit.compute.model.zoo import write_checkpoint

CPU = torch.device("cpu")
TORCH_S = 10e-6


class Kernels:
    """Our kernels' places: launches are put down, and computed by torch."""

    class TritonError(Exception):
        """As Triton's."""

    def __init__(self, error: float = 0.0) -> None:
        self.launched: list[tuple[int, int]] = []  # rows, outputs of a tile
        self.error = error

    @property
    def product(self) -> Any:
        kernels = self

        class Launcher:
            def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
                return kernels.launch

        return Launcher()

    def launch(
        self, x: Any, weight: Any, bias: Any, out: Any, *_: int, tile_outs: int, has_bias: bool, **__: Any
    ) -> None:
        self.launched.append((len(x), tile_outs))
        out.copy_(F.linear(x, weight, bias if has_bias else None) + self.error)


class Times:
    """Takes the given seconds by rows and tile, and a constant for torch's products."""

    def __init__(self, kernels: Kernels, ours: Mapping[tuple[int, int], float], torch_s: float = TORCH_S) -> None:
        self.kernels, self.ours, self.torch_s = kernels, ours, torch_s

    def __call__(self, run: Callable[[], None]) -> float:
        before = len(self.kernels.launched)
        run()
        launched = self.kernels.launched[before:]
        if not launched:
            return self.torch_s
        assert len(set(launched)) == 1, "one candidate at a time"
        return len(launched) * self.ours.get(launched[0], 1.0)


def weight(n_out: int = 256, n_in: int = 512, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(n_out)).to(dtype)


def test_the_winner_computes_the_rows_at_which_it_won_and_torch_all_others() -> None:
    kernels = Kernels()
    ours = {(1, 16): 8e-6, (2, 32): 9e-6, (4, 16): 7e-6, (4, 32): 6e-6, (64, 64): 5e-6}
    ours[8, 64] = 9.8e-6  # by 2 %: too little
    products = SkinnyProducts(kernels, Times(kernels, ours), CPU)
    bias = weight()[:, 0].contiguous()
    layer = products.linear(weight(), bias)
    products.race(SingleRank())
    expected = {1: 16, 2: 32, 3: 32, 4: 32, 33: 64, 64: 64}
    for n_rows in (0, 1, 2, 3, 4, 5, 8, 9, 16, 33, 64, 65, 100):
        kernels.launched.clear()
        x = torch.randn(n_rows, 512).bfloat16()
        assert torch.equal(layer(x), F.linear(x, weight(), bias))
        assert layer.in_float32(x).dtype is torch.float32
        assert kernels.launched == ([(n_rows, expected[n_rows])] * 2 if n_rows in expected else [])


def test_what_is_not_raced_is_torchs() -> None:
    kernels = Kernels()
    products = SkinnyProducts(kernels, Times(kernels, {(n, 16): 1e-6 for n in ROWS}), CPU)
    early = products.linear(weight(), None)
    odd, exact = products.linear(weight(n_in=544), None), products.linear(weight(dtype=torch.float32), None)
    small = products.linear(weight(n_out=64), None)
    early(torch.zeros(1, 512).bfloat16())
    assert not kernels.launched, "no race yet"
    products.race(SingleRank())
    late, again = products.linear(weight(n_out=384), None), products.linear(weight(), None)
    kernels.launched.clear()
    odd(torch.zeros(1, 544).bfloat16())
    exact(torch.zeros(1, 512))
    small(torch.zeros(1, 512).bfloat16())
    late(torch.zeros(1, 512).bfloat16())
    assert not kernels.launched
    assert not isinstance(odd, SkinnyLinear)
    again(torch.zeros(1, 512).bfloat16())
    assert kernels.launched == [(1, 16)], "a shape that was raced"


def test_a_choice_never_changes() -> None:
    kernels = Kernels()
    times = Times(kernels, {(1, 16): 1e-6})
    products, shape = SkinnyProducts(kernels, times, CPU), weight().shape
    products.linear(weight(), None)
    products.race(SingleRank())
    times.ours, times.torch_s = {}, 1e-7
    products.linear(weight(), None)
    products.race(SingleRank())
    assert products.choose(shape, 1) == TILINGS[0]
    assert products.choose(shape, 2) is None


def test_all_ranks_choose_by_the_slowest_also_where_their_shapes_differ() -> None:
    shapes = [torch.Size((n_out, 512)) for n_out in (256, 384, 512)]

    def choices(comm: Communicator) -> list[Any]:
        kernels = Kernels()
        # Rank 1 finds torch faster at 1 row, and another tile at 2; its last shape is its own.
        ours = {(1, 16): 1e-6, (2, 16): 5e-6, (2, 32): 8e-6, (4, 64): 1e-6}
        if comm.rank == 1:
            ours |= {(1, 16): 20e-6, (2, 32): 4e-6}
        products = SkinnyProducts(kernels, Times(kernels, ours), CPU)
        for shape in shapes[: 2 + comm.rank]:
            products.linear(weight(*shape), None)
        products.race(comm)
        return [products.choose(shape, n_rows) for shape in shapes for n_rows in ROWS]

    first, second = run_ranks(2, choices)
    assert first == second
    nothing, both, other = [None] * 4, [None, TILINGS[0], TILINGS[2]], [None, TILINGS[1], TILINGS[2]]
    assert first == [*both, *nothing, *both, *nothing, *other, *nothing]


@pytest.mark.parametrize("problem", ["it differs from torch's by", "out of shared memory"])
def test_a_kernel_that_is_wrong_or_does_not_compile_does_not_race(
    problem: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = Kernels(error=3.0)
    if problem == "out of shared memory":

        def refuse(*_: Any, **__: Any) -> None:
            raise Kernels.TritonError(problem)

        monkeypatch.setattr(kernels, "launch", refuse)
    products = SkinnyProducts(kernels, Times(kernels, {(n, 16): 1e-6 for n in ROWS}), CPU)
    products.linear(weight(), None)
    with caplog.at_level(logging.WARNING):
        products.race(SingleRank())
    assert not any(products.choose(weight().shape, n_rows) for n_rows in ROWS)
    assert problem in caplog.text


def test_a_start_logs_the_winners(caplog: pytest.LogCaptureFixture) -> None:
    kernels = Kernels()
    products = SkinnyProducts(kernels, Times(kernels, {(1, 16): 8e-6}), CPU)
    products.linear(weight(), None)
    with caplog.at_level(logging.INFO):
        products.race(SingleRank())
    assert "products with 256 x 512: 1 rows ours (8.0, torch's 10.0 us); 2 rows torch" in caplog.text


@pytest.mark.parametrize(("triton", "products"), [(True, True), (True, False), (False, True)])
def test_a_switch_leaves_the_race_away(triton: bool, products: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[object] = []

    def opened(dtype: torch.dtype, device: torch.device, timer: object = None) -> CudaOps:
        timers.append(timer)
        return CudaOps(dtype, device)

    monkeypatch.setattr(backend, "open_ops", opened)
    open_backend(torch.bfloat16, torch.device("cuda"), triton=triton, products=products)
    assert [isinstance(timer, GraphTimer) for timer in timers] == ([products] if triton else [])


def test_a_model_that_is_loaded_settles_once_all_its_weights_are_there(tmp_path: Path) -> None:
    class Settling(TorchBackend):
        settled: Communicator | None = None

        def settle(self, comm: Communicator) -> None:
            assert self.settled is None
            self.settled = comm

    shape = {"vocab_size": 300, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    write_checkpoint(transformers.LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1), tmp_path)
    settling, comm = Settling(torch.float32, CPU), SingleRank()
    load_model(tmp_path, comm, settling)
    assert settling.settled is comm
