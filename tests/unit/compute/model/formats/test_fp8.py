"""FP8 checkpoints: blocks, ragged ones too, one scale for a weight, and those of FBGEMM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from services.compute.model.families.naming import TensorRef
from services.compute.model.formats.grids import GridReader
from services.compute.model.formats.safetensors import TensorFiles
from services.compute.model.loading.checkpoint import Checkpoint
from services.compute.model.registry import read_spec
from services.compute.model.shard import Shard
from services.compute.model.spec import ModelError
from tests.unit.compute.model.conftest import Sample
from tests.unit.compute.model.formats.checkpoints import VARIANTS, Store, Stored, Written, change, check, floats, logits

_Q = "model.layers.1.self_attn.q_proj"


def _store(block: tuple[int, int], suffix: str = "weight_scale_inv", dtype: torch.dtype = torch.float32) -> Store:
    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        codes, grid, dense = floats(weight, block, dtype)
        return {"weight": codes, suffix: grid if block[0] else grid.view(())}, dense

    return store


def _config(block: list[int] | None, **more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block, **more}


@pytest.fixture
def made(written: Written) -> Sample:
    return written("llama", _config([16, 16]), _store((16, 16)))


@pytest.mark.parametrize(("variant", "block"), [("llama", (16, 16)), *((variant, (20, 32)) for variant in VARIANTS)])
def test_blocks(variant: str, block: tuple[int, int], written: Written) -> None:
    """Those of 20 are ragged everywhere, and ranks share some."""
    config = _config(list(block), fmt="e4m3", modules_to_not_convert=["lm_head"])
    check(written(variant, config, _store(block)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_scale_for_a_weight(dtype: torch.dtype, written: Written) -> None:
    """As AutoFP8 stores it, with a scale of activations that is not used."""

    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        stored, dense = _store((0, 0), "weight_scale", dtype)(weight)
        return {**stored, "input_scale": torch.tensor(0.5)}, dense

    config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    check(written("llama", config, store))


def test_transformers_computes_the_same_weights(made: Sample) -> None:
    """By its own operation, which loading a model with it would need more than torch for."""
    tensors, refs = load_file(made.folder / "model.safetensors"), {"x": TensorRef(f"{_Q}.weight")}
    parts = {suffix: tensors[f"{_Q}.{suffix}"] for suffix in ("weight", "weight_scale_inv")}
    with closing(TensorFiles(made.folder)) as files:
        readers = tuple(GridReader(files, layout) for layout in read_spec(made.folder).quantization)
        source = Checkpoint(files, refs, ("*",), quantized=readers)
        weight = source.weight(Shard.whole("x", (48, 48)))
    theirs = transformers.integrations.finegrained_fp8.Fp8Dequantize(None).convert(parts)["weight"]
    assert torch.equal(weight.rows(0, 48), theirs)


def test_a_module_without_scales_is_read_as_dense(made: Sample) -> None:
    """The tensors show which layers are quantized, so a mixture needs no list."""
    name, before = "model.layers.0.mlp.down_proj.weight", logits(made)

    def dense(tensors: dict[str, Tensor]) -> None:
        scales = tensors.pop(f"{name}_scale_inv").repeat_interleave(16, 0).repeat_interleave(16, 1)
        tensors[name] = tensors[name].float() * scales

    change(made.folder, dense)
    assert (logits(made) - before).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{_Q}.weight_scale_inv"), rf"{_Q}\.weight_scale_inv: missing"),
        (lambda t: t.pop(f"{_Q}.weight"), rf"{_Q}\.weight: missing"),
        (
            lambda t: t.update({f"{_Q}.weight_scale_inv": torch.ones(3, 2)}),
            rf"{_Q}\.weight_scale_inv: expected shape \[3, 3\], found \[3, 2\]",
        ),
        (
            lambda t: t.update({f"{_Q}.weight_scale_inv": torch.ones(3, 3, dtype=torch.uint8)}),
            rf"{_Q}\.weight_scale_inv: expected F32 or F16 or BF16, found U8",
        ),
        (
            lambda t: t.update({f"{_Q}.weight": t[f"{_Q}.weight"].float()}),
            rf"{_Q}\.weight: expected F8_E4M3, found F32",
        ),
        (lambda t: t.update({f"{_Q}.bias": torch.ones(48)}), rf"{_Q}\.bias: not used"),
    ],
)
def test_unexpected_storage_is_rejected_by_name(
    edit: Callable[[dict[str, Tensor]], object], message: str, made: Sample
) -> None:
    change(made.folder, edit)
    with pytest.raises(ModelError, match=message):
        logits(made)


def test_a_bias_of_zeros_is_dropped(made: Sample) -> None:
    """Some programs store one for every module that they quantize."""
    change(made.folder, lambda tensors: tensors.update({f"{_Q}.bias": torch.zeros(48)}))
    check(made)


def test_fp8_that_no_configuration_explains_is_refused(made: Sample) -> None:
    file = made.folder / "config.json"
    file.write_text(file.read_text().replace("quantization_config", "_quantization_config"))
    change(made.folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("scale_inv")])
    with pytest.raises(ModelError, match=r"q_proj\.weight: expected F64 or F32 or F16 or BF16, found F8_E4M3"):
        logits(made)


_FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}


def _store_fbgemm(weight: Tensor) -> tuple[Stored, Tensor]:
    codes, scales, dense = floats(weight, (1, 0), torch.float32)
    return {"weight": codes, "weight_scale": scales, "input_scale_ub": torch.tensor([1200.0])}, dense


@pytest.mark.parametrize("variant", ["llama", "qwen3_moe"])
def test_a_scale_for_each_output(variant: str, written: Written) -> None:
    check(written(variant, _FBGEMM, _store_fbgemm))
