"""Quantized checkpoints, written together with dense ones of the same values, which transformers computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from services.compute.backends.base import Linear, ModelBackend
from services.compute.backends.opening import open_backend
from services.compute.backends.torch.backend import TorchBackend
from services.compute.backends.torch.ops import TorchOps
from services.compute.backends.weights import Grouped, PerChannel, Stacked
from services.compute.cpu import has_vectors
from services.compute.model.build import load_model
from services.compute.model.registry import describe
from tests.unit.compute.model.conftest import Sample
from tests.unit.compute.model.harness import CPU, CachedDecoder, ThreadRank, run_ranks
from tests.unit.compute.model.zoo import reference_logits

# Fused projections, several experts, shared and unshared KV heads, biases.
TYPICAL_ERROR = 0.04  # error of a row in bfloat16
VARIANTS = ("llama", "phi3", "gpt_neox", "qwen3_moe", "mixtral", "qwen2")
DENSE = ("embed", "lm_head", "norm", "mlp.gate.", "block_sparse_moe.gate.")  # never quantized

Stored = Mapping[str, Tensor]  # by suffix
Store = Callable[[Tensor], tuple[Stored, Tensor]]  # the stored form of a weight [out, in], and its dense values
Written = Callable[..., Sample]


def write(made: Sample, to: Path, config: dict[str, Any], store: Store, dense: tuple[str, ...] = DENSE) -> Sample:
    """Write `made` with its linear layers as `store` has them; the logits are transformers' of the same values.

    `dense`: parts of names that are left as they are.
    """
    dense_folder, folder = to / "dense", to / "quantized"
    for copy in (dense_folder, folder):
        shutil.copytree(made.folder, copy)
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in load_file(made.folder / "model.safetensors").items():
        if tensor.dim() != 2 or any(part in name for part in dense):
            stored[name] = values[name] = tensor
            continue
        parts, values[name] = store(tensor)
        stored |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in values.items()}, dense_folder / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    model = transformers.AutoModelForCausalLM.from_pretrained(dense_folder, attn_implementation="eager")
    return Sample(folder, made.ids, reference_logits(model, made.ids))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Edit the tensors of a checkpoint in place."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


class StoredLinear:
    """A product that packs nothing: it asks for the numbers whenever it multiplies."""

    def __init__(self, weight: Stacked, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight.dense(x.dtype, CPU), self._bias)

    def in_float32(self, x: Tensor) -> Tensor:
        return self(x)


class StoringOps(TorchOps):
    """A device that multiplies with every form as it is stored."""

    def __init__(self, forms: set[type]) -> None:
        """`forms`: gets those of the weights that it multiplies with."""
        super().__init__(torch.float32, CPU)
        self._forms = forms

    def linear(self, weight: Stacked, bias: Tensor | None) -> Linear:
        self._forms |= {type(part) for part in weight.parts}
        return StoredLinear(weight, bias)


def check(expected: Sample, sizes: tuple[int, ...] = (1, 2, 4)) -> None:
    """Compare the logits on several numbers of ranks with the expected ones, on 2 with weights as they are stored."""
    for size in sizes:
        forms: set[type] = set()
        backend = TorchBackend(torch.float32, CPU) if size == 2 else open_backend(torch.float32, CPU)
        if size == 2:
            backend.ops = StoringOps(forms)
        difference = (logits(expected, size, backend) - expected.logits).abs().max()
        assert difference <= 1e-4, f"{size} ranks: {difference}"
        assert size != 2 or forms & {Grouped, PerChannel}
    if has_vectors():  # our kernels multiply with the integers
        for size in sizes[:2]:
            actual = logits(expected, size, dtype=torch.bfloat16)
            error = (actual - expected.logits).norm(dim=-1) / expected.logits.norm(dim=-1)  # [n]
            assert error.median() <= TYPICAL_ERROR, f"{size} ranks: {error.median()}"


def logits(
    made: Sample, size: int = 1, backend: ModelBackend | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Logits of `size` ranks: [n, vocab_size]; `dtype`: of the CPU that is opened without a `backend`."""

    def work(rank: ThreadRank) -> Tensor:
        torch.set_num_threads(1)
        model = load_model(describe(made.folder), rank, backend or open_backend(dtype, CPU))
        return model.logits(CachedDecoder(model, rank).run(made.ids, []))

    return torch.cat(run_ranks(size, work), dim=-1)[:, : made.logits.shape[1]]


def blocks(weight: Tensor, block: tuple[int, int]) -> list[tuple[slice, slice]]:
    """The places of the blocks of a weight, ragged at its ends; 0: as long as the weight."""
    sizes = [size or whole for size, whole in zip(block, weight.shape, strict=True)]
    return [
        (slice(row, row + sizes[0]), slice(col, col + sizes[1]))
        for row in range(0, weight.shape[0], sizes[0])
        for col in range(0, weight.shape[1], sizes[1])
    ]


@dataclass(frozen=True)
class Integers:
    """A weight as integers."""

    codes: Tensor  # int64 [out, in], from 0 on
    scales: Tensor  # [blocks of outputs, blocks of inputs]
    zeros: Tensor  # int64, likewise
    dense: Tensor  # their dense values


def integers(weight: Tensor, bits: int, block: tuple[int, int], symmetric: bool, dtype: torch.dtype) -> Integers:
    """Round to the nearest of 2^bits levels between the ends of each block; symmetric ones have 0 in the middle."""
    levels, codes, dense = 2**bits - 1, torch.empty_like(weight, dtype=torch.int64), torch.empty_like(weight)
    scales, zeros = [], []
    for place in blocks(weight, block):
        part = weight[place]
        low, high = min(part.min().item(), 0.0), max(part.max().item(), 0.0)
        low, high = (-max(-low, high), max(-low, high)) if symmetric else (low, high)
        scale = torch.tensor((high - low) / levels).to(dtype)
        zero = 2 ** (bits - 1) if symmetric else round(-low / scale.item())
        codes[place] = ((part / scale.float()).round() + zero).clamp(0, levels).long()
        dense[place] = (codes[place] - zero) * scale.float()
        scales.append(scale)
        zeros.append(zero)
    shape = (-1, -(-weight.shape[1] // (block[1] or weight.shape[1])))
    return Integers(codes, torch.stack(scales).view(shape), torch.tensor(zeros).view(shape), dense)


def floats(weight: Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes in e4m3, scales [blocks of outputs, blocks of inputs], and the numbers that they stand for."""
    codes, dense, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), weight.clone(), []
    for place in blocks(weight, block):
        scale = (weight[place].abs().max() / 448.0).to(dtype)
        codes[place] = (weight[place] / scale.float()).to(torch.float8_e4m3fn)
        dense[place] = codes[place].float() * scale.float()
        scales.append(scale)
    return codes, torch.stack(scales).view(-1, -(-weight.shape[1] // (block[1] or weight.shape[1]))), dense


def packed(numbers: Tensor, bits: int, dim: int, places: Sequence[int] = range(32)) -> Tensor:
    """Put numbers into words of 32 bits, one after another along `dim`, each at its place."""
    per_word = 32 // bits
    numbers = torch.cat(
        [numbers.movedim(dim, 0), numbers.new_zeros(-numbers.shape[dim] % per_word, numbers.shape[1 - dim])]
    )
    words = torch.zeros(len(numbers) // per_word, numbers.shape[1], dtype=torch.int64)
    for index, row in enumerate(numbers):
        words[index // per_word] |= row << (bits * places[index % per_word])
    return words.to(torch.uint32).view(torch.int32).movedim(0, dim)
