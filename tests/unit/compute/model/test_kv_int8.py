"""A decoder whose keys and values are in int8: whatever is stored is a function of a sequence's own tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from services.compute.backends.base import ModelBackend
from services.compute.backends.collectives import Communicator, SingleRank
from services.compute.backends.kv_formats import int8
from services.compute.backends.opening import open_backend
from services.compute.backends.torch.backend import TorchBackend
from services.compute.model.build import load_model
from services.compute.model.decoder import Decoder
from services.compute.model.registry import describe
from tests.unit.compute.model.harness import CPU, Engine, ThreadRank, run_ranks
from tests.unit.compute.model.zoo import prompt, write_checkpoint

INT8 = int8.FORMAT.open()

Load = Callable[[torch.dtype], Decoder]
_DTYPES = [torch.float32, torch.bfloat16]
IDS = prompt(99, 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("gemma2")
    config = transformers.Gemma2Config(
        vocab_size=300,
        num_hidden_layers=2,
        max_position_embeddings=512,
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        attn_logit_softcapping=5.0,
        sliding_window=40,
    )
    write_checkpoint(config, folder)
    return folder


@pytest.fixture(scope="module")
def load(folder: Path) -> Load:
    return functools.cache(lambda dtype: load_model(describe(folder), SingleRank(), open_backend(dtype, CPU, INT8)))


def alone(model: Decoder, ids: list[int]) -> torch.Tensor:
    return Engine(model, block_tokens=16).run(ids, [])


@pytest.mark.parametrize("dtype", _DTYPES)
def test_a_request_is_the_same_in_company_in_chunks_and_decoded(load: Load, dtype: torch.dtype) -> None:
    """Decodes are captured and replayed where our kernels serve; free blocks hold what another request left."""
    model, engine = load(dtype), Engine(load(dtype), block_tokens=16)
    for layer in engine.cache.layers:
        layer[1:] = 127  # scales of 3e38
    first, second = (engine.admit(prompt(length, 300, length)) for length in (150, 90))
    found: dict[int, list[torch.Tensor]] = {id(first): [], id(second): []}
    for work in (
        [(first, 60)],
        [(first, 33), (second, 1)],
        *[[(second, 1), (first, 1)]] * 20,
        [(second, 69), (first, 1)],
        [(first, 36)],
    ):
        for (request, _), hidden in zip(work, engine.step(work), strict=True):
            found[id(request)].append(hidden)
    for request in (first, second):
        assert torch.equal(torch.cat(found[id(request)]), alone(model, request.ids))


@pytest.mark.parametrize("dtype", _DTYPES)
def test_a_prefix_hit_equals_a_miss(load: Load, dtype: torch.dtype) -> None:
    model = load(dtype)
    engine = Engine(model, block_tokens=16)
    first = engine.admit(prompt(100, 300, 1))
    engine.step([(first, 100)])
    second = engine.admit([*first.ids[:96], *prompt(40, 300, 2)])
    second.table[:6], second.computed = first.table[:6], 96
    assert torch.equal(engine.step([(second, 40)])[0], alone(model, second.ids)[96:])


def logits(folder: Path, comm: Communicator, backend: ModelBackend) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states of a prompt on all ranks, and the logits of this one."""
    model = load_model(describe(folder), comm, backend)
    hidden = Engine(model, comm, block_tokens=16).run(IDS, [7, 1, 20, 1])
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
    """torch gathers and dequantizes: what GPUs do, too."""
    backends = (in_int8(), TorchBackend(torch.float32, CPU, INT8), TorchBackend(torch.float32, CPU))
    ours, reference, exact = (logits(folder, SingleRank(), backend)[1][:, :300] for backend in backends)
    error = (ours - exact).abs().mean()
    assert (ours - reference).abs().mean() <= 0.2 * error  # a sum that is rounded in another way may change a code
    assert 0 < error <= 0.02 * exact.abs().mean()
