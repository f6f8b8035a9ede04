"""Weights of integers in whole models: any number of ranks, the numbers they stand for, the memory foretold."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as T

from services.compute.backends.base import ModelBackend
from services.compute.backends.collectives import SingleRank
from services.compute.backends.cuda.ops import CudaOps
from services.compute.backends.opening import open_backend
from services.compute.backends.torch.backend import TorchBackend
from services.compute.backends.weights import Rounded, Stacked
from services.compute.cpu import has_vectors
from services.compute.kernels.codes import PackedCodes
from services.compute.model import footprint as footprints
from services.compute.model.build import load_model
from services.compute.model.families.config import Config
from services.compute.model.footprint import footprint
from services.compute.model.quantization import rounding_of
from services.compute.model.registry import describe, interpret
from services.compute.ranks.config import Quantization, RankGroupConfig
from tests.unit.compute.model.formats.gguf.models import write_model
from tests.unit.compute.model.harness import CPU, CachedDecoder, ThreadRank, run_ranks
from tests.unit.compute.model.zoo import make, prompt, write_checkpoint

IDS = prompt(23, 203, 1)
KINDS: tuple[Quantization, ...] = ("int8", "int4")
needs_kernels = pytest.mark.skipif(not has_vectors(), reason="this CPU has none of our kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose ranks' parts begin inside groups of inputs: 192 / 4 = 48."""
    path = tmp_path_factory.mktemp("llama")
    shape = {"vocab_size": 203, "hidden_size": 128, "intermediate_size": 192, "num_key_value_heads": 4}
    write_checkpoint(make("LlamaConfig", **shape, tie_word_embeddings=True)(), path).bfloat16().save_pretrained(path)
    return path


def logits(folder: Path, size: int, open_one: Callable[[], ModelBackend], quantization: Quantization) -> torch.Tensor:
    """Logits of `size` ranks in float32: [n, vocab_size]."""

    def work(rank: ThreadRank) -> torch.Tensor:
        torch.set_num_threads(1)
        model = load_model(describe(folder), rank, open_one(), quantization=quantization)
        return model.logits(CachedDecoder(model, rank, block_tokens=16).run(IDS, [5]))

    return torch.cat(run_ranks(size, work), dim=-1)[:, :203].float()


@needs_kernels
@pytest.mark.parametrize(("quantization", "roundings"), [("int8", 1.5), ("int4", 3.0)])
def test_ranks_agree_and_are_close_to_their_numbers(folder: Path, quantization: Quantization, roundings: float) -> None:
    """The numbers that the codes stand for do not depend on the ranks; only the roundings of activations do."""
    exact = logits(folder, 1, lambda: TorchBackend(torch.float32, CPU), quantization)
    unquantized = logits(folder, 1, lambda: TorchBackend(torch.float32, CPU), "none")
    noise = (logits(folder, 1, lambda: open_backend(torch.bfloat16, CPU), "none") - unquantized).abs().mean()
    for size in (1, 2, 4):
        parts = logits(folder, size, lambda: TorchBackend(torch.float32, CPU), quantization)
        assert (parts - exact).abs().max() < 1e-4 * exact.abs().max(), size
        actual = logits(folder, size, lambda: open_backend(torch.bfloat16, CPU), quantization)
        assert (actual - exact).abs().mean() < roundings * noise, size
    assert (exact - unquantized).abs().mean() > noise * (2 if quantization == "int4" else 0.2)


def packed(layer: object) -> Iterator[PackedCodes]:
    """The packed codes below an object of a model."""
    seen, left = set[int](), [layer]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, torch.Tensor | str | int | float | type):
            continue
        seen.add(id(one))
        if isinstance(one, PackedCodes):
            yield one
            continue
        if isinstance(one, list | tuple):
            left += one
        if isinstance(one, dict):
            left += one.values()
        if hasattr(one, "__self__"):
            left.append(one.__self__)
        names = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
        left += [getattr(one, name) for name in names if hasattr(one, name)]
        left += getattr(one, "__dict__", {}).values()


@needs_kernels
@pytest.mark.parametrize("quantization", KINDS)
def test_weights_take_the_predicted_memory_and_the_table_is_stored_once(
    folder: Path, quantization: Quantization
) -> None:
    model = load_model(describe(folder), SingleRank(), open_backend(torch.bfloat16, CPU), 16, quantization)
    codes = list(packed(model))
    assert len(codes) == 2 * 4 + 1
    assert sorted({code.bits for code in codes}) == ([8] if quantization == "int8" else [4, 8])
    config = RankGroupConfig(str(folder), kv_tokens=16, max_model_len=16, quantization=quantization)
    predicted = footprint(model.spec, config).fixed.weights
    held = sum(code.nbytes for code in codes)
    rows = 256 * 128 - 208 * 128  # the kernels' rows of padding of the table
    assert held - rows == pytest.approx(predicted, rel=0.05)


def test_weights_computed_dense_on_a_device_are_reported(folder: Path) -> None:
    model = load_model(describe(folder), SingleRank(), TorchBackend(torch.float32, CPU), 16, "int4")
    assert model.weight_formats["q"] == "int4 in groups of 32 as float32"
    ops, weight = CudaOps(torch.bfloat16, CPU), Rounded(torch.randn(8, 64).bfloat16(), 0, 64, 8, 32)
    assert ops.form(weight) == "int8 in groups of 32 as bfloat16"
    x, numbers = torch.randn(3, 64).bfloat16(), weight.rows(0, 8).bfloat16()
    assert torch.equal(ops.linear(Stacked((weight,)), None)(x), torch.nn.functional.linear(x, numbers))


def resident(name: str) -> int:
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@needs_kernels
def test_loading_never_holds_the_weights_dense_nor_the_whole_file(tmp_path: Path) -> None:
    shape = {"vocab_size": 203, "hidden_size": 1024, "intermediate_size": 4096}
    config = make("LlamaConfig", **shape, num_attention_heads=8, num_key_value_heads=8)()
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    backend, before = open_backend(torch.bfloat16, CPU), resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    model = load_model(describe(tmp_path), SingleRank(), backend, 16, "int4")
    grown = resident("VmHWM") - before
    bands = 24 << 20  # the band that is unpacked at a time, and libraries that are used for the first time
    assert grown < 1.2 * sum(code.nbytes for code in packed(model)) + bands
    assert (tmp_path / "model.safetensors").stat().st_size > 1.2 * grown


@needs_kernels
@pytest.mark.parametrize("quantization", ["none", "int8"])  # quantization of tensors that the file stores dense
def test_a_gguf_file_takes_the_predicted_memory_and_its_formats_are_named(
    folder: Path, tmp_path: Path, quantization: Quantization
) -> None:
    kinds = {"token_embd.weight": T.Q8_0, "blk.0.attn_q.weight": T.F16, "blk.0.ffn_down.weight": T.Q5_0}
    hub = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    file = write_model(hub, "llama", tmp_path / "m.gguf", lambda name: kinds.get(name, T.Q4_0))
    model = load_model(describe(file), SingleRank(), open_backend(torch.bfloat16, CPU), 16, quantization)
    dense = 128 * 128 * 2 if quantization == "none" else 0
    held = sum(code.nbytes for code in packed(model)) + dense - (256 - 208) * 128 * 34 // 32
    config = RankGroupConfig(str(file), kv_tokens=16, max_model_len=16, quantization=quantization)
    assert held == pytest.approx(footprint(model.spec, config).fixed.weights, rel=0.03)
    four, eight = "uint4 in groups of 32", "int8 in groups of 32"
    q = {"none": "bfloat16", "int8": "int8 in groups of 32"}[quantization]
    wanted = {"q": f"1 x {q} and 1 x {four}", "k": four, "v": four, "o": four, "gate": four, "up": four}
    wanted |= {"down": f"1 x uint5 in groups of 32 and 1 x {four}", "head": eight}
    assert model.weight_formats == wanted


@pytest.mark.parametrize(("quantization", "most"), [("int4", 0.45e9), ("int8", 0.55e9)])
def test_a_model_of_half_a_billion_in_four_bits(
    monkeypatch: pytest.MonkeyPatch, quantization: Quantization, most: float
) -> None:
    monkeypatch.setattr(footprints, "has_vectors", lambda: True)
    published = Path(__file__).with_name("published") / "qwen2.jsonl"
    lines = [json.loads(line) for line in published.read_text().splitlines()]
    config: dict[str, Any] = next(line["config"] for line in lines if "0.5B" in line["name"])
    _, spec = interpret(Config(config, Path("config.json")))
    ranks = RankGroupConfig("", kv_tokens=1, max_model_len=2048, quantization=quantization)
    assert footprint(spec, ranks).fixed.weights <= most
    assert footprint(spec, replace(ranks, quantization="none")).fixed.weights > 0.9e9


def test_routers_and_positions_are_never_rounded_and_tables_keep_eight_bits() -> None:
    actual = {key: rounding_of("int4", key) for key in ("layers.3.router", "positions", "embed", "head", "layers.3.q")}
    assert [key for key, rounding in actual.items() if rounding is None] == ["layers.3.router", "positions"]
    assert [rounding.bits for rounding in actual.values() if rounding] == [8, 8, 4]
    assert rounding_of("none", "layers.3.q") is None
