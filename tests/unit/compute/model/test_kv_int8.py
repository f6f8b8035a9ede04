"""A decoder whose keys and values are in int8: any number of ranks, any kernels. Invariance: test_invariance.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.compute.backends.base import ModelBackend
from services.compute.backends.collectives import Communicator, SingleRank
from services.compute.backends.kv_formats import int8
from services.compute.backends.opening import open_backend
from services.compute.backends.torch.backend import TorchBackend
from services.compute.model.build import load_model
from services.compute.model.registry import describe
from tests.unit.compute.model.harness import CPU, CachedDecoder, ThreadRank, run_ranks
from tests.unit.compute.model.test_invariance import CONFIGS
from tests.unit.compute.model.zoo import prompt, write_checkpoint

INT8 = int8.FORMAT.open()

IDS = prompt(99, 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("gemma2")
    write_checkpoint(CONFIGS["gemma2"](), folder)
    return folder


def logits(folder: Path, comm: Communicator, backend: ModelBackend) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states of a prompt on all ranks, and the logits of this one."""
    model = load_model(describe(folder), comm, backend)
    hidden = CachedDecoder(model, comm, block_tokens=16).run(IDS, [7, 1, 20, 1])
    return hidden, model.logits(hidden)


def in_int8() -> ModelBackend:
    return open_backend(torch.float32, CPU, INT8)


@pytest.mark.parametrize("size", [2, 4])
def test_several_ranks_equal_a_single_rank(folder: Path, size: int) -> None:
    """A scale belongs to a head, so ranks store what one stores, up to the order of the sums before it."""

    def on_rank(rank: ThreadRank) -> tuple[torch.Tensor, torch.Tensor]:
        torch.set_num_threads(1)
        return logits(folder, rank, in_int8())

    one, results = logits(folder, SingleRank(), in_int8())[1][:, :300], run_ranks(size, on_rank)
    for hidden, _ in results:
        assert torch.equal(hidden, results[0][0])
    together = torch.cat([part for _, part in results], dim=-1)[:, :300]
    assert (together - one).abs().max() <= 2e-3
    assert torch.equal(together.argmax(-1), one.argmax(-1))


def test_kernels_equal_torch_and_approximate_float32(folder: Path) -> None:
    """torch gathers and dequantizes, as on GPUs."""
    backends = (in_int8(), TorchBackend(torch.float32, CPU, INT8), TorchBackend(torch.float32, CPU))
    ours, reference, exact = (logits(folder, SingleRank(), backend)[1][:, :300] for backend in backends)
    error = (ours - exact).abs().mean()
    assert (ours - reference).abs().mean() <= 0.2 * error  # a sum that is rounded in another way may change a code
    assert 0 < error <= 0.02 * exact.abs().mean()
