"""Compiles our kernels into libraries next to this file, one for each kind of CPU.

The build hook of every installation runs it; after a change of ``source/`` run ``python
services/compute/kernels/build.py``. There are kernels for x86-64 and 64-bit ARM; other machines use torch's kernels.

Compiling takes two minutes of a core. The folder ``RYZANSTEIN_KERNEL_CACHE``, which the Makefile names, keeps what was
compiled by a hash of all that it was made from: the installation, the images' wheels and the tests compile once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

Compiler = Callable[["CpuTarget"], list[str]]  # the command for a kind of CPU

FOLDER = Path(__file__).resolve().parent
COMPILER = "ziglang==0.17.0"  # a C compiler from the package registry, for machines without one


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """A kind of CPU. Its library contains the sources in `source/` and in one folder of it."""

    folder: str
    march: str  # name for `cc`
    mcpu: str  # name for zig


_X86_64 = {
    "amx": CpuTarget("amx", "sapphirerapids", "sapphirerapids"),  # first CPUs with tile registers
    "avx512_bf16": CpuTarget("dot", "cooperlake", "cooperlake"),  # first CPUs with AVX-512 for bfloat16
    "avx512": CpuTarget("fma", "x86-64-v4", "x86_64_v4"),  # Intel servers since 2017
    "avx2": CpuTarget("fma", "x86-64-v3", "x86_64_v3"),  # Intel CPUs since 2013, AMD CPUs since 2015
}
_AARCH64 = {
    "neon_bf16": CpuTarget(
        "dot", "armv8.2-a+bf16", "generic+v8_2a+bf16"
    ),  # Neoverse V1 and N2, Graviton 3, Apple CPUs since M2
    "neon": CpuTarget("fma", "armv8-a", "generic"),  # all CPUs
}
# Targets by the machine of the build's result.
TARGETS = {"linux-x86_64": _X86_64, "linux-aarch64": _AARCH64}
_PROBES = {"linux-x86_64": "#include <immintrin.h>\n", "linux-aarch64": "#include <arm_neon.h>\n"}
_FLAGS = (
    "-O3",
    "-Wall",
    "-Wextra",
    "-Wmissing-prototypes",
    "-Werror",
    "-fPIC",
    "-fvisibility=hidden",
    "-lm",
    "-lpthread",
)


def required_packages() -> list[str]:
    """Packages that `build_kernels` needs."""
    return [] if target() not in TARGETS or system_compiler() else [COMPILER]


def build_kernels() -> None:
    """Compile `source/` for all kinds of CPU. Raises RuntimeError with the compiler's output on a failure."""
    if target() not in TARGETS:
        return
    compiler = system_compiler() or packaged_compiler("gnu.2.17")

    def build(name: str) -> None:
        library = FOLDER / f"librz_{name}.so"
        made = library.with_suffix(".so.new")
        compile_kernels(compiler, TARGETS[target()][name], made, "-shared")
        made.replace(library)  # processes that use the old library keep its file

    with ThreadPoolExecutor(os.cpu_count()) as compilers:
        list(compilers.map(build, TARGETS[target()]))


def compile_kernels(compiler: Compiler, kind: CpuTarget, made: Path, *more: str) -> None:
    """Compile `source/` for a kind of CPU into `made`, or take it from the cache.

    `more`: options, and paths of sources besides. Raises RuntimeError with the compiler's output on a failure.
    """
    cache = os.environ.get("RYZANSTEIN_KERNEL_CACHE")
    if not cache:
        _compile(compiler, kind, made, more)
        return
    cached = Path(cache) / _made_from([*compiler(kind), *_FLAGS], kind.folder, more)
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            fresh = Path(folder) / made.name
            _compile(compiler, kind, fresh, more)
            fresh.replace(cached)  # two builds at once store the same
    shutil.copyfile(cached, made)


def _made_from(command: Sequence[str], folder: str, more: Sequence[str]) -> str:
    """Hash of everything that decides what a compiler makes: itself, its options, every source."""
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    sources = sorted((FOLDER / "source").rglob("*.[ch]"))
    besides = [Path(word) for word in more if Path(word).is_file()]
    words = [version, *command, folder, *(word for word in more if Path(word) not in besides)]
    digest = hashlib.sha256("\0".join(words).encode())
    for path in (*sources, *besides, Path(__file__), Path(__file__).with_name("signatures.py")):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _compile(compiler: Compiler, kind: CpuTarget, made: Path, more: Sequence[str]) -> None:
    source = FOLDER / "source"
    sources = [str(path) for path in (*sorted((source / kind.folder).glob("*.c")), *sorted(source.glob("*.c")))]
    with tempfile.TemporaryDirectory() as generated:
        (Path(generated) / "calls.h").write_text(_calls_header(source / "kernels.h"))
        includes = [f"-I{folder}" for folder in (source / kind.folder, source, generated)]
        command = [*compiler(kind), *sources, *more, *_FLAGS, *includes, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed on the kernels:\n{done.stderr}")


def _calls_header(header: Path) -> str:
    signatures = runpy.run_path(
        str(Path(__file__).with_name("signatures.py"))
    )  # run as a file, because our package may not be installed during the build
    return str(signatures["calls_header"](signatures["read_functions"](header)))


def target() -> str:
    """The machine that will run the kernels: ``RYZANSTEIN_TARGET``, set when images are cross-built, or this one."""
    return os.environ.get("RYZANSTEIN_TARGET") or _this_machine()


def _this_machine() -> str:
    return f"{platform.system().lower()}-{platform.machine()}"


def system_compiler() -> Compiler | None:
    """The machine's own compiler; None when it does not know all targets or the target is another machine."""
    path = shutil.which("cc")
    if path is None or target() != _this_machine():
        return None
    for kind in TARGETS[target()].values():
        probe = [path, f"-march={kind.march}", "-x", "c", "-c", "-o", "/dev/null", "-"]
        knows = subprocess.run(probe, input=_PROBES[target()], capture_output=True, text=True, check=False)
        if knows.returncode:
            return None
    return lambda kind: [path, f"-march={kind.march}"]


def packaged_compiler(libc: str) -> Compiler:
    """The compiler from the package registry, for `target()` and `libc`. Raises RuntimeError when not installed."""
    if importlib.util.find_spec("ziglang") is None:
        newest = next(iter(TARGETS[target()].values())).march
        raise RuntimeError(f"no C compiler that knows {newest}: install one, or pip install {COMPILER}")
    system, machine = target().split("-")
    command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-{system}-{libc}"]
    return lambda kind: [*command, f"-mcpu={kind.mcpu}"]


if __name__ == "__main__":
    build_kernels()
