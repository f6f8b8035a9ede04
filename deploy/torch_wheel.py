"""Chooses torch's wheel: a machine without a GPU needs no CUDA libraries, which pip's default brings.

``python deploy/torch_wheel.py [auto|cpu|cuda [REQUIREMENTS]]`` prints the options for ``pip install`` and says on
stderr what was chosen: `auto` takes what is installed already, then the CUDA wheel where a GPU is seen, else the CPU
wheel. The release is the workers', or the one that a file of requirements names.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # TORCH_INDEX names another
CHOICES = ("auto", "cpu", "cuda")
CPU_SIZE = "about 200 MB"
CUDA_SIZE = "about 2,700 MB with CUDA's libraries, 4,900 MB installed"
# An index that does not answer costs seconds: pip's own limits, and one for names that are not resolved.
PROBE = ("--timeout", "3", "--retries", "0")
PROBE_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Wheel:
    """Arguments for pip, and a message for the user."""

    options: tuple[str, ...]
    about: str


def choose(wanted: str, pin: str, gpu: bool, installed: str, index: str, target: Sequence[str] = ()) -> Wheel:
    """The wheel for `pin` (``torch==X``); `installed` is the version at hand or empty, `target` pip's platform options.

    Raises ValueError for an unknown `wanted`.
    """
    if wanted not in CHOICES:
        raise ValueError(f"TORCH is {wanted!r}; allowed are {', '.join(CHOICES)}")
    release = pin.removeprefix("torch==")
    if wanted == "auto" and installed.split("+")[0] == release:
        return Wheel((), f"{installed} is installed already")
    if wanted == "cuda" or (wanted == "auto" and gpu):
        return Wheel((f"torch=={release},!={release}+cpu",), f"{release} for CUDA, {CUDA_SIZE}")
    return _cpu(f"{release}+cpu", index, target)


def _cpu(release: str, index: str, target: Sequence[str]) -> Wheel:
    """From a folder that pip knows, from an index that pip knows, or from `index`."""
    exact = (f"torch=={release}",)
    if release in _offered(["--no-index", *target]):
        return Wheel(exact, f"{release} from pip's find-links, {CPU_SIZE}")
    if release in _offered(target):
        return Wheel(exact, f"{release} from pip's own index, {CPU_SIZE}")
    if release in _offered(["--index-url", index, *target]):
        return Wheel(("--extra-index-url", index, *exact), f"{release} from {index}, {CPU_SIZE}")
    return Wheel(
        (),
        f"WARNING: {index} does not answer or has no {release}; pip takes its default wheel, {CUDA_SIZE} on x86-64. "
        "TORCH_INDEX names another index, PIP_FIND_LINKS a folder of wheels",
    )


def _offered(options: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *PROBE, "index", "versions", "torch"]
    try:
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=PROBE_LIMIT_S)
    except subprocess.TimeoutExpired:
        return []
    [listed, *_] = [line for line in done.stdout.splitlines() if line.startswith("Available versions:")] or [":"]
    return [name.strip() for name in listed.partition(":")[2].split(",")]


def sees_gpu(root: Path = Path("/")) -> bool:
    """Whether a driver for NVIDIA GPUs has made its device files, or Windows has lent its own to this Linux."""
    return any(root.glob("dev/nvidia[0-9]*")) or (root / "usr/lib/wsl/lib/libcuda.so.1").exists()


def torch_pin(requirements: Path | None = None) -> str:
    """The requirement (``torch==X``) that the workers have, or that is a line of a file."""
    if requirements is None:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        lines = extras["worker"]
    else:
        lines = requirements.read_text().splitlines()
    [pin] = [line for line in lines if line.startswith("torch==")]
    return str(pin)


def main() -> None:
    """As the module says."""
    wanted, *files = sys.argv[1:] or ["auto"]
    pin = torch_pin(*map(Path, files))
    if sys.platform != "linux":
        return  # elsewhere there is one kind of wheel
    try:
        installed = version("torch")
    except PackageNotFoundError:
        installed = ""
    try:
        wheel = choose(wanted, pin, sees_gpu(), installed, os.environ.get("TORCH_INDEX", CPU_INDEX))
    except ValueError as error:
        sys.exit(str(error))
    print(f"torch: {wheel.about}", file=sys.stderr)
    print(*wheel.options)


if __name__ == "__main__":
    main()
