"""A decoder's memory: while it is loaded, and afterwards."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from services.compute.backends.base import ModelBackend
from services.compute.kernels.bfloat16 import why_not
from services.compute.model.adapters.served import ADAPTED, read_adapter
from services.compute.model.families.sizes import logical_shape, read_shapes
from services.compute.model.footprint import (
    factor_elements,
    footprint,
    local_vocabulary,
    matrix_elements,
    tower_elements,
)
from services.compute.model.registry import describe, read_spec
from services.compute.ranks.config import RankGroupConfig
from tests.adapters import write_adapter
from tests.models import BUNDLED_MODEL
from tests.unit.compute.model import zoo
from tests.unit.compute.model.conftest import Sample
from tests.unit.compute.model.held_memory import (
    by_one_dnn,
    by_our_kernels,
    in_a_process,
    most_of_a_load,
    most_of_adapters,
)
from tests.unit.compute.model.test_adapters import LINEAR

TABLE = 131_072 * 256 * 2  # bytes of the embedding in bfloat16: nearly all of the model

NO_KERNELS = why_not(torch.bfloat16)  # empty if there are
needs_kernels = pytest.mark.skipif(bool(NO_KERNELS), reason=NO_KERNELS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16, with a large vocabulary whose embedding is the head."""
    folder = tmp_path_factory.mktemp("tied")
    shape = {"vocab_size": 131_072, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    config = zoo.make("LlamaConfig", **shape, num_key_value_heads=1, tie_word_embeddings=True)()
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("backend", "tables"),
    [
        pytest.param(by_our_kernels, 1, id="our kernels", marks=needs_kernels),  # packed, and looked up in there
        pytest.param(by_one_dnn, 4, id="oneDNN"),  # the table, and oneDNN's packed one; each number twice as long
    ],
)
def test_a_model_is_loaded_without_a_second_copy(
    checkpoint: Path, backend: Callable[[], ModelBackend], tables: int
) -> None:
    assert tables * 0.95 * TABLE < in_a_process(most_of_a_load, checkpoint, backend) < (tables + 0.5) * TABLE


@pytest.mark.parametrize("variant", zoo.VARIANTS)
def test_weight_memory_is_predicted_before_loading(sample: Callable[[str], Sample], variant: str) -> None:
    """Of each matrix that transformers stores; the vocabulary is padded to whole registers."""
    folder = sample(variant).folder
    spec = read_spec(folder)
    table = local_vocabulary(spec.vocab_size, 1) * spec.hidden_size
    with safe_open(folder / "model.safetensors", "pt") as file:
        towers = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "connector.")
        left_out = ("wpe.weight", "embed_positions.weight", "_proj_bias", "slope_rate", "_decay", *towers)
        names = [name for name in file.keys() if not any(part in name for part in left_out)]  # noqa: SIM118
        shapes = [file.get_slice(name).get_shape() for name in names]
        seeing = [name for name in file.keys() if any(part in name for part in towers)] if spec.vision else []  # noqa: SIM118
        tower = [file.get_slice(name).get_shape() for name in seeing]
    matrices = [table if shape[0] == spec.vocab_size else math.prod(shape) for shape in shapes if 1 < len(shape) < 4]
    assert tower_elements(spec) == sum(math.prod(shape) for shape in tower if len(shape) > 1)
    assert matrix_elements(spec, 1, two_tables=False) == sum(matrices)
    assert matrix_elements(spec, 1, two_tables=True) == sum(matrices) + table * spec.tied
    model = describe(folder)
    sizes, keys = read_shapes(model.config, model.family, spec), model.family.refs(spec)
    adapted = [key for key in keys if key.rpartition(".")[2] in ADAPTED and ".experts." not in key]
    assert factor_elements(spec, 1) == sum(size.value for key in adapted for size in logical_shape(key, sizes))


@needs_kernels
def test_adapters_take_the_predicted_memory(tmp_path: Path) -> None:
    """Four slots, and a cache that holds three."""
    write_adapter(BUNDLED_MODEL, tmp_path / "a", dict.fromkeys(LINEAR, 64))
    adapter, spec = read_adapter(tmp_path / "a", describe(BUNDLED_MODEL), 64), read_spec(BUNDLED_MODEL)
    assert adapter.n_bytes == 64 * factor_elements(spec, 1) * 4
    config = RankGroupConfig(
        str(BUNDLED_MODEL), kv_tokens=16, max_model_len=64, adapter_slots=4, adapter_cache_bytes=3 * adapter.n_bytes
    )
    predicted = footprint(spec, config).fixed.adapters
    assert in_a_process(most_of_adapters, config, tmp_path / "a") == pytest.approx(predicted, rel=0.1)
    assert footprint(spec, replace(config, ranks=2, adapter_cache_bytes=0)).fixed.adapters < predicted / 2


@needs_kernels
@pytest.mark.parametrize(
    ("quantization", "element_bytes"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 / 8 + 2 * 4 / 128),  # with a scale and an offset
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 2),  # kept as floats
    ],
)
def test_stored_codes_take_their_bits(quantization: dict[str, Any], element_bytes: float, tmp_path: Path) -> None:
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    plain, stored = (
        footprint(read_spec(folder), RankGroupConfig("", kv_tokens=1)).fixed.weights
        for folder in (BUNDLED_MODEL, tmp_path)
    )
    spec = read_spec(tmp_path)
    in_layers = matrix_elements(spec, 1, two_tables=False) - local_vocabulary(spec.vocab_size, 1) * spec.hidden_size
    assert plain - stored == pytest.approx(in_layers * (2 - element_bytes), abs=1)


def test_several_ranks_split_memory_except_shared_kv_heads() -> None:
    spec = read_spec(BUNDLED_MODEL)
    whole, half = (footprint(spec, RankGroupConfig("", ranks=n, kv_tokens=1, device="cuda")) for n in (1, 2))
    assert half.kv_token * 2 == whole.kv_token == 2048
    tables = 4096 * spec.head_dim * 4  # tables for the positions that are served by default
    assert half.fixed.weights - tables == (whole.fixed.weights - tables) / 2
    adapted = footprint(spec, RankGroupConfig("", kv_tokens=1, device="cuda", adapter_slots=4, adapter_max_rank=8))
    assert adapted.fixed.adapters == 4 * 8 * factor_elements(spec, 1) * 2
    of_half, of_whole = half.of_worker(100, host_cache=7), whole.of_worker(100)
    assert of_half.server == of_whole.server + (176 << 20)  # torchrun
    assert of_half.total == 2 * half.on_rank(100).total + of_half.server + 7
