"""FP8 checkpoints of FBGEMM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.compute.model.spec import ModelError
from tests.unit.compute.model.conftest import Sample
from tests.unit.compute.model.formats.checkpoints import Stored, change, check, logits, write

_CONFIG = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
_Q = "model.layers.1.self_attn.q_proj"


def _store(weight: Tensor) -> tuple[Stored, Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / 448.0  # the largest of e4m3
    codes = (weight / scales).to(torch.float8_e4m3fn)
    stored = {"weight": codes, "weight_scale": scales, "input_scale_ub": torch.tensor([1200.0])}
    return stored, codes.float() * scales


@pytest.mark.parametrize("variant", ["llama", "qwen3_moe"])
def test_a_scale_for_each_output(variant: str, sample: Callable[[str], Sample], tmp_path: Path) -> None:
    check(write(sample(variant), tmp_path, _CONFIG, _store))


def test_other_scales_are_refused_by_name(sample: Callable[[str], Sample], tmp_path: Path) -> None:
    made = write(sample("llama"), tmp_path, _CONFIG, _store)
    change(made.folder, lambda tensors: tensors.update({f"{_Q}.weight_scale": torch.ones(1)}))
    with pytest.raises(ModelError, match=rf"{_Q}\.weight_scale: expected shape \[48, 1\], found \[1\]"):
        logits(made)
