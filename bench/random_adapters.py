"""Makes LoRA adapters with random values for a checkpoint, on all its linear layers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.compute.model.adapters.peft import BEFORE, CONFIG, TENSORS, A, B
from services.compute.model.files import read_header

_END = "_proj.weight"


def write_adapter(model: Path, out: Path, rank: int, seed: int) -> None:
    """Write the adapter to the folder `out`. `model` has its linear layers' names from transformers' Llama."""
    random, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    headers = (read_header(file) for file in sorted(model.glob("*.safetensors")))
    for name, entry in (item for header in headers for item in header.items()):
        if not name.endswith(_END):
            continue
        n_out, n_in = entry.shape
        module = f"{BEFORE}{name.removesuffix('.weight')}"
        tensors[module + A] = torch.randn(rank, n_in, generator=random) / n_in**0.5
        tensors[module + B] = torch.randn(n_out, rank, generator=random) * 0.01
    out.mkdir()
    save_file(tensors, out / TENSORS)
    (out / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}))
