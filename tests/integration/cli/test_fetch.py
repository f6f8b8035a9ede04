"""`ryzanstein fetch` against a hub over HTTP: a model is there whole, or not at all."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from services.cli.errors import CommandError
from services.cli.fetch.download import progress
from services.cli.fetch.repository import ModelReference
from services.common.hub import Listing, RemoteFile
from services.common.keys import RedisKeys
from services.compute.model.loading.hub import resolve_model
from services.router.start_reports import read_download
from services.worker.native.startup import model_revision
from tests.integration.cli.hub import COMMIT, NEXT_COMMIT, Hub, running
from tests.integration.router.processes import KillableRedis

COMMAND = str(Path(sys.executable).parent / "ryzanstein")
WEIGHTS = random.Random(0).randbytes(400_000)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"model": {}}',
    "model.safetensors": WEIGHTS,
    "1_Pooling/config.json": b"{}",
    "pytorch_model.bin": b"a pickle",
    "original/consolidated.safetensors": b"the same again",
    "README.md": b"words",
}
WANTED = {"config.json", "tokenizer.json", "model.safetensors", "1_Pooling/config.json", ".complete"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running(Hub(dict(FILES))) as hub:
        yield hub


def start(hub: Hub, to: Path, *options: str, model: str = "org/tiny", **env: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1", "HOME": str(to), **env}
    environment.pop("HF_HUB_OFFLINE", None) if "HF_HUB_OFFLINE" not in env else None
    command = [COMMAND, "fetch", model, "--to", str(to), *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fetch(hub: Hub, to: Path, *options: str, model: str = "org/tiny", **env: str) -> tuple[int, str, str]:
    process = start(hub, to, *options, model=model, **env)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def leftovers(to: Path) -> list[Path]:
    return [path for path in to.iterdir() if path.name.startswith((".tmp-", ".link-"))]


def has_come(to: Path, *names: str) -> bool:
    """Whether the hub's library has files of an unfinished fetch, and its records of them."""
    folders = [folder / ".cache" / "huggingface" / "download" for folder in leftovers(to)]
    records = [folder / f"{name}.metadata" for folder in folders for name in names]
    return bool(records) and all(record.is_file() and record.stat().st_size for record in records)


def test_a_model_is_fetched_once_and_then_needs_no_network(hub: Hub, tmp_path: Path) -> None:
    code, out, err = fetch(hub, tmp_path)
    assert (code, out) == (0, f"{tmp_path}/org--tiny\n"), err
    assert f"org/tiny@main is commit {COMMIT}: 4 files" in err
    folder = tmp_path / "org--tiny"
    assert contents(folder.resolve()) == WANTED
    assert folder.resolve().name == f"org--tiny@{COMMIT[:12]}"
    assert {name: (folder / name).read_bytes() for name in WANTED & FILES.keys()} == {
        name: FILES[name] for name in WANTED & FILES.keys()
    }
    assert leftovers(tmp_path) == []
    requests = len(hub.requests)
    hub.commit = NEXT_COMMIT  # main moves on: what is there stays, so that all workers have the same
    assert fetch(hub, tmp_path, HF_HUB_OFFLINE="1")[:2] == (0, f"{tmp_path}/org--tiny\n")
    assert len(hub.requests) == requests
    code, out, _ = fetch(hub, tmp_path, "--as", "chat")
    assert (code, out) == (0, f"{tmp_path}/chat\n")
    assert str((tmp_path / "chat").readlink()) == f"org--tiny@{NEXT_COMMIT[:12]}"
    assert str(folder.readlink()) == f"org--tiny@{COMMIT[:12]}"


def test_truncated_damaged_or_failed_download_is_retried_until_complete(hub: Hub, tmp_path: Path) -> None:
    hub.truncate["model.safetensors"] = 1
    hub.damage["tokenizer.json"] = 1
    hub.fail["/api/models/org/tiny/revision/main"] = 1
    code, _, err = fetch(hub, tmp_path)
    assert code == 0, err
    assert "tokenizer.json is" in err
    assert "trying again in 1 s" in err
    assert (tmp_path / "org--tiny/model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent["model.safetensors"] == 2  # the second time from the middle on
    assert hub.sent["config.json"] == 1


def test_a_hash_that_stays_wrong_leaves_no_model(hub: Hub, tmp_path: Path) -> None:
    hub.damage["model.safetensors"] = 99
    code, out, err = fetch(hub, tmp_path, "--retries", "1")
    assert (code, out) == (1, "")
    assert "sha256 of model.safetensors is" in err.splitlines()[-1]
    assert not (tmp_path / "org--tiny").exists()
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


def test_two_at_once_download_once(hub: Hub, tmp_path: Path) -> None:
    hub.behind_gate = "model.safetensors"
    first = start(hub, tmp_path)
    assert hub.waiting.wait(120)
    second = start(hub, tmp_path, "--as", "other")
    assert second.stderr is not None
    assert "another process fetches it; waiting" in second.stderr.readline()
    hub.open_gate.set()
    for process, name in ((first, "org--tiny"), (second, "other")):
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out) == (0, f"{tmp_path}/{name}\n"), err
    assert hub.sent["model.safetensors"] == 1


def test_routers_hear_of_a_download_in_a_pod(hub: Hub, tmp_path: Path, redis_server: KillableRedis) -> None:
    hub.behind_gate = "model.safetensors"
    pod = {"RYZANSTEIN_SERVED_MODEL_NAME": "tiny", "RYZANSTEIN_REDIS_URL": redis_server.url_of("worker")}
    process = start(hub, tmp_path / "models", **pod)
    with Redis.from_url(redis_server.url) as client:
        key = RedisKeys("default").download("tiny")
        while not (text := client.get(key)) or not json.loads(text)["done"]:
            assert process.poll() is None
            threading.Event().wait(0.05)
        assert json.loads(text)["of"] == sum(len(FILES[name]) for name in WANTED - {".complete"})
        assert (report := read_download(text))
        assert report.stage == "fetching"
    redis_server.kill()
    hub.open_gate.set()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_signal_stops_the_fetch_at_once_and_the_next_fetch_continues(
    hub: Hub, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    hub.behind_gate = "model.safetensors"
    process = start(hub, tmp_path)
    assert hub.waiting.wait(120)
    while not has_come(tmp_path, *(WANTED & FILES.keys() - {"model.safetensors"})):
        assert process.poll() is None
        threading.Event().wait(0.02)
    process.send_signal(number)
    process.communicate(timeout=120)  # the rest of the file never comes
    assert process.returncode == status
    assert not (tmp_path / "org--tiny").exists()
    assert len(leftovers(tmp_path)) == 1
    hub.open_gate.set()
    code, _, err = fetch(hub, tmp_path)
    assert code == 0, err
    assert contents((tmp_path / "org--tiny").resolve()) == WANTED
    assert leftovers(tmp_path) == []
    assert hub.sent["config.json"] == 1, "what had come was fetched again"


def test_fetch_errors_suggest_a_remedy(hub: Hub, tmp_path: Path) -> None:
    hub.token = "secret"
    code, _, err = fetch(hub, tmp_path, HF_TOKEN="wrong")
    assert (code, err) == (
        1,
        "ryzanstein: org/tiny: no such repository, or a private one that HF_TOKEN gives no access to\n",
    )
    assert "no revision v9" in fetch(hub, tmp_path, "--revision", "v9", HF_TOKEN="secret")[2]
    assert "HF_HUB_OFFLINE forbids" in fetch(hub, tmp_path, HF_HUB_OFFLINE="1")[2]
    (tmp_path / "taken").mkdir()
    assert "taken is in the way" in fetch(hub, tmp_path, "--as", "taken")[2]
    del hub.files["model.safetensors"]
    assert "no config.json with safetensors and no GGUF file to serve" in fetch(hub, tmp_path, HF_TOKEN="secret")[2]
    assert not (tmp_path / "org--tiny").exists()


@pytest.mark.parametrize(
    ("text", "revision", "name"),
    [
        ("org/tiny", "", "org--tiny"),
        ("hf://org/tiny@v1", "", "org--tiny@v1"),
        ("org/tiny", "refs/pr/3", "org--tiny@refs--pr--3"),
        ("hf://org/tiny-GGUF:Q4_K_M@v1", "", "org--tiny-GGUF--Q4_K_M@v1"),
    ],
)
def test_the_name_is_known_without_asking(text: str, revision: str, name: str) -> None:
    assert ModelReference.parse(text, revision).name == name


@pytest.mark.parametrize(
    "text", ["tiny", "/models/tiny", "a/b/c", "../b", "hf://org/tiny@v1@v2", "org/tiny@v2", "org/tiny:"]
)
def test_invalid_hub_reference_is_rejected(text: str) -> None:
    with pytest.raises(CommandError, match="not a model of the hub like owner/name"):
        ModelReference.parse(text, "v1")


def test_chosen_gguf_model_is_fetched_with_all_parts_and_served(hub: Hub, tmp_path: Path) -> None:
    parts = [f"Q8_0/tiny-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    hub.files = {"tiny-Q4_K_M.gguf": WEIGHTS, "tiny-Q4_0.gguf": b"more", "README.md": b"words"}
    hub.files |= {"config.json": b"{}", "mmproj-tiny.gguf": b"eyes"} | dict.fromkeys(parts, WEIGHTS[:99])
    code, _, err = fetch(hub, tmp_path)
    assert code == 1
    assert "3 GGUF models fit ''; choose with MODEL:NAME, such as :Q4_K_M, among" in err
    assert "no GGUF file fits 'Q6_K'" in fetch(hub, tmp_path, model="hf://org/tiny:Q6_K")[2]
    for choice, names in (("Q4_K_M", ["tiny-Q4_K_M.gguf"]), ("q8_0", parts)):
        code, out, err = fetch(hub, tmp_path, model=f"hf://org/tiny:{choice}")
        assert (code, out) == (0, f"{tmp_path}/org--tiny--{choice}\n"), err
        folder = tmp_path / f"org--tiny--{choice}"
        assert contents(folder.resolve()) == {*names, ".complete"}
        assert resolve_model(str(folder)) == folder.resolve() / names[0]
        assert model_revision("", resolve_model(str(folder))) == COMMIT
    assert set(hub.sent) == {"tiny-Q4_K_M.gguf", *parts}
    assert fetch(hub, tmp_path, model="org/tiny:q8_0", HF_HUB_OFFLINE="1")[0] == 0


def test_progress_is_told(tmp_path: Path) -> None:
    reported: list[str] = []
    listing = Listing(COMMIT, (RemoteFile("model.safetensors", 2_000_000_000, "", ""),))
    with progress(tmp_path, listing, reported.append, 0.02):
        (tmp_path / "part").write_bytes(b"")
        os.truncate(tmp_path / "part", 500_000_000)
        while not reported:
            threading.Event().wait(0.01)
    assert any(line.startswith("0.5 of 2.0 GB (25%), ") for line in reported)


def test_the_worker_reads_a_fetched_folder_without_the_hubs_code(hub: Hub, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path)[0] == 0
    model = str(tmp_path / "org--tiny")
    assert resolve_model(model) == Path(model).resolve()
    look = (
        "import asyncio, sys\nfrom services.worker.native.startup import model_folder\n"
        f"asyncio.run(model_folder({model!r}, ''))\n"
        "print([name for name in sys.modules if name.startswith('huggingface')])"
    )
    answer = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"
    assert model_revision("", resolve_model(model)) == COMMIT
