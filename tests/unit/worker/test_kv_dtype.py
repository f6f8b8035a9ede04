"""Effects of `RYZANSTEIN_KV_DTYPE`: the format of the ranks, whose blocks are exchanged, memory before the start."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from services.common.lifecycle import StartupError
from services.compute.backends.collectives import SingleRank
from services.compute.backends.kv_format import find_kv_format
from services.compute.backends.opening import open_backend
from services.compute.model.build import load_model
from services.compute.model.footprint import footprint
from services.compute.model.registry import describe
from services.compute.ranks.config import RankGroupConfig
from services.worker.native.opening import served_model
from services.worker.native.startup import group_config, read_model
from services.worker.settings import WorkerSettings
from tests.models import BUNDLED_MODEL

FILES = read_model(BUNDLED_MODEL)


def config(**settings: str) -> RankGroupConfig:
    return group_config(WorkerSettings(model=str(BUNDLED_MODEL), **settings), FILES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "dtype", "device", "format_name"),
    [
        ("auto", "bfloat16", "cpu", ""),
        ("bf16", "bfloat16", "cpu", ""),
        ("bf16", "float32", "cpu", "bfloat16"),
        ("int8", "float32", "cpu", "int8"),
        ("int8", "bfloat16", "cuda", "int8"),
        ("fp8", "bfloat16", "cuda", "fp8"),
    ],
)
def test_the_ranks_are_told_of_a_format_of_its_own(setting: str, dtype: str, device: str, format_name: str) -> None:
    assert config(kv_dtype=setting, dtype=dtype, device=device).kv_format == format_name


def test_floats_of_eight_bits_are_refused_on_a_cpu_and_unknown_names_everywhere() -> None:
    with pytest.raises(StartupError, match="RYZANSTEIN_KV_DTYPE fp8: CPUs convert 8-bit floats slowly; use int8"):
        config(kv_dtype="fp8", device="cpu")
    with pytest.raises(ValueError, match="'auto', 'bf16', 'int8' or 'fp8'"):
        WorkerSettings(model="m", kv_dtype="int4")  # type: ignore[arg-type]


def test_blocks_of_different_formats_are_never_exchanged() -> None:
    settings = (
        {"dtype": "bfloat16"},
        {"dtype": "float32"},
        {"kv_dtype": "int8"},
        {"kv_dtype": "fp8", "device": "cuda"},
    )
    roots = [served_model(FILES, config(**{"dtype": "bfloat16"} | one)).hash_root for one in settings]
    assert all(one != other for one, other in combinations(roots, 2))
    assert served_model(FILES, config(dtype="bfloat16", kv_dtype="bf16")).hash_root == roots[0]


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_the_memory_is_known_before_the_start(kv_dtype: str) -> None:
    ranks = config(dtype="float32", kv_dtype=kv_dtype, device="cpu")
    backend = open_backend(torch.float32, torch.device("cpu"), find_kv_format(ranks.kv_format))
    predicted = footprint(FILES.spec, ranks)
    cache = load_model(describe(BUNDLED_MODEL), SingleRank(), backend).make_cache(1, 16)  # and the null block
    assert 2 * 16 * predicted.kv_token == sum(layer.nbytes for layer in cache.layers)
    assert predicted.kv_format == ranks.kv_format
    assert predicted.of_worker(16).kv == 16 * predicted.kv_token
