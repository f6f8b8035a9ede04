"""Random LoRA adapters as PEFT writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def write_adapter(
    base: Path, out: Path, modules: Mapping[str, int], *, seed: int = 0, size: float = 0.1, **config: Any
) -> dict[str, torch.Tensor]:
    """Write an adapter for tensors of the checkpoint `base`: `modules` are ends of their names, each with its rank.

    Returns what each tensor of the base changes by before the scale, [out, in].
    """
    random = torch.Generator().manual_seed(seed)
    transposed, tensors, changes = bool(config.get("fan_in_fan_out")), {}, {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        rank = next((rank for end, rank in modules.items() if name.endswith(f"{end}.weight")), None)
        if rank is None or weight.dim() != 2:
            continue
        n_out, n_in = weight.shape[::-1] if transposed else weight.shape
        a, b = (torch.randn(shape, generator=random) * size for shape in ((rank, n_in), (n_out, rank)))
        tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        changes[name] = b @ a
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": next(iter(modules.values())), "lora_alpha": 8, "bias": "none"}
    settings |= {"target_modules": sorted(modules), **config}
    (out / "adapter_config.json").write_text(json.dumps(settings))
    return changes
