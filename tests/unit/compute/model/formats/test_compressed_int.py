"""INT8 checkpoints of compressed-tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from services.compute.model.spec import ModelError
from tests.unit.compute.model.formats.checkpoints import Store, Stored, Written, change, check, integers, logits

_Q = "model.layers.1.self_attn.q_proj"


def _config(strategy: str, **weights: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": strategy, "symmetric": True, **weights}
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    group = {"targets": ["Linear"], "weights": settings, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}


def _store(block: tuple[int, int], symmetric: bool) -> Store:
    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        made = integers(weight, 8, block, symmetric, torch.bfloat16)
        stored = {"weight": (made.codes - 128).to(torch.int8), "weight_scale": made.scales}
        return stored if symmetric else {**stored, "weight_zero_point": (made.zeros - 128).to(torch.int8)}, made.dense

    return store


@pytest.mark.parametrize(
    ("variant", "strategy", "block", "symmetric"),
    [
        ("llama", "channel", (1, 0), True),
        ("gpt_neox", "channel", (1, 0), False),
        ("mixtral", "group", (1, 16), True),
        ("qwen2", "group", (1, 20), False),
    ],
)
def test_strategies(
    strategy: str,
    block: tuple[int, int],
    symmetric: bool,
    variant: str,
    written: Written,
) -> None:
    config = _config(strategy, symmetric=symmetric, group_size=block[1] or None)
    check(written(variant, config, _store(block, symmetric)))


def test_zeros_that_are_stored_though_symmetric(written: Written) -> None:
    made = written("llama", _config("channel"), _store((1, 0), symmetric=True))
    zeros = torch.zeros(48, 1, dtype=torch.int8)
    change(made.folder, lambda tensors: tensors.update({f"{_Q}.weight_zero_point": zeros}))
    check(made, (1,))


@pytest.mark.parametrize(
    ("config", "edit", "message"),
    [
        (
            _config("channel", symmetric=False),
            lambda tensors: tensors.pop(f"{_Q}.weight_zero_point"),
            rf"{_Q}\.weight_zero_point: missing",
        ),
        (
            _config("channel", symmetric=False),
            lambda tensors: tensors.update({f"{_Q}.weight": tensors[f"{_Q}.weight"].view(torch.uint8)}),
            rf"{_Q}\.weight: expected I8, found U8",
        ),
        (
            _config("group", group_size=16),
            dict,
            r"q_proj\.weight_zero_point: expected shape \[48, 3\], found \[48, 1\]",
        ),
        (_config("channel", num_bits=4), dict, r"config_groups: num_bits: 4 of int-quantized is not implemented"),
    ],
)
def test_unimplemented_or_malformed_weights_are_rejected_by_name(
    config: dict[str, Any],
    edit: Callable[[dict[str, Tensor]], object],
    message: str,
    written: Written,
) -> None:
    made = written("llama", config, _store((1, 0), symmetric=False))
    change(made.folder, edit)
    with pytest.raises(ModelError, match=message):
        logits(made)
