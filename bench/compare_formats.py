"""Number formats of weights in bench.compare, and the checkpoints in which servers get them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from services.tools.converter.run import ConversionOptions, convert


@dataclass(frozen=True)
class WeightFormat:
    """Names of a format in each server. Tables and heads have 8 bits also in `int4`."""

    quantization: str  # Ryzanstein's, which rounds while it loads
    gguf: str  # the type of llama.cpp's matrices


FORMATS = {
    "bf16": WeightFormat("none", "BF16"),
    "int8": WeightFormat("int8", "Q8_0"),
    "int4": WeightFormat("int4", "Q4_0"),
}
_INT8_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
            },
        }
    },
}  # fmt: skip


def write_form(form: str, checkpoint: Path, weights: str) -> Path:
    """Write the form that peers of peers.toml serve next to `checkpoint`, a folder in bfloat16; returns its path."""
    if form == "gguf":
        out = checkpoint.with_name(f"{checkpoint.name}-{weights}.gguf")
        convert(ConversionOptions(checkpoint, out, FORMATS[weights].gguf, 1 << 40, force=False), lambda done, of: None)
        return out
    if form == "compressed-tensors" and weights != "bf16":
        return _write_int8(checkpoint, checkpoint.with_name(f"{checkpoint.name}-{weights}"))
    return checkpoint


def _write_int8(checkpoint: Path, out: Path) -> Path:
    """Round layers to 8 bits with a scale for each output; activations are rounded by token when they are computed."""
    out.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": _INT8_CONFIG}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((checkpoint / name).read_bytes())
    written = {}
    with safe_open(checkpoint / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  # not a dict
            values = tensors.get_tensor(name)
            if "_proj." not in name:
                written[name] = values
                continue
            scale = values.float().abs().amax(1, keepdim=True) / 127
            written[name] = (values.float() / scale).round().to(torch.int8)
            written[f"{name}_scale"] = scale.bfloat16()
    save_file(written, out / "model.safetensors", metadata={"format": "pt"})
    return out
