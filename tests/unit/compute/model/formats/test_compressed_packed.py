"""Checkpoints of compressed-tensors with several integers in a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from services.compute.model.spec import ModelError
from tests.unit.compute.model.formats.checkpoints import Store, Stored, Written, change, check, integers, logits, packed

_Q = "model.layers.1.self_attn.q_proj"


def _config(**weights: Any) -> dict[str, Any]:
    settings = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": settings}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


def _store(bits: int, block: tuple[int, int], symmetric: bool, reordered: bool = False) -> Store:
    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        order = torch.randperm(weight.shape[1]) if reordered else torch.arange(weight.shape[1])
        made = integers(weight[:, order], bits, block, symmetric, torch.bfloat16)
        back = order.argsort()  # inputs that are grouped in `order` are stored where they were
        stored = {
            "weight_packed": packed(made.codes[:, back], bits, dim=1),
            "weight_scale": made.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = packed(made.zeros, bits, dim=0)
        if reordered:
            stored["weight_g_idx"] = (back // block[1]).int()
        return stored, made.dense[:, back]

    return store


@pytest.mark.parametrize(
    ("variant", "bits", "block", "symmetric"),
    [
        ("llama", 4, (1, 16), True),
        ("phi3", 4, (1, 16), False),
        ("gpt_neox", 8, (1, 0), True),
        ("mixtral", 8, (1, 0), False),
        ("qwen3_moe", 2, (1, 20), False),
    ],
)
def test_groups(
    variant: str,
    bits: int,
    block: tuple[int, int],
    symmetric: bool,
    written: Written,
) -> None:
    """4 ranks have 12 of 48 inputs each: their shares begin in the middle of groups and of words."""
    strategy = {"strategy": "group", "group_size": block[1]} if block[1] else {"strategy": "channel"}
    config = _config(num_bits=bits, symmetric=symmetric, **strategy)
    check(written(variant, config, _store(bits, block, symmetric)))


def test_groups_in_an_order_of_their_own(written: Written) -> None:
    config = _config(actorder="group", symmetric=False) | {"transform_config": {"config_groups": {}}}  # no transform
    made = written("llama", config, _store(4, (1, 16), symmetric=False, reordered=True))
    check(made)
    change(made.folder, lambda tensors: tensors[f"{_Q}.weight_g_idx"].fill_(3))
    with pytest.raises(ModelError, match=rf"{_Q}\.weight_g_idx: expected groups from 0 to 2"):
        logits(made)
    change(made.folder, lambda tensors: tensors.pop(f"{_Q}.weight_g_idx"))
    with pytest.raises(ModelError, match=rf"{_Q}\.weight_g_idx: missing"):
        logits(made)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_config(num_bits=3), r"config_groups: num_bits: 3 is not implemented; allowed: 2, 4, 8"),
        (_config(num_bits=8), r"q_proj\.weight_packed: expected shape \[48, 12\], found \[48, 6\]"),
        (_config(group_size=32), r"q_proj\.weight_scale: expected shape \[48, 2\], found \[48, 3\]"),
        (_config(symmetric=False), r"down_proj\.weight_zero_point: missing \(14 tensors in all\)"),
        (_config(group_size=None), r"weights\.group_size: expected a positive integer, found None"),
    ],
)
def test_unimplemented_or_malformed_weights_are_rejected_by_name(
    config: dict[str, Any], message: str, written: Written
) -> None:
    with pytest.raises(ModelError, match=message):
        logits(written("llama", config, _store(4, (1, 16), symmetric=True)))
