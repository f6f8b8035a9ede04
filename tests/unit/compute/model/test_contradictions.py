"""A config.json that contradicts itself or its tensors is refused by its key, and what loads computes numbers.

Every value of every family's configuration is replaced by values that are wrong in every way a file can be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.compute.backends.base import ModelBackend
from services.compute.backends.collectives import SingleRank
from services.compute.backends.opening import open_backend
from services.compute.model.build import load_model
from services.compute.model.families.config import Config
from services.compute.model.formats.registry import read_layouts
from services.compute.model.layers.rope import check_tables
from services.compute.model.registry import describe, read_spec
from services.compute.model.spec import ModelError, ModelSpec, RopeSpec
from tests.unit.compute.model.conftest import Sample
from tests.unit.compute.model.harness import CPU, CachedDecoder

Json = dict[str, Any]
WRONG: tuple[Any, ...] = (
    *(0, -1, 1, 10**6, 10**12, 10**400, 2.5, float("nan"), float("inf"), "4", True, None, [], [{}], {}),
)
LISTS = ("layer_types", "no_rope_layers", "mlp_only_layers", "moe_layers")
# One variant for each way in which families read their keys, and for each kind of rope.
VARIANTS = (
    *("llama", "mistral", "mixtral", "qwen2_sliding", "qwen3_moe", "gemma", "gemma2", "gemma3", "phi3_longrope"),
    *("gpt2", "gpt_neox", "olmo2", "granite", "smollm3", "llama_dynamic", "llama_llama3", "llama_yarn_mscale"),
    *("falcon_grouped", "mpt", "glm4_moe", "qwen2_moe", "hunyuan_v1_dense"),
)


def _places(values: Json, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _places(value, (*path, key))
        if not isinstance(value, str | list) or key in LISTS or path:
            yield (*path, key)


def _changed(config: Json, path: tuple[str, ...], value: Any) -> Json:
    changed: Json = json.loads(json.dumps(config))
    section = changed
    for name in path[:-1]:
        section = section[name]
    section[path[-1]] = value
    return changed


def _compute(folder: Path, spec: ModelSpec, backend: ModelBackend) -> torch.Tensor:
    """The logits of a prompt that is no longer than the model allows."""
    n = min(20, spec.max_positions)
    model = load_model(describe(folder), SingleRank(), backend, max_positions=n)
    hidden = CachedDecoder(model, n_blocks=8).run([index % model.spec.vocab_size for index in range(n)], [])
    return hidden if model.spec.bidirectional else model.logits(hidden)


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_value_of_any_key_is_computed_or_refused_by_name(
    variant: str, sample: Callable[[str], Sample], tmp_path: Path
) -> None:
    folder, backend = sample(variant).folder, open_backend(torch.float32, CPU)
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    config, refused, wrong = json.loads((folder / "config.json").read_text()), 0, []
    computed: list[tuple[ModelSpec, Any]] = []  # arguments of a model's loading
    for path in _places(config):
        for value in WRONG:
            changed = _changed(config, path, value)
            (tmp_path / "config.json").write_text(json.dumps(changed))
            try:
                spec = read_spec(tmp_path)  # the server's part, before any rank starts
                if (meant := (spec, changed.get("num_nextn_predict_layers"))) in computed:
                    continue  # most values that are not refused change nothing
                computed.append(meant)
                if not _compute(tmp_path, spec, backend)[:, :99].isfinite().all():
                    wrong.append((path, value, "computes no numbers"))
            except ModelError as error:
                refused += 1
                named = path[-1] in str(error) or re.search(r"\.(weight|bias): (missing|not used)", str(error))
                if value is not None and not named:
                    wrong.append((path, value, str(error)))
            except Exception as error:  # noqa: BLE001 - what this test is about
                wrong.append((path, value, f"{type(error).__name__}: {error}"))
    assert not wrong
    assert refused > 50


def test_any_value_of_a_quantization_is_read_or_refused_by_name() -> None:
    files = sorted((Path(__file__).parent / "formats" / "published").glob("*.jsonl"))
    published = [json.loads(line)["quantization_config"] for file in files for line in file.read_text().splitlines()]
    refused, wrong = 0, []
    for values in published:
        for path in _places(values):
            for value in WRONG:
                config = Config({"quantization_config": _changed(values, path, value)}, Path("config.json"))
                try:
                    read_layouts(config)
                    config.finish()
                except ModelError as error:
                    refused += 1
                    if value is not None and path[-1] not in str(error):
                        wrong.append((path, value, str(error)))
                except Exception as error:  # noqa: BLE001 - what this test is about
                    wrong.append((path, value, f"{type(error).__name__}: {error}"))
    assert not wrong
    assert refused > 500


def test_tables_that_do_not_fit_are_rejected_before_allocation() -> None:
    rope = RopeSpec(theta=1e4, rotary_dim=128)
    check_tables([rope], 131_072, 1 << 30)
    with pytest.raises(ModelError, match=r"max_position_embeddings: tables of 2147483647 positions take .* 1,024 MiB"):
        check_tables([rope], 2**31 - 1, 1 << 30)
