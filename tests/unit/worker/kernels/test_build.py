"""Compiling the kernels: with what is there, or with a compiler from the package registry; never half."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from services.worker.kernels import attention, bfloat16, build
from services.worker.kernels.bfloat16 import AMX, AVX2, AVX512, AVX512_BF16

PROJECT = Path(__file__).resolve().parents[4]
needs_compiler = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64") or build.required_packages() != [],
    reason="this machine has no C compiler that knows the target, or another architecture",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the kernels' folder, without a library."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    shutil.copytree(build.FOLDER / "source", tmp_path / "source")
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    return tmp_path


def _only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None) -> None:
    """Nothing on the PATH but this `cc`."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    if compiler:
        (bin_ / "cc").write_text(compiler)
        (bin_ / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_))


OLD = "#!/bin/sh\necho \"error: bad value 'sapphirerapids' for '-march=' switch\" >&2\nexit 1\n"


@pytest.mark.parametrize("compiler", [None, OLD], ids=["none", "too old"])
def test_without_a_compiler_one_is_asked_of_the_package_registry(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None
) -> None:
    _only(folder, monkeypatch, compiler)
    assert build.required_packages() == [build.COMPILER]
    assert build.COMPILER.startswith("ziglang==")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"no C compiler that knows sapphirerapids.*pip install ziglang=="):
        build.build_kernels()
    assert not list(folder.glob("*.so*"))


@needs_compiler
def test_a_compiler_is_enough(folder: Path) -> None:
    assert build.required_packages() == []
    build.build_kernels()
    assert {path.name for path in folder.glob("*.so*")} == {AMX.name, AVX512_BF16.name, AVX512.name, AVX2.name}


@needs_compiler
@pytest.mark.parametrize(
    ("line", "words"),
    [("int wrong(void) { return missing; }", "missing"), ("static int unused(void) { return 1; }", "unused")],
    ids=["error", "warning"],
)
def test_a_broken_source_is_an_error_in_the_compilers_words(folder: Path, line: str, words: str) -> None:
    """The library that was there before stays."""
    (folder / AMX.name).write_bytes(b"old")
    with (folder / "source" / "rows.c").open("a") as source:
        source.write(line)
    with pytest.raises(RuntimeError, match=rf"failed on the kernels:(.|\n)*rows\.c(.|\n)*{words}"):
        build.build_kernels()
    assert (folder / AMX.name).read_bytes() == b"old"


@pytest.mark.parametrize(("system", "machine"), [("Linux", "aarch64"), ("Darwin", "x86_64")])
def test_other_machines_need_nothing_and_get_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, system: str, machine: str
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    _only(folder, monkeypatch, None)
    assert build.required_packages() == []
    build.build_kernels()
    assert not list(folder.glob("*.so*"))


def test_for_another_machine_this_one_has_no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are built on other machines than they run on."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setenv("RYZANSTEIN_TARGET", "linux-x86_64")
    assert build.required_packages() == [build.COMPILER]
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("RYZANSTEIN_TARGET", "linux-aarch64")
    assert build.required_packages() == []
    build.build_kernels()
    assert not list(folder.glob("*.so*"))


@pytest.mark.skipif((platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="no kernels here")
@pytest.mark.parametrize("library", [AMX, AVX512_BF16, AVX512, AVX2], ids=lambda path: path.stem)
def test_the_installation_has_them(library: Path) -> None:
    """Also where the CPU could not run them: the libraries are made for where they will run."""
    assert library.exists(), "run `make kernels`"
    names = {*bfloat16.SIGNATURES, "rz_enable"} | (
        {*attention._FUNCTIONS.values()} if library in (AVX512, AVX2) else set()
    )
    assert {name for name in names if name.encode() in library.read_bytes()} == names


@needs_compiler
@pytest.mark.parametrize("name", ["avx512_bf16", "avx512", "avx2"])
def test_the_compiler_keeps_the_fetching_of_keys_ahead(name: str) -> None:
    """gcc leaves out calls of a function that only fetches, and attention waits for memory twice as long."""
    source, compiler = build.FOLDER / "source", build._system_compiler() or build._packaged_compiler()
    folder, target = build.TARGETS[name]
    includes = (f"-I{source / folder}", f"-I{source}")
    command = [*compiler(target), str(source / folder / "attention.c"), "-O3", *includes, "-S", "-o", "-"]
    assert "prefetcht1" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
