"""AWQ checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from services.compute.model.spec import ModelError
from tests.unit.compute.model.formats.checkpoints import Store, Stored, Written, check, integers, logits

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs lies at each place of a word, as AutoAWQ packs them


def _config(**more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True, **more}


def _packed(numbers: Tensor) -> Tensor:
    """Eight columns in a word."""
    words = sum(numbers[:, column::8] << (4 * place) for place, column in enumerate(_ORDER))
    assert isinstance(words, Tensor)
    return words.to(torch.uint32).view(torch.int32)


def _store(group: int) -> Store:
    """`group` 0: all inputs."""

    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        made = integers(weight, 4, (1, group), False, torch.float16)
        return {"qweight": _packed(made.codes.T), "qzeros": _packed(made.zeros.T), "scales": made.scales.T}, made.dense

    return store


@pytest.mark.parametrize(
    ("variant", "group"), [("llama", 16), ("phi3", 20), ("gpt_neox", 16), ("mixtral", 0), ("qwen2", 16)]
)
def test_groups(variant: str, group: int, written: Written) -> None:
    """4 ranks have 12 of 48 outputs each: their shares begin in the middle of words."""
    check(written(variant, _config(group_size=group or -1), _store(group)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_config(bits=8), r"quantization_config\.bits: 8 is not implemented; allowed: 4"),
        (_config(version="gemv"), r"version: 'gemv' is not implemented; allowed: 'gemm'"),
        (_config(dynamic={"+:.*down.*": {"bits": 8}}), r"dynamic: settings of its own for '\+:\.\*down"),
        (_config(twist=1), r"twist: 1 is not implemented"),
        (_config(group_size=32), r"q_proj\.qzeros: expected shape \[2, 6\], found \[3, 6\]"),
    ],
)
def test_unimplemented_or_malformed_weights_are_rejected_by_name(
    config: dict[str, Any], message: str, written: Written
) -> None:
    with pytest.raises(ModelError, match=message):
        logits(written("llama", config, _store(16)))
