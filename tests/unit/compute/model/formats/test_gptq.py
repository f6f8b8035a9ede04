"""GPTQ checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from services.compute.model.spec import ModelError
from tests.unit.compute.model.formats.checkpoints import Store, Stored, Written, change, check, integers, logits, packed

_Q = "model.layers.1.self_attn.q_proj"


def _config(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False, **more}


def _store(bits: int = 4, group: int = 16, *, sorted_inputs: bool = False, less: int = 1, sym: bool = False) -> Store:
    """`group` 0: all inputs. Zeros of the first version are stored `less` 1."""

    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        n_in = weight.shape[1]
        order = torch.randperm(n_in) if sorted_inputs else torch.arange(n_in)
        made = integers(weight[:, order], bits, (1, group), sym, torch.float16)
        back = order.argsort()
        stored = {
            "qweight": packed(made.codes[:, back].T, bits, dim=0),
            "qzeros": packed((made.zeros.T - less) % 2**bits, bits, dim=1),
            "scales": made.scales.T,
            "g_idx": (back // (group or n_in)).int(),
        }
        return stored, made.dense[:, back]

    return store


@pytest.mark.parametrize(
    ("variant", "config", "store"),
    [
        ("llama", {"desc_act": True}, _store(sorted_inputs=True)),
        ("phi3", {"checkpoint_format": "gptq_v2"}, _store(less=0)),
        ("qwen3_moe", {"group_size": 20, "bits": 8, "desc_act": True}, _store(8, 20, sorted_inputs=True)),
        ("gpt_neox", {"group_size": -1, "bits": 2}, _store(2, 0)),
        ("mixtral", {"group_size": -1, "desc_act": True, "sym": True}, _store(4, 0, sorted_inputs=True, sym=True)),
    ],
)
def test_groups(variant: str, config: dict[str, Any], store: Store, written: Written) -> None:
    """4 ranks have 12 of 48 inputs each: their shares begin in the middle of groups and of words."""
    check(written(variant, _config(**config), store))


def test_zeros_of_weights_that_are_all_positive(written: Written) -> None:
    """Their zero is 0, which the first version stores as the largest number of its bits."""
    store = _store()
    check(written("llama", _config(), lambda weight: store(weight.abs())), (1, 2))


def test_groups_of_zeros_are_those_of_unsorted_inputs(written: Written) -> None:
    """Some programs write no others where `desc_act` is false."""
    made = written("llama", _config(), _store())

    def clear(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".g_idx")]:
            tensors[name].zero_()

    change(made.folder, clear)
    check(made, (1, 2))


@pytest.mark.parametrize(("version", "less"), [("gptq", 0), ("gptq_v2", 1), ("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_zeros_show_their_version(version: str, less: int, bits: int, written: Written) -> None:
    """Some programs name another one than they write."""
    config = _config(sym=True, bits=bits, checkpoint_format=version)
    check(written("llama", config, _store(bits, sym=True, less=less)), (1, 2))


def test_asymmetric_zeros_are_rejected_in_a_symmetric_format(written: Written) -> None:
    made = written("llama", _config(sym=True), _store(sym=True))

    def move(tensors: dict[str, Tensor]) -> None:
        tensors[f"{_Q}.qzeros"][0, 0] += 1

    change(made.folder, move)
    with pytest.raises(
        ModelError, match=rf"{_Q}\.qzeros: zeros 7, 8, but sym is true: expected 7 in all \(gptq\), or 8"
    ):
        logits(made)


def test_a_quantized_head(written: Written) -> None:
    """Its 99 rows fill 13 words of zeros, the last one in part."""
    check(written("llama", _config(lm_head=True), _store(), dense=("embed", "norm")))


def test_groups_that_are_not_stored_are_in_order(written: Written) -> None:
    made = written("llama", _config(), _store())
    change(made.folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("g_idx")])
    check(made, (1, 4))
    file = made.folder / "config.json"
    file.write_text(file.read_text().replace('"desc_act": false', '"desc_act": true'))
    with pytest.raises(ModelError, match=r"down_proj\.g_idx: missing"):
        logits(made)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_config(bits=3), r"bits: 3 is not implemented; allowed: 2, 4, 8"),
        (_config(checkpoint_format="marlin"), r"checkpoint_format: 'marlin' is not implemented"),
        (_config(dynamic={"+:.*down.*": {"bits": 8}}), r"dynamic: settings of its own for '\+:\.\*down"),
        (_config(twist=1), r"quantization_config\.twist: 1 is not implemented"),
        (_config(group_size=32), r"q_proj\.qzeros: expected shape \[2, 6\], found \[3, 6\]"),
        (_config(bits=8), r"q_proj\.qweight: expected shape \[12, 48\], found \[6, 48\]"),
    ],
)
def test_unimplemented_or_malformed_weights_are_rejected_by_name(
    config: dict[str, Any], message: str, written: Written
) -> None:
    made = written("llama", config, _store())
    change(made.folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("g_idx")])
    with pytest.raises(ModelError, match=message):
        logits(made)


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales"])
def test_missing_tensors_are_named(suffix: str, written: Written) -> None:
    made = written("llama", _config(), _store())
    change(made.folder, lambda tensors: tensors.pop(f"{_Q}.{suffix}"))
    with pytest.raises(ModelError, match=rf"{_Q}\.{suffix}: missing"):
        logits(made)


def test_conv1d_of_gpt2_is_refused_by_name(written: Written) -> None:
    made = written("gpt2", _config(), _store(), dense=("wte", "wpe", "ln", "c_attn", "mlp"))
    with pytest.raises(ModelError, match=r"c_proj: quantized weights of this architecture are not read"):
        logits(made)
