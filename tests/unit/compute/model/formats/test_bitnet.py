"""BitNet's checkpoints: planes of ternary rows, and a scale that multiplies or divides."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from torch import Tensor

from services.compute.model.spec import ModelError
from tests.unit.compute.model.formats.checkpoints import Stored, Written, check, logits

MULTIPLIES = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
DIVIDES = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}


def _store(weight: Tensor, divides: bool) -> tuple[Stored, Tensor]:
    scale = weight.abs().mean().clamp(min=1e-5)
    codes = (weight / scale).round().clamp(-1, 1)
    stored = 1 / scale if divides else scale
    packed = transformers.integrations.bitnet.pack_weights(codes.clone())
    return {"weight": packed, "weight_scale": stored.view(1)}, codes * scale


@pytest.mark.parametrize(("config", "divides"), [(MULTIPLIES, False), (DIVIDES, True)])
@pytest.mark.parametrize("variant", ["llama", "phi3"])
def test_planes_are_unpacked_before_the_split_into_ranks(
    variant: str, config: dict[str, Any], divides: bool, written: Written
) -> None:
    check(written(variant, config, lambda weight: _store(weight, divides)))


@pytest.mark.parametrize(
    ("key", "value"), [("quantization_mode", "online"), ("use_rms_norm", True), ("linear_class", "other")]
)
def test_unimplemented_features_are_rejected_by_name(key: str, value: object, written: Written) -> None:
    made = written("llama", MULTIPLIES | {key: value}, lambda weight: _store(weight, False))
    with pytest.raises(ModelError, match=f"quantization_config.{key}: {value!r} is not implemented"):
        logits(made)
