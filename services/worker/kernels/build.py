"""Compiles our kernels into one library beside this file.

Runs in the build hook of every installation, and by itself (``python services/worker/kernels/build.py``) after a
change of ``source/``. Machines of other architectures get none and use torch's kernels.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
COMPILER = "ziglang==0.17.0"  # a C compiler from the package registry, where the machine has none
_TARGET = "sapphirerapids"  # the first CPUs with tile registers
_FLAGS = ("-O3", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden", "-lm", "-lpthread")


def required_packages() -> list[str]:
    """What must be installed before `build_kernels` can run."""
    return [] if not _wanted() or _system_compiler() else [COMPILER]


def build_kernels() -> None:
    """Compile `source/`; raises RuntimeError with the compiler's words when that fails."""
    if not _wanted():
        return
    compiler = _system_compiler() or _packaged_compiler()
    sources = [str(path) for path in sorted((FOLDER / "source").glob("*.c"))]
    made = FOLDER / "librz_tiles.so.new"
    done = subprocess.run([*compiler, *sources, *_FLAGS, "-o", str(made)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(compiler)} failed on the kernels:\n{done.stderr}")
    made.replace(FOLDER / "librz_tiles.so")  # a process that has the old one open keeps it


def _wanted() -> bool:
    return platform.system() == "Linux" and platform.machine() == "x86_64"


def _system_compiler() -> list[str] | None:
    """The machine's own compiler, unless it is too old to know the target."""
    path = shutil.which("cc")
    if path is None:
        return None
    command = [path, f"-march={_TARGET}"]
    probe = [*command, "-x", "c", "-c", "-o", "/dev/null", "-"]
    knows = subprocess.run(probe, input="#include <immintrin.h>\n", capture_output=True, text=True, check=False)
    return command if knows.returncode == 0 else None


def _packaged_compiler() -> list[str]:
    if importlib.util.find_spec("ziglang") is None:
        raise RuntimeError(f"no C compiler that knows {_TARGET}: install one, or pip install {COMPILER}")
    return [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.17", f"-mcpu={_TARGET}"]


if __name__ == "__main__":
    build_kernels()
