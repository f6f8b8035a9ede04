"""Compiles our kernels into libraries beside this file, one for each kind of CPU.

Runs in the build hook of every installation, and by itself (``python services/worker/kernels/build.py``) after a
change of ``source/``. Machines of other architectures get none and use torch's kernels.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Compiler = Callable[[str], list[str]]  # the command for a kind of CPU

FOLDER = Path(__file__).resolve().parent
COMPILER = "ziglang==0.17.0"  # a C compiler from the package registry, where the machine has none
# Each gets what is in source/ and in a folder of it, for the CPUs that a compiler knows by this name.
TARGETS = {
    "amx": ("amx", "sapphirerapids"),  # the first with tile registers
    "avx512_bf16": ("avx512_bf16", "cooperlake"),  # the first with AVX-512 for bfloat16
    "avx512": ("avx", "x86-64-v4"),  # Intel's servers since 2017
    "avx2": ("avx", "x86-64-v3"),  # Intel's since 2013, AMD's since 2015
}
_FLAGS = ("-O3", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden", "-lm", "-lpthread")


def required_packages() -> list[str]:
    """What must be installed before `build_kernels` can run."""
    return [] if not _wanted() or _system_compiler() else [COMPILER]


def build_kernels() -> None:
    """Compile `source/`; raises RuntimeError with the compiler's words when that fails."""
    if not _wanted():
        return
    compiler = _system_compiler() or _packaged_compiler()
    for name, (folder, cpu) in TARGETS.items():
        _compile(compiler(cpu), folder, name)


def _compile(command: list[str], folder: str, name: str) -> None:
    source = FOLDER / "source"
    sources = [str(path) for path in (*sorted((source / folder).glob("*.c")), *sorted(source.glob("*.c")))]
    made = FOLDER / f"librz_{name}.so.new"
    command = [*command, *sources, *_FLAGS, f"-I{source / folder}", f"-I{source}", "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed on the kernels:\n{done.stderr}")
    made.replace(FOLDER / f"librz_{name}.so")  # a process that has the old one open keeps it


def target() -> str:
    """The machine that is built for; images are built for another one than this at times (``RYZANSTEIN_TARGET``)."""
    return os.environ.get("RYZANSTEIN_TARGET") or _this_machine()


def _this_machine() -> str:
    return f"{platform.system().lower()}-{platform.machine()}"


def _wanted() -> bool:
    return target() == "linux-x86_64"


def _system_compiler() -> Compiler | None:
    """The machine's own compiler, unless it is too old to know the targets or for another machine."""
    path = shutil.which("cc")
    if path is None or target() != _this_machine():
        return None
    for _, cpu in TARGETS.values():
        probe = [path, f"-march={cpu}", "-x", "c", "-c", "-o", "/dev/null", "-"]
        knows = subprocess.run(probe, input="#include <immintrin.h>\n", capture_output=True, text=True, check=False)
        if knows.returncode:
            return None
    return lambda cpu: [path, f"-march={cpu}"]


def _packaged_compiler() -> Compiler:
    if importlib.util.find_spec("ziglang") is None:
        raise RuntimeError(f"no C compiler that knows {TARGETS['amx'][1]}: install one, or pip install {COMPILER}")
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.17"]
    return lambda cpu: [*command, f"-mcpu={cpu.replace('-', '_')}"]


if __name__ == "__main__":
    build_kernels()
