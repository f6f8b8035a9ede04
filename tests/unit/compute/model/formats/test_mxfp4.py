"""gpt-oss as it is published: experts in MXFP4, each code and each exponent by its definition."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.compute.backends.collectives import SingleRank
from services.compute.backends.opening import open_backend
from services.compute.model.build import load_model
from services.compute.model.registry import describe
from services.compute.model.spec import ModelError
from tests.unit.compute.model.conftest import Sample
from tests.unit.compute.model.formats.checkpoints import check
from tests.unit.compute.model.harness import CPU
from tests.unit.compute.model.zoo import VARIANTS, prompt, reference_logits, write_checkpoint

_PUBLISHED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of the three lower bits; the fourth is the sign


def _random(stack: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks and scales of a stack [n, in, out] of random codes, and what they stand for, of its shape."""
    n, n_in, n_out = stack.shape
    codes = torch.randint(0, 16, (n, n_out, n_in // 32, 32), generator=generator)
    exponents = torch.randint(119, 124, (n, n_out, n_in // 32), generator=generator)
    numbers = torch.tensor([*_E2M1, *(-number for number in _E2M1)])[codes] * 2.0 ** (exponents - 127).unsqueeze(-1)
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]  # the first of a pair is in the low bits
    return blocks.to(torch.uint8), exponents.to(torch.uint8), numbers.flatten(2).mT


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """A checkpoint in MXFP4, and what transformers computes of the same numbers."""
    config = VARIANTS["gpt_oss"]()
    config.hidden_size = 64
    dense, folder = tmp_path_factory.mktemp("dense"), tmp_path_factory.mktemp("mxfp4")
    write_checkpoint(config, dense)
    generator, stored, numbers = torch.Generator().manual_seed(0), dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(dense / "model.safetensors").items():
        if tensor.dim() < 3:
            stored[name] = numbers[name] = tensor
            continue
        blocks, exponents, numbers[name] = _random(tensor, generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
    save_file({name: tensor.contiguous() for name, tensor in numbers.items()}, dense / "model.safetensors")
    save_file(stored, folder / "model.safetensors")
    values = json.loads((dense / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": _PUBLISHED}))
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, attn_implementation="eager")
    return Sample(folder, prompt(), reference_logits(model, prompt()))


def test_experts_equal_transformers_on_the_same_numbers(published: Sample) -> None:
    check(published, (1, 4))  # on 4 ranks each has one expert


def test_stacks_that_are_cut_off_are_refused_by_name(published: Sample, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(published.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"

    def refused(change: Callable[[dict[str, Tensor]], object], message: str) -> None:
        changed = dict(tensors)
        change(changed)
        save_file({name: tensor.contiguous() for name, tensor in changed.items()}, folder / "model.safetensors")
        with pytest.raises(ModelError, match=message):
            load_model(describe(folder), SingleRank(), open_backend(torch.float32, CPU))

    refused(lambda stored: stored.pop(f"{name}_scales"), rf"{name}_scales: missing")
    refused(
        lambda stored: stored.update({f"{name}_blocks": tensors[f"{name}_blocks"][:3]}), rf"{name}_blocks: expected"
    )
    refused(lambda stored: stored.update({f"{name}_scales": tensors[f"{name}_scales"][:, :9]}), rf"{name}_.*: expected")
