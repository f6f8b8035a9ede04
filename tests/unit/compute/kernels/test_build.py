"""Compiling the kernels: with what is there, or with a compiler from the package registry; never half."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from services.compute.kernels import build, library, signatures
from services.compute.kernels.bfloat16 import AMX, AVX2, AVX512, AVX512_BF16, NEON
from services.compute.kernels.library import FUNCTIONS

_LIBRARY = AVX2 if build.target() == "linux-x86_64" else NEON  # every machine of the kind runs it
PROJECT = Path(__file__).resolve().parents[4]
has_kernels = pytest.mark.skipif(build.target() not in build.TARGETS, reason="no kernels are for this kind of machine")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the kernels' folder, without a library."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("RYZANSTEIN_KERNEL_CACHE", raising=False)
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


@pytest.fixture
def smallest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder for one kind of CPU, with one source; the installation compiles all of them for all kinds."""
    for source in (folder / "source").rglob("*.c"):
        if source.name != "pick.c":
            source.unlink()
    kind = _LIBRARY.stem.removeprefix("librz_")
    monkeypatch.setitem(build.TARGETS, build.target(), {kind: build.TARGETS[build.target()][kind]})
    return folder


OLD = "#!/bin/sh\necho \"error: bad value 'sapphirerapids' for '-march=' switch\" >&2\nexit 1\n"


@pytest.mark.parametrize("compiler", [None, OLD], ids=["none", "too old"])
def test_a_compiler_is_taken_from_the_package_registry_when_the_machine_has_no_compiler(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None
) -> None:
    _only(folder, monkeypatch, compiler)
    assert build.required_packages() == [build.COMPILER]
    assert build.COMPILER.startswith("ziglang==")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"no C compiler that knows sapphirerapids.*pip install ziglang=="):
        build.build_kernels()
    assert not list(folder.glob("*.so*"))


@has_kernels
@pytest.mark.needs("cc")
def test_a_compiler_is_enough(smallest: Path) -> None:
    assert build.required_packages() == []
    build.build_kernels()
    assert [path.name for path in smallest.glob("*.so*")] == [_LIBRARY.name]


@has_kernels
@pytest.mark.parametrize(
    ("line", "words"),
    [("int wrong(void) { return missing; }", "missing"), ("static int unused(void) { return 1; }", "unused")],
    ids=["error", "warning"],
)
def test_a_broken_source_is_an_error_in_the_compilers_words(smallest: Path, line: str, words: str) -> None:
    """The library that was there before stays."""
    (smallest / _LIBRARY.name).write_bytes(b"old")
    with (smallest / "source" / "pick.c").open("a") as source:
        source.write(line)
    with pytest.raises(RuntimeError, match=rf"failed on the kernels:(.|\n)*pick\.c(.|\n)*{words}"):
        build.build_kernels()
    assert (smallest / _LIBRARY.name).read_bytes() == b"old"


@has_kernels
def test_a_cached_library_is_recompiled_only_after_a_change(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RYZANSTEIN_KERNEL_CACHE", str(tmp_path / "cache"))
    build.build_kernels()
    compiled = (smallest / _LIBRARY.name).read_bytes()
    (smallest / _LIBRARY.name).unlink()
    with monkeypatch.context() as without:
        without.setattr(build, "_compile", None)
        build.build_kernels()
    assert (smallest / _LIBRARY.name).read_bytes() == compiled
    with (smallest / "source" / "pick.c").open("a") as source:
        source.write("int wrong(void) { return missing; }")
    with pytest.raises(RuntimeError, match="missing"):
        build.build_kernels()
    assert (smallest / _LIBRARY.name).read_bytes() == compiled
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize(("system", "machine"), [("Linux", "riscv64"), ("Darwin", "x86_64")])
def test_unsupported_machines_build_no_kernels(
    folder: Path, monkeypatch: pytest.MonkeyPatch, system: str, machine: str
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    _only(folder, monkeypatch, None)
    assert build.required_packages() == []
    build.build_kernels()
    assert not list(folder.glob("*.so*"))


def test_cross_compilation_finds_no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are built on other machines than they run on."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setenv("RYZANSTEIN_TARGET", "linux-x86_64")
    assert build.required_packages() == [build.COMPILER]
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("RYZANSTEIN_TARGET", "linux-aarch64")
    assert build.required_packages() == [build.COMPILER]
    monkeypatch.setenv("RYZANSTEIN_TARGET", "linux-riscv64")
    assert build.required_packages() == []
    build.build_kernels()
    assert not list(folder.glob("*.so*"))


@pytest.mark.skipif((platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="no kernels here")
@pytest.mark.parametrize("path", [AMX, AVX512_BF16, AVX512, AVX2], ids=lambda path: path.stem)
def test_the_installation_has_the_libraries(path: Path) -> None:
    """Also where the CPU could not run them: the libraries are made for where they will run."""
    assert path.exists(), "run `make kernels`"
    names = {function.name for function in FUNCTIONS}
    if path not in (AVX512, AVX2):
        names.remove("rz_attend_float")
    assert {name for name in names if name.encode() in path.read_bytes()} == names
    assert signatures.fingerprint(FUNCTIONS).encode() in path.read_bytes()


@pytest.mark.needs("objdump")  # part of every compiler but the packaged one
@pytest.mark.skipif(build.target() != "linux-x86_64", reason="another compiler")
@pytest.mark.parametrize("path", [AVX512_BF16, AVX2], ids=lambda path: path.stem)  # one for each source
def test_the_compiler_keeps_the_fetching_of_keys_ahead(path: Path) -> None:
    """gcc leaves out calls of a function that only fetches, and attention waits for memory twice as long."""
    command = ["objdump", "--disassemble", str(path)]
    assert "prefetcht1" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_library_of_other_sources_is_rejected() -> None:
    with pytest.raises(RuntimeError, match=r"libc10.so was compiled from other sources"):
        library.open_library(Path(torch.__file__).parent / "lib" / "libc10.so", 1)


def test_the_packaged_compiler_compiles_for_the_asked_library_and_cpu() -> None:
    kind = next(iter(build.TARGETS[build.target()].values()))
    command = build.packaged_compiler("gnu.2.28")(kind)
    assert command[1:4] == ["-m", "ziglang", "cc"]
    assert command[-2].endswith("-linux-gnu.2.28")
    assert command[-1] == f"-mcpu={kind.mcpu}"


@has_kernels
def test_a_library_of_other_signatures_is_refused(smallest: Path) -> None:
    """Python calls as the header declares, so a library that another header made is never called."""
    header = smallest / "source" / "kernels.h"
    header.write_text(header.read_text().replace("long width, int64_t *keys", "int64_t *keys, long width"))
    with pytest.raises(RuntimeError, match=r"conflicting types"):
        build.build_kernels()  # the compiler holds the functions to it
    ours, others = (signatures.fingerprint(made) for made in (FUNCTIONS, signatures.read_functions(header)))
    assert ours != others
    path = smallest / _LIBRARY.name
    path.write_bytes(_LIBRARY.read_bytes().replace(ours.encode(), others.encode()))
    with pytest.raises(RuntimeError, match=r"was compiled from other sources: run `make kernels`"):
        library.open_library(path, 1)


def test_a_parameter_that_python_cannot_pass_is_named(tmp_path: Path) -> None:
    header = tmp_path / "kernels.h"
    for parameters, words in (
        ("long m, double x", "x is double"),
        ("long *m[3]", r"cannot read the parameter 'long \*m\[3\]'"),
    ):
        header.write_text(f"void rz_new({parameters});\n")
        with pytest.raises(ValueError, match=f"rz_new: {words}"):
            signatures.read_functions(header)


def test_every_exported_function_is_declared() -> None:
    """Of those that are defined in C, none is missing in the header, by which Python and replays call."""
    defined = {
        name
        for path in (build.FOLDER / "source").rglob("*.c")
        for name in re.findall(r"^EXPORT (?:void|int|long) (rz_\w+)\(", path.read_text(), re.MULTILINE)
    }
    assert defined == {function.name for function in FUNCTIONS}
