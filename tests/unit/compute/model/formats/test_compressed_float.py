"""FP8 checkpoints of compressed-tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from services.compute.model.spec import ModelError
from tests.unit.compute.model.formats.checkpoints import Store, Stored, Written, check, floats, logits

_BLOCKS = {"tensor": (0, 0), "channel": (1, 0), "group": (1, 16), "block": (20, 32)}


def _config(strategy: str, **weights: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **weights}
    settings |= {"group": {"group_size": 16}, "block": {"block_structure": [20, 32]}}.get(strategy, {})
    group = {"targets": ["Linear"], "weights": settings, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate$"],
    }


def _store(block: tuple[int, int]) -> Store:
    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        codes, grid, dense = floats(weight, block, torch.bfloat16)
        stored = {"weight": codes, "weight_scale": grid if block[0] else grid.view(1)}
        return {**stored, "input_scale": torch.ones(1)}, dense

    return store


@pytest.mark.parametrize(
    ("strategy", "variant"), [("tensor", "phi3"), ("channel", "qwen3_moe"), ("group", "llama"), ("block", "gpt_neox")]
)
def test_strategies(strategy: str, variant: str, written: Written) -> None:
    check(written(variant, _config(strategy), _store(_BLOCKS[strategy])))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_config("group") | {"format": "nvfp4-pack-quantized"}, r"format: 'nvfp4-pack-quantized' is not implemented"),
        (_config("channel") | {"config_groups": {}}, r"config_groups: 0 groups; one is implemented"),
        (_config("channel") | {"transform_config": {"u": {}}}, r"transform_config: \{'u': \{\}\} is not implemented"),
        (_config("channel", num_bits=4), r"config_groups: num_bits: 4 of float is not implemented; allowed: 8"),
        (_config("channel", type="int"), r"config_groups\.group_0\.weights\.type: 'int' is not implemented"),
        (_config("tensor_group"), r"weights\.strategy: 'tensor_group' is not implemented"),
        (_config("channel", twist=1), r"config_groups\.group_0\.weights\.twist: 1 is not implemented"),
        (_config("tensor"), r"q_proj\.weight_scale: expected shape \[1, 1\], found \[48, 1\]"),
    ],
)
def test_unimplemented_or_malformed_weights_are_rejected_by_name(
    config: dict[str, Any], message: str, written: Written
) -> None:
    with pytest.raises(ModelError, match=message):
        logits(written("llama", config, _store((1, 0))))
