"""Quantized checkpoints, written beside dense ones of the same values, which transformers computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.worker.backends.opening import open_backend
from services.worker.model.build import load_model
from tests.unit.worker.model.conftest import Sample
from tests.unit.worker.model.harness import CPU, Engine, ThreadRank, run_ranks
from tests.unit.worker.model.zoo import reference_logits

# Fused projections, several experts, shared and unshared KV heads, biases.
VARIANTS = ("llama", "phi3", "gpt_neox", "qwen3_moe", "mixtral", "qwen2")
_DENSE = ("embed", "lm_head", "norm", "mlp.gate.", "block_sparse_moe.gate.")  # never quantized

Stored = Mapping[str, Tensor]  # by suffix
Store = Callable[[Tensor], tuple[Stored, Tensor]]  # what is stored of a weight [out, in], and what it stands for


def write(made: Sample, to: Path, config: dict[str, Any], store: Store) -> Sample:
    """Write `made` with all its linear layers as `store` has them; the logits are transformers' of the same values."""
    dense_folder, folder = to / "dense", to / "quantized"
    for copy in (dense_folder, folder):
        shutil.copytree(made.folder, copy)
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, tensor in load_file(made.folder / "model.safetensors").items():
        if tensor.dim() != 2 or any(part in name for part in _DENSE):
            stored[name] = dense[name] = tensor
            continue
        parts, dense[name] = store(tensor)
        stored |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in dense.items()}, dense_folder / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    model = transformers.AutoModelForCausalLM.from_pretrained(dense_folder, attn_implementation="eager")
    return Sample(folder, made.ids, reference_logits(model, made.ids))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Edit the tensors of a checkpoint in place."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def check(expected: Sample, sizes: tuple[int, ...] = (1, 2, 4)) -> None:
    """Compare the logits on several numbers of ranks with the expected ones."""
    for size in sizes:
        difference = (logits(expected, size) - expected.logits).abs().max()
        assert difference <= 1e-4, f"{size} ranks: {difference}"


def logits(made: Sample, size: int = 1) -> Tensor:
    """What `size` ranks compute: [n, vocab_size]."""

    def work(rank: ThreadRank) -> Tensor:
        torch.set_num_threads(1)
        model = load_model(made.folder, rank, open_backend(torch.float32, CPU))
        return model.logits(Engine(model, rank).run(made.ids, []))

    return torch.cat(run_ranks(size, work), dim=-1)[:, : made.logits.shape[1]]


def blocks(weight: Tensor, block: tuple[int, int]) -> list[tuple[slice, slice]]:
    """The places of the blocks of a weight, ragged at its ends; 0: as long as the weight."""
    sizes = [size or whole for size, whole in zip(block, weight.shape, strict=True)]
    return [
        (slice(row, row + sizes[0]), slice(col, col + sizes[1]))
        for row in range(0, weight.shape[0], sizes[0])
        for col in range(0, weight.shape[1], sizes[1])
    ]
