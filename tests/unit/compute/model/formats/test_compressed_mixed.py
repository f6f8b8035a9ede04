"""Checkpoints of compressed-tensors whose groups of layers have formats of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from services.compute.model.spec import ModelError
from tests.unit.compute.model.formats.checkpoints import Stored, Written, change, check, integers, logits, packed

_DOWN = "model.layers.1.mlp.down_proj"


def _group(stored_as: str, target: str, **weights: Any) -> dict[str, Any]:
    return {"format": stored_as, "targets": [target], "weights": {"type": "int", "symmetric": True, **weights}}


_PACKED = _group("pack-quantized", "Linear", num_bits=4, strategy="group", group_size=16)
_BYTES = _group("int-quantized", "re:.*down_proj$", num_bits=8, strategy="channel")


def _config(*groups: dict[str, Any]) -> dict[str, Any]:
    named = {f"group_{index}": group for index, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": named}


def _store(weight: Tensor) -> tuple[Stored, Tensor]:
    if weight.shape[1] > weight.shape[0]:  # down
        made = integers(weight, 8, (1, 0), True, torch.bfloat16)
        return {"weight": (made.codes - 128).to(torch.int8), "weight_scale": made.scales}, made.dense
    made = integers(weight, 4, (1, 16), True, torch.bfloat16)
    return {"weight_packed": packed(made.codes, 4, dim=1), "weight_scale": made.scales}, made.dense


@pytest.mark.parametrize("groups", [(_PACKED, _BYTES), (_BYTES, _PACKED)])
def test_each_module_is_read_in_the_format_of_its_codes(groups: tuple[dict[str, Any], ...], written: Written) -> None:
    made = written("llama", _config(*groups), _store)
    check(made, sizes=(1, 2))
    change(made.folder, lambda tensors: tensors.pop(f"{_DOWN}.weight"))
    with pytest.raises(ModelError, match=rf"{_DOWN}\.weight(_packed)?: missing"):
        logits(made)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_config(), "config_groups: expected groups of layers, found {}"),
        (_config(_PACKED, _PACKED), "config_groups: several groups with one format are not implemented"),
        (_config(_PACKED, {**_BYTES, "format": "marlin-24"}), "format: 'marlin-24' is not implemented; known: "),
        (_config(_PACKED, {**_BYTES, "twist": 1}), "config_groups.group_1.twist: 1 is not implemented"),
    ],
)
def test_unimplemented_features_are_rejected_by_name(config: dict[str, Any], message: str, written: Written) -> None:
    with pytest.raises(ModelError) as refused:
        logits(written("llama", config, _store))
    assert message in str(refused.value)
