"""The dtype that is served is one that the CPU computes in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from services.compute import cpu
from services.compute.backends.cpu.ops import OneDnnOps
from services.compute.backends.weights import Dense, Stacked
from services.worker.native.startup import group_config, read_model
from services.worker.settings import WorkerSettings
from tests.models import BUNDLED_MODEL

WESTMERE = "flags\t\t: fpu sse2 sse4_2"
ZEN_3 = f"{WESTMERE} avx2 fma f16c bmi2"
SKYLAKE = ZEN_3 + " avx512f avx512bw avx512cd avx512vl avx512dq"
COOPER_LAKE = SKYLAKE + " avx512_vnni avx512_bf16"
SAPPHIRE_RAPIDS = COOPER_LAKE + " amx_tile amx_bf16 amx_int8 avx512vbmi"
SIERRA_FOREST = ZEN_3 + " avx_ne_convert"
GRAVITON_2 = "Features\t: fp asimd"
GRAVITON_3 = GRAVITON_2 + " bf16 sve"


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text
    text = f"processor\t: 0\n{request.param}\n"
    monkeypatch.setattr(
        Path, "read_text", lambda path, *a, **k: text if str(path) == "/proc/cpuinfo" else read(path, *a, **k)
    )


def dtype(**settings: str) -> str:
    return group_config(WorkerSettings(model=str(BUNDLED_MODEL), **settings), read_model(BUNDLED_MODEL)).dtype


@pytest.mark.parametrize("machine", [WESTMERE, GRAVITON_2, "no flags here"], indirect=True)
def test_a_cpu_that_is_slow_in_bfloat16_serves_float32_unless_told_otherwise(machine: None) -> None:
    assert not cpu.has_bfloat16()
    assert dtype(device="cpu") == "float32"
    assert dtype(device="cpu", dtype="bfloat16") == "bfloat16"
    assert dtype(device="cuda") == "bfloat16"


@pytest.mark.parametrize(
    "machine", [ZEN_3, SKYLAKE, COOPER_LAKE, SAPPHIRE_RAPIDS, SIERRA_FOREST, GRAVITON_3], indirect=True
)
def test_a_cpu_without_bfloat16_units_serves_bfloat16_by_default(machine: None) -> None:
    assert dtype(device="cpu") == "bfloat16"
    assert dtype(device="cpu", dtype="float32") == "float32"


@pytest.mark.parametrize("machine", [WESTMERE, ZEN_3, SKYLAKE, COOPER_LAKE, SAPPHIRE_RAPIDS], indirect=True)
def test_each_kind_of_kernels_needs_all_of_its_flags(machine: None, request: pytest.FixtureRequest) -> None:
    flags = request.node.callspec.params["machine"]
    assert cpu.has_amx() == ("amx_tile" in flags)
    assert cpu.has_avx512_bf16() == ("avx512_bf16" in flags)
    assert cpu.has_avx2() == ("avx2" in flags)


def test_reported_cpu_features_equal_those_of_onednn() -> None:
    assert cpu.has_bfloat16() == torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_multiplied_on_this_cpu(dtype: torch.dtype) -> None:
    """Without our kernels, in the formats that are left; a product of small integers is exact."""
    weight, x = (torch.randint(-3, 4, shape).to(dtype) for shape in ((40, 32), (5, 32)))
    product = OneDnnOps(dtype).linear(Stacked((Dense(weight),)), None)
    assert torch.equal(product(x), F.linear(x.double(), weight.double()).to(dtype))
