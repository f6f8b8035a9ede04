"""The choice of kernels: ours wherever they apply, torch's elsewhere, and the log says which and why."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from services.compute.backends.batch import StepBatch
from services.compute.backends.collectives import SingleRank
from services.compute.backends.cpu.attention import PagedAmx
from services.compute.backends.cpu.backend import KernelBackend, OneDnnBackend
from services.compute.backends.opening import open_backend
from services.compute.cpu import has_amx, has_avx2, has_avx512, has_avx512_bf16, has_neon, has_neon_bf16, has_vectors
from services.compute.kernels import attention, bfloat16
from services.compute.model.build import load_model
from services.compute.model.registry import describe
from tests.shell import captured
from tests.unit.compute.model.harness import CPU
from tests.unit.compute.model.zoo import write_checkpoint

PROJECT = Path(__file__).resolve().parents[4]
HASWELL = "flags\t\t: fpu sse2 avx2 fma f16c bmi2"
SKYLAKE = f"{HASWELL} avx512f avx512bw avx512cd avx512vl avx512dq avx512_vnni"
COOPER_LAKE = f"{SKYLAKE} avx512_bf16"
MADE_FOR = {
    "AMX": "AMX tiles",
    "AVX512_BF16": "AVX-512 bfloat16",
    "AVX512": "AVX-512",
    "AVX2": "AVX2",
    "NEON_BF16": "NEON bfloat16",
    "NEON": "NEON",
}
_CAN = {
    "AMX": has_amx,
    "AVX512_BF16": has_avx512_bf16,
    "AVX512": has_avx512,
    "NEON_BF16": has_neon_bf16,
    "NEON": has_neon,
}
BEST = next((name for name, can in _CAN.items() if can()), "AVX2")
needs_kernels = pytest.mark.skipif(not has_vectors(), reason="this CPU has neither AVX2 nor NEON")
needs_x86 = pytest.mark.skipif(not has_avx2(), reason="this CPU has no AVX2")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    shape = {"hidden_size": 256, "intermediate_size": 1536, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    write_checkpoint(transformers.LlamaConfig(**shape, **heads), folder)
    return folder


@needs_kernels
def test_available_kernels_are_used_and_logged(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        backend = open_backend(torch.bfloat16, CPU)
        load_model(describe(checkpoint), SingleRank(), backend)
    assert isinstance(backend, KernelBackend)
    assert f"kernels: ours for {MADE_FOR[BEST]}" in caplog.messages
    assert f"attention: {'PagedAmx' if has_amx() else 'PagedVectors'}" in caplog.messages


def test_another_dtype_is_served_by_torch_and_our_attention(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        backend = open_backend(torch.float32, CPU)
        load_model(describe(checkpoint), SingleRank(), backend)
    assert type(backend) is OneDnnBackend
    assert "kernels: torch's, because the dtype is float32" in caplog.messages
    assert f"attention: {'PagedVectors' if has_vectors() else 'PagedSdpa'}" in caplog.messages


def _pretend(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As such a CPU's /proc/cpuinfo reads."""
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: flags if str(path) == "/proc/cpuinfo" else read(path))


def test_elsewhere_torch_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _pretend("", monkeypatch)
    with caplog.at_level(logging.INFO):
        backend = open_backend(torch.bfloat16, CPU)
    assert type(backend) is OneDnnBackend
    assert "kernels: torch's, because this CPU has neither AMX tiles nor AVX2 nor NEON" in caplog.messages


@needs_x86
@pytest.mark.parametrize(
    ("flags", "name", "whole"),
    [(HASWELL, "AVX2", "AVX2"), (SKYLAKE, "AVX512", "AVX512"), (COOPER_LAKE, "AVX512_BF16", "AVX512")],
    ids=["AVX2", "AVX-512", "AVX-512 bfloat16"],
)
def test_a_cpu_without_amx_uses_its_best_supported_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flags: str, name: str, whole: str
) -> None:
    """Loaded, not run: this CPU may be another. Attention alone in float32 takes the widest registers."""
    opened = []
    monkeypatch.setattr(attention, "load_library", lambda path, threads, dtype: opened.append((path, dtype)))
    _pretend(flags, monkeypatch)
    with caplog.at_level(logging.INFO):
        backend = open_backend(torch.bfloat16, CPU)
    assert isinstance(backend, KernelBackend)
    assert not backend.kernels.amx
    assert f"kernels: ours for {MADE_FOR[name]}" in caplog.messages
    for dtype in (torch.bfloat16, torch.float32):
        attention.open_attention(dtype)
    assert opened == [(getattr(bfloat16, name), torch.bfloat16), (getattr(bfloat16, whole), torch.float32)]


@pytest.mark.parametrize(
    ("flags", "name"),
    [("Features\t: fp asimd", "NEON"), ("Features\t: fp asimd bf16", "NEON_BF16")],
    ids=["plain", "bfloat16"],
)
def test_a_cpu_of_arm_gets_its_libraries(monkeypatch: pytest.MonkeyPatch, flags: str, name: str) -> None:
    opened = []
    monkeypatch.setattr(bfloat16, "load_library", lambda path, threads: opened.append(path))
    monkeypatch.setattr(attention, "load_library", lambda path, threads, dtype: opened.append(path))
    _pretend(flags, monkeypatch)
    assert bfloat16.why_not(torch.bfloat16) == ""
    assert attention.serves(torch.float32, 80)
    bfloat16.open_kernels()
    for dtype in (torch.bfloat16, torch.float32):
        attention.open_attention(dtype)
    assert opened == [getattr(bfloat16, name), getattr(bfloat16, name), bfloat16.NEON]


def test_on_another_device_torch_serves(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cuda")
    with caplog.at_level(logging.INFO):
        assert open_backend(torch.bfloat16, device).device == device
    assert "kernels: torch's and ours in Triton, because the device is cuda" in caplog.messages


@needs_kernels
def test_a_missing_library_is_an_error_on_a_supported_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in MADE_FOR:
        monkeypatch.setattr(bfloat16, name, tmp_path / getattr(bfloat16, name).name)
    with pytest.raises(RuntimeError, match=r"librz_\w+\.so is missing: run `make kernels`"):
        open_backend(torch.bfloat16, CPU)


@needs_kernels
def test_attention_is_used_alone_where_supported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert attention.serves(dtype, 80)
        attention.open_attention(dtype)
    assert not attention.serves(torch.float32, 84)
    assert not attention.serves(torch.float32, 264)
    assert not attention.serves(torch.float16, 80)
    for name in MADE_FOR:
        monkeypatch.setattr(bfloat16, name, tmp_path / getattr(bfloat16, name).name)
    with pytest.raises(RuntimeError, match=r"librz_\w+\.so is missing: run `make kernels`"):
        attention.open_attention(torch.float32)
    monkeypatch.setattr(attention, "has_vectors", lambda: False)
    assert not attention.serves(torch.float32, 80)


@needs_kernels
def test_too_many_threads_are_an_error() -> None:
    """More than the operating system lets a process have; in a process of its own, for a pool never shrinks."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "from pathlib import Path; from services.compute.kernels import bfloat16\n"
        f"bfloat16.load_library(bfloat16.{BEST}, 100_000)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert "RuntimeError: the kernels cannot start 100000 threads" in done.stderr


def test_blocks_that_the_kernel_cannot_read_are_refused(kernels: bfloat16.Bfloat16Kernels) -> None:
    batch = StepBatch(*[torch.zeros(1, dtype=torch.int64)] * 3, (0, 1), (1,), torch.zeros(1, 1, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="blocks of 24 positions"):
        PagedAmx(None, kernels).plan(batch, 24, None)  # type: ignore[arg-type]


# Linux grants no tile registers to a process with a signal stack on which they could not be saved.
_REFUSED = """
import ctypes, logging, sys
class SignalStack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
area = ctypes.create_string_buffer(4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(SignalStack(ctypes.addressof(area), 0, 4096)), None) == 0

from pathlib import Path
import torch
from services.compute.backends.cpu.backend import OneDnnBackend
from services.compute.backends.opening import open_backend
from services.compute.model.build import load_model
from services.compute.model.registry import describe
from services.compute.backends.collectives import SingleRank
from tests.unit.compute.model.harness import CPU, CachedDecoder
from tests.unit.compute.model.zoo import prompt

logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
backend = open_backend(torch.bfloat16, CPU)
assert type(backend) is OneDnnBackend
model = load_model(describe(Path(sys.argv[1])), SingleRank(), backend)
def run(chunks):
    return CachedDecoder(model, block_tokens=16).run(prompt(120, 300), chunks)
expected = run([])
assert expected.isfinite().all()
for chunks in ([1, 2, 3], [64], [33, *[1] * 40], [31, 32]):
    assert torch.equal(run(chunks), expected), chunks
"""


def test_where_the_operating_system_refuses_tiles_torch_serves_with_a_warning(amx: None, checkpoint: Path) -> None:
    """Rows do not depend on their company then, either."""
    done = captured([sys.executable, "-c", _REFUSED, str(checkpoint)], cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    assert "WARNING the operating system refuses the tile registers: torch's kernels serve" in done.stderr
    assert "INFO kernels: torch's, because the operating system refuses the tile registers" in done.stderr
