"""Compiles `page_out.c` into a library next to the kernels, for every CPU of the target.

The build hook of every installation runs it, and `make kernels`.
"""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
LIBRARY = _FOLDER.parent / "librz_paging.so"
_BASELINES = {"linux-x86_64": ("x86-64", "x86_64"), "linux-aarch64": ("armv8-a", "generic")}  # for `cc` and zig
_FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-shared")


def build_paging() -> None:
    """Compile. Raises RuntimeError with the compiler's output on a failure."""
    kernels = runpy.run_path(str(_FOLDER.with_name("build.py")))
    baseline = _BASELINES.get(kernels["target"]())
    if baseline is None:
        return
    compiler = kernels["system_compiler"]() or kernels["packaged_compiler"]("gnu.2.17")
    made = LIBRARY.with_suffix(".so.new")
    command = [*compiler(kernels["CpuTarget"]("", *baseline)), str(_FOLDER / "page_out.c"), *_FLAGS, "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed on page_out.c:\n{done.stderr}")
    made.replace(LIBRARY)  # processes that use the old library keep its file


if __name__ == "__main__":
    build_paging()
